"""Estimate of a study's time and disk: measured by its finished runs, else roughly from sizes.

The rough one knows the policy that a run makes from scratch, on CPU cores; it is right within a
factor of about three for a run that has two cores. The time of other policies is unknown until a
run is finished.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.memory.units import DTYPE_BYTES, gib

START_S = 25.0  # of a run: imports, the policy, the first episodes
STEP_S = 0.1  # of a learner step beside its tokens
FLOPS = 6e10  # of one core
TOKEN_FLOPS = 10  # per parameter: 2 to sample, 2 for the anchor, 6 to train
TURN_TOKENS = 16  # of an observation
EPISODE_BYTES = 600  # of a trajectory in the journal beside its tokens
TOKEN_BYTES = 12
VOCABULARY = 1043  # of the preset
TRAINED_BYTES = 12  # of a parameter in a checkpoint: its value and two moments of Adam


@dataclass(frozen=True)
class RunEstimate:
    """Time and disk of one run. `seconds` is None if unknown; `source` says where it is from."""

    seconds: float | None
    bytes: float
    source: str


@dataclass(frozen=True)
class StudyEstimate:
    """Time and disk of a cell's run, and of a cold start if the study has them."""

    run: RunEstimate
    cold: RunEstimate | None

    def seconds(self, runs: int, colds: int, jobs: int) -> float | None:
        """Return the time of runs and cold starts, `jobs` at a time; None if it is unknown."""
        parts = [(self.run.seconds, runs), (self.cold and self.cold.seconds, colds)]
        total = 0.0
        for seconds, count in parts:
            if count and seconds is None:
                return None
            total += math.ceil(count / jobs) * (seconds or 0.0)
        return total

    def bytes(self, runs: int, colds: int) -> float:
        return runs * self.run.bytes + colds * (self.cold.bytes if self.cold else 0.0)

    def text(self, runs: int, colds: int, jobs: int) -> str:
        """Return the time and the disk of runs and cold starts in words."""
        disk = f"{gib(self.bytes(runs, colds))} of disk"
        source = self.run.source
        seconds = self.seconds(runs, colds, jobs)
        if seconds is None:
            return f"unknown time (until the first run is finished) and {disk} ({source})"
        at_once = f" with --jobs {jobs}" if jobs > 1 else ""
        return f"about {duration_text(seconds)}{at_once} and {disk} ({source})"


def measured(durations: Sequence[float], directories: Iterable[Path]) -> RunEstimate | None:
    """Return the means of finished runs, None if there are none."""
    if not durations:
        return None
    sizes = [size_of(directory) for directory in directories]
    count = len(durations)
    source = f"measured by {count} finished run{'s' * (count > 1)}"
    return RunEstimate(sum(durations) / count, sum(sizes) / max(1, len(sizes)), source)


def size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def rough(configs: Sequence[Config], first: int = 0, end: int | None = None) -> RunEstimate:
    """Return the mean over cells of stages `first` to `end`, this one left out.

    It is computed from the sizes of models, stages and episodes.
    """
    parts = [_rough(config, range(len(config.stages))[first:end]) for config in configs]
    known = [part.seconds for part in parts if part.seconds is not None]
    seconds = sum(known) / len(known) if len(known) == len(parts) else None
    size = sum(part.bytes for part in parts) / len(parts)
    return RunEstimate(seconds, size, "roughly, from the sizes of the recipe")


def _rough(config: Config, stages: range) -> RunEstimate:
    parameters = _parameters(config)
    seconds: float | None = START_S
    journal = 0.0
    for index in stages:
        stage = stage_config(config, index)
        limits = config.stages[index]
        episodes = limits.steps * stage.learner.groups_per_step * stage.rollout.group_size
        turns = stage.rollout.max_turns
        tokens = min(stage.policy.max_length, turns * (stage.rollout.max_tokens + TURN_TOKENS))
        journal += episodes * (EPISODE_BYTES + TOKEN_BYTES * tokens)
        computed = limits.steps * STEP_S + episodes * tokens / 2 * TOKEN_FLOPS * parameters / FLOPS
        seconds = None if seconds is None or not limits.steps else seconds + computed
    if config.policy.path:
        seconds = None
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    if config.checkpoint.keep_every:
        steps = sum(config.stages[index].steps for index in stages)
        kept += steps // config.checkpoint.keep_every
    trained = 0 if config.policy.lora.rank else kept * parameters * TRAINED_BYTES
    own = 0 if config.policy.path else parameters * DTYPE_BYTES[config.policy.decided_dtype]
    archived = journal if config.buffer.archive == "all" else 0.0
    return RunEstimate(seconds, trained + own + archived, "")


def _parameters(config: Config) -> float:
    """Return the number of a policy's parameters: of the preset, or by the size of its files."""
    policy = config.policy
    if policy.path:
        files = Path(policy.path).glob("*.safetensors")
        return sum(file.stat().st_size for file in files) / DTYPE_BYTES[policy.decided_dtype]
    layer = policy.hidden_size * (4 * policy.hidden_size + 3 * policy.intermediate_size)
    return policy.layers * layer + 2 * VOCABULARY * policy.hidden_size


def duration_text(seconds: float) -> str:
    """Return a time as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
