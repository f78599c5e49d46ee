"""Directories of studies with runs that were never trained, made from numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import END, to_yaml
from evolver_async.runs.watch import runs
from evolver_async.study import directory
from evolver_async.study.cells import cells_of
from evolver_async.study.definition import Definition
from evolver_async.study.directory import CellRun, Study, cold_run, runs_of

STEP_S = 2.0  # of a step of a run
EPISODES = 8  # of a step, each of `TURNS`
TURNS = 3.0
_texts: dict[str, str] = {}  # of configurations by their repr


def made_study(out: Path, definition: Definition) -> Study:
    """A study of default configurations that has begun; nothing has run."""
    cells = cells_of(definition)
    configs = {cell.name: Config(stages=[StageConfig(steps=4)]) for cell in cells}
    study = Study(out, definition, cells, configs)
    directory.begin(study)
    return study


def run_of(study: Study, cell: str, seed: int) -> CellRun:
    return next(one for one in runs_of(study) if one.name == f"{cell}-s{seed}")


def write_run(
    run: CellRun,
    evals: Sequence[float],
    *,
    code: int | None = 0,
    reason: str = "",
    before_s: float = 0.0,
    kind: str = "rl",
    metrics: Mapping[str, Sequence[float]] | None = None,
    config: Config | None = None,
) -> None:
    """A run with an evaluation after each step; `code` is that of its end, None: it was killed.

    `metrics` are further ones, with a value for each step. A run with seconds before it continues
    a cold start.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    cold = [StageConfig(kind="sft", steps=4)] if before_s else []
    config = config or Config(stages=[*cold, StageConfig(steps=4)])
    (run.directory / "config.yaml").write_text(_dumped(config))
    rows = []
    for step, value in enumerate(evals, start=1):
        seconds = before_s + STEP_S * step
        rows.append(
            {
                "step": step,
                "lineage": 1,
                "time_s": seconds,
                "stage": 0.0,
                "stage_kind": kind,
                "train/success": value / 2,
                "ledger/received_turns": EPISODES * TURNS * step,
                "offpolicy/ess": 0.9,
                "offpolicy/kl": 0.01,
                "offpolicy/clip_low": 0.0,
                "offpolicy/clip_high": 0.1,
                "staleness/mean": 1.0,
                "lag_0/tokens": 10.0,
                "lag_0/ess": 1.0,
                "lag_0/kl": 0.0,
                "lag_0/clip_low": 0.0,
                "lag_0/clip_high": 0.0,
                "lag_3-4/tokens": 30.0,
                "lag_3-4/ess": 0.5 + step / 100,
                "lag_3-4/kl": 0.02,
                "lag_3-4/clip_low": 0.1,
                "lag_3-4/clip_high": 0.2,
            }
            | {name: values[step - 1] for name, values in (metrics or {}).items()}
        )
        late = seconds + 100  # evaluations are finished later
        row = {"step": step, "lineage": 1, "eval/success": value, "eval/episodes": 8.0}
        row["eval/distinct"] = 5.0
        rows.append(row | {"time_s": late})
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run.directory / "metrics.jsonl").write_text(lines)
    if code is not None:
        runs.end(run.directory, code, reason)


def _dumped(config: Config) -> str:
    """What `dump` writes, made once for the many runs with the same configuration."""
    if repr(config) not in _texts:
        _texts[repr(config)] = f"{to_yaml(config)}{END}\n"
    return _texts[repr(config)]


def write_cold(study: Study, seed: int, value: float) -> None:
    write_run(cold_run(study, seed), [value / 2, value], kind="sft")
