"""FrozenLake beside TRL's GRPOTrainer: seconds until success on held-out tasks reaches a mark.

`bench_trl.py --time-to .85` runs it. Both train the model of one cold start by
`trl_frozen_lake.yaml`: 3x3 maps, up to three turns of two actions, the whole episode in one
context, 32 groups of 8 a step, four updates, the same tasks, prompts, turn format and rewards.
Success is greedy, on the first `eval.episodes` tasks of the test split, every `eval.every` steps.
With `--latency` each step of the environment takes a lognormal time (σ = 1) with this median; then
ours may run all groups of a step at once, as TRL does, which waits for the slowest of each turn.

Ours is `evolver-async train` with its processes, from the start of the command until the row of the
evaluation is written. TRL's is GRPOTrainer in one process (`peers/trl_frozen_lake.py`), synchronous
as `rollout_func` is, from the beginning of `train`, without its imports and its evaluations. Wall
seconds and processor seconds of all processes. Each is ended after `--limit` wall seconds; then its
best success and all its time are printed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from bench_peers import ROOT, SCRIPTS
from training import call

from evolver_async.config import Config, LatencyConfig
from evolver_async.config.load import dump, load

RECIPE = Path(__file__).parent / "trl_frozen_lake.yaml"
GROUPS = 40  # that each of two actors may run under latency
BATCH = 64  # rows of a forward pass of TRL, all of an update
POLL_S, GRACE_S = 0.2, 60.0


@dataclass(frozen=True)
class Evaluation:
    """Success after a step, and the seconds that it took to get there."""

    step: int
    success: float
    wall_s: float
    used_s: float


def cold_start(config: Config, directory: Path) -> Path:
    """Train the first stage; return the directory of its model."""
    cold = replace(
        config,
        run=replace(config.run, name="cold", dir=str(directory)),
        eval=replace(config.eval, every=0, episodes=1, final_episodes=0),
        stages=config.stages[:1],
    )
    dump(cold, directory / "cold.yaml")
    call("train", str(directory / "cold.yaml"), "metrics.panel=none")
    call("export", str(directory / "cold"), str(directory / "model"))
    return directory / "model"


def tree_s(process: psutil.Process) -> float:
    """Processor seconds of a process and of all that descend from it, ended ones included."""
    used = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += sum(one.cpu_times()[:4])  # its own and those of the children it waited for
    return used


@contextmanager
def running(command: list[str], log: Path) -> Iterator[psutil.Popen]:
    """Run a command, its output in a file; end it with the block."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with log.open("w") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            try:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
                process.wait(GRACE_S)
            except psutil.TimeoutExpired:
                process.kill()


def rows_of(path: Path, key: str) -> list[dict]:
    """Return the rows of a file of JSON lines that have a key, a line half written left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(one) for one in lines if one.startswith('{"') and one.endswith("\n")]
    return [row for row in rows if key in row]


def ours(recipe: Path, mark: float, limit_s: float) -> list[Evaluation]:
    run, found = recipe.parent / "ours", list[Evaluation]()
    command = [sys.executable, "-m", "evolver_async.cli", "train", str(recipe)]
    start = time.perf_counter()
    with running([*command, "metrics.panel=none"], recipe.with_suffix(".ours")) as process:
        while (now := time.perf_counter() - start) < limit_s:
            rows = rows_of(run / "metrics.jsonl", "eval/success")
            for row in rows[len(found) :]:
                found.append(Evaluation(row["step"], row["eval/success"], now, tree_s(process)))
            if any(one.success >= mark for one in found) or process.poll() is not None:
                break
            time.sleep(POLL_S)
    if not found:
        sys.exit(recipe.with_suffix(".ours").read_text())
    return found


def theirs(recipe: Path, mark: float, limit_s: float) -> list[Evaluation]:
    log, start = recipe.with_suffix(".trl"), time.perf_counter()
    python = ROOT / ".venv-peer-trl" / "bin" / "python"
    script = SCRIPTS / "trl_frozen_lake.py"
    with running([str(python), str(script), str(recipe), str(mark), str(BATCH)], log) as process:
        while process.poll() is None and time.perf_counter() - start < limit_s:
            time.sleep(POLL_S)
    found = [Evaluation(**row) for row in rows_of(log, "used_s")]
    if not found:
        sys.exit(log.read_text())
    return found


def report(name: str, found: list[Evaluation], mark: float) -> None:
    """Print when the mark was reached, or else the best success and all the time."""
    reached = [one for one in found if one.success >= mark]
    last = found[-1]
    curve = ", ".join(f"{one.step}: {one.success:.3f} ({one.used_s:.0f} s)" for one in found)
    said = f"{mark:g} after" if reached else f"best {max(one.success for one in found):.3f} in"
    at = reached[0] if reached else last
    print(f"  {name}: {said} {at.step} steps, {at.wall_s:.0f} s, {at.used_s:.0f} processor seconds")
    print(f"    success by step (processor seconds): {curve}", flush=True)


def slowed(config: Config, median_s: float) -> Config:
    """Return a recipe with slow environments and room for all their episodes at once."""
    latency = LatencyConfig(kind="lognormal", median_s=median_s, sigma=1.0)
    return replace(
        config,
        env=replace(config.env, latency=latency),
        actors=replace(config.actors, groups=GROUPS),
        engine=replace(config.engine, slots=GROUPS * config.rollout.group_size),
    )


def race(seed: int, mark: float, limit_s: float, median_s: float) -> None:
    """Train both from one cold start, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = load(RECIPE, [f"run.seed={seed}"])
        model = cold_start(config, directory)
        config = replace(
            config,
            run=replace(config.run, name="ours", dir=str(directory)),
            policy=replace(config.policy, path=str(model)),
            stages=config.stages[1:],
        )
        dump(slowed(config, median_s) if median_s else config, directory / "rl.yaml")
        print(f"seed {seed}, {median_s:g} s of latency:")
        report("ours", ours(directory / "rl.yaml", mark, limit_s), mark)
        report("TRL", theirs(directory / "rl.yaml", mark, limit_s), mark)
