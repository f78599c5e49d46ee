"""Use of vLLM's scheduler and KV cache, as it records them after every step."""

from dataclasses import dataclass
from typing import Any


@dataclass
class EngineUsage:
    """Logger of vLLM's statistics that keeps the newest ones. It outlives restarts of vLLM.

    `waiting`: requests that wait for a place; `kv_use`: share of the KV cache that running requests
    use; `preemptions`: requests that had to give their KV back, since the start of the actor.
    """

    waiting: int = 0
    kv_use: float = 0.0
    preemptions: int = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in a step's statistics; vLLM calls this, with None for unknown values."""
        if scheduler_stats is not None:
            waits = scheduler_stats.num_waiting_reqs, scheduler_stats.num_skipped_waiting_reqs
            self.waiting, self.kv_use = sum(waits), scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def log(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing."""
