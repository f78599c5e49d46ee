"""Ledger of a run whose buffer has ended, from the end of its journal."""

from pathlib import Path
from typing import Any

from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.monitor.status import ledger_amounts
from evolver_async.buffer.stages import numbers_of, source_of
from evolver_async.buffer.state.machine import BufferState
from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.errors import Inconsistency


class NoLedger(LookupError):
    """The ledger cannot be read; the message says why."""


def final_ledger(run_dir: Path, config: Config) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the number of groups by state, and the ledger as STATUS has it.

    Raises NoLedger.
    """
    reader = JournalReader(run_dir / "journal")
    if not reader.numbers:
        raise NoLedger(f"{run_dir.name} has no journal, so its ledger is not known")
    try:
        stages = [stage_config(config, index) for index in range(len(config.stages))]
        state = BufferState(
            run_dir.name,
            config.run.seed,
            [numbers_of(c, s.kind) for c, s in zip(stages, config.stages, strict=True)],
            [source_of(stage) for stage in stages],
        )
        for record, location in reader.replayed():
            state.apply(record, location)
    except (JournalError, OSError, ValueError, LookupError, Inconsistency) as error:
        raise NoLedger(f"the ledger is not readable: {error or type(error).__name__}") from error
    counts = {name: len(groups) for name, groups in state.replay.by_state.items()}
    return counts, ledger_amounts(state)
