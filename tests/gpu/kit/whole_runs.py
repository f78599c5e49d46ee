"""Whole runs on one card: `whole_runs.py FOLDER` writes figures and logs there.

Two runs whose processes are killed, one with weights by CUDA IPC and one by shared memory: nothing
acknowledged may be lost, nothing trained twice. Then the default recipe. Where there is no GPU, the
runs are smaller and on the CPU, and the exit code is 77 instead of 0; 1 where one of them failed.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Figures
from invariants import check_leaks, traces
from launches import COMMAND, Launch, launching
from under_fire import LAUNCHER, Broken, RunUnderFire

ROOT = Path(__file__).parents[3]
GPU = torch.cuda.is_available()
LIMIT_S = float(os.environ.get("LIMIT_S", "540"))
WEIGHTS = {"cuda_ipc": ["weights.kind=cuda_ipc"], "shm": ["weights.kind=shm"]}
if GPU:
    ON_GPU = [
        "engine.device=cuda",
        "learner.device=cuda",
        "launch.gpus={actors: [0, 0], learner: [0]}",
    ]
    VICTIMS = ("actor-0", "learner", "buffer", "actor-1", LAUNCHER)
    LEARNING = ["loss.target_kl=0.2"]
else:
    ON_GPU, VICTIMS = [], ("actor-0", "learner")
    del WEIGHTS["cuda_ipc"]
    LEARNING = ["stages=[{kind: rl, steps: 3}]", "eval={episodes: 4, final_episodes: 4}"]


def under_fire(start: Callable[..., Launch], directory: Path, kind: str, figure: Figures) -> None:
    """Kill each role of a run once. Raises Broken or AssertionError for a promise not kept."""
    began, rng = time.monotonic(), random.Random(0)
    run = RunUnderFire(start, directory / kind, kind, *ON_GPU, *WEIGHTS[kind])
    run.recover()
    for victim in VICTIMS:
        run.strike("kill", victim, rng)
        run.recover()
    story = run.finish()
    figure(f"{kind}: kills survived", len(VICTIMS), "")
    figure(f"{kind}: uses of groups trained", sum(map(len, story.trained.values())), "")
    figure(f"{kind}: run with kills", time.monotonic() - began, "s")


def learns(directory: Path, folder: Path, figure: Figures, limit_s: float) -> None:
    """Train the default recipe; AssertionError where it does not end well, or in time."""
    began, run_dir = time.monotonic(), directory / "default"
    changes = [*ON_GPU, *LEARNING, f"run.dir={directory}", "run.name=default", "metrics.panel=none"]
    command = [*COMMAND, "train", str(ROOT / "configs" / "frozen_lake.yaml"), *changes]
    with open(folder / "default.log", "w", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=limit_s)
    assert done.returncode == 0, f"exit code {done.returncode}: see default.log"
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [row["eval/success"] for row in rows if "eval/success" in row]
    figure("default recipe: success held out", found[-1], "")
    figure("default recipe", time.monotonic() - began, "s")


def main(folder: Path) -> int:
    """Run what fits the limit of time; tell what failed."""
    figure, failed, until = Figures(folder / "runs.jsonl"), 0, time.monotonic() + LIMIT_S
    directory = Path(tempfile.mkdtemp(prefix="kit-", dir="/tmp"))  # short, for the sockets
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    before = traces()
    for kind in WEIGHTS:
        try:
            with launching() as start:
                under_fire(start, directory, kind, figure)
            check_leaks(before)
        except (AssertionError, Broken) as broken:
            failed += 1
            print(f"FAILED {kind}: {broken}", flush=True)
    try:
        learns(directory, folder, figure, until - time.monotonic())
    except (AssertionError, subprocess.TimeoutExpired) as broken:
        failed += 1
        print(f"FAILED default recipe: {broken}", flush=True)
    print(f"{failed} failed; figures are in {figure.path}, runs in {directory}")
    return 1 if failed else 0 if GPU else 77


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
