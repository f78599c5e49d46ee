"""Two-digit sums with a real model, beside TRL's GRPOTrainer: seconds until a success held out.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_sums.py [MODEL] [--mark .7] [--seeds 0] \\
        [--limit 1500] [--only ours|trl]

MODEL is the directory that `make model` writes. Both learn `configs/rows/sums.jsonl` with the same
model, prompts, reward, group size (8), learning rate and rows of an update (64), one after
the other on the same machine: ours by `configs/arithmetic.yaml`, an actor and a learner of one
thread each, its evaluations included; TRL in an environment of its own, which the first call makes,
with two threads and its fastest batch, evaluations left out.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import psutil
from bench_peers import ROOT, SCRIPTS, install
from bench_trl import PEER
from trl_time_to import Evaluation, ours, report, rows_of, running

from evolver_async.config.load import dump, load

MODEL = "models/SmolLM2-135M-Instruct"
RECIPE = ROOT / "configs" / "arithmetic.yaml"
ROWS = ROOT / "configs" / "rows" / "sums.jsonl"
HELD_OUT, BATCH, UPDATES = 128, 32, 60
THREADS = 2  # of TRL


def train_ours(model: str, directory: Path, mark: float, limit_s: float, seed: int) -> None:
    """Train by the recipe until the mark; print when it was reached."""
    changes = [f"policy.path={model}", f"run.dir={directory}", "run.name=ours", f"run.seed={seed}"]
    changes += [f"tasks.path={directory / 'train.jsonl'}", f"tasks.test={directory / 'test.jsonl'}"]
    changes += [f"eval.episodes={HELD_OUT}", "stages=[{kind: rl, steps: 100}]"]
    dump(load(RECIPE, changes), directory / "sums.yaml")
    report("ours", ours(directory / "sums.yaml", mark, limit_s), mark)


def train_trl(model: str, directory: Path, mark: float, limit_s: float, seed: int) -> None:
    """Train by TRL until the mark; print when it was reached."""
    if problem := install("trl", PEER):
        sys.exit(f"TRL could not be installed: {problem}")
    python = ROOT / ".venv-peer-trl" / "bin" / "python"
    files = [str(directory / name) for name in ("train.jsonl", "test.jsonl")]
    numbers = [str(mark), str(BATCH), str(UPDATES), str(seed)]
    log = directory / "trl.log"
    command = ["env", f"OMP_NUM_THREADS={THREADS}", str(python), str(SCRIPTS / "trl_sums.py")]
    late = contextlib.suppress(psutil.TimeoutExpired)  # what it reached by then is reported
    with late, running([*command, model, *files, *numbers], log) as process:
        process.wait(limit_s)
    found = [Evaluation(**row) for row in rows_of(log, "used_s")]
    report("TRL", found, mark) if found else sys.exit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--mark", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=float, default=1500.0, metavar="SECONDS")
    parser.add_argument("--only", choices=("ours", "trl"))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = ROWS.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len({json.loads(line)["question"] for line in lines}) == len(lines)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "test.jsonl").write_text("".join(lines[:HELD_OUT]))
            (directory / "train.jsonl").write_text("".join(lines[HELD_OUT:]))
            print(f"seed {seed}:", flush=True)
            for who, run in (("ours", train_ours), ("trl", train_trl)):
                if given.only in (None, who):
                    run(os.path.abspath(given.model), directory, given.mark, given.limit, seed)


if __name__ == "__main__":
    main()
