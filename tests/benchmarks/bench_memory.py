"""Predicted memory of a run's processes against measured peaks, for models of different shapes.

    python tests/benchmarks/bench_memory.py [CASE …]
    python tests/benchmarks/bench_memory.py --model models/SmolLM2-135M-Instruct [KEY=VALUE …]

With `--model` a few steps of `configs/arithmetic.yaml`, and the estimated seconds of a step beside
those of the last one. Else trains a few steps of the bandit with each case. Samples the anonymous
memory of every process and the files of `weights.dir`. A pass fills its token budget in every case
of the bandit, so activations are those of the plan. Names of cases as arguments choose some of
them. With vLLM's Python its cases are run as well, and its processes count to their actor.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import psutil
from memory_samples import Peak, measured

from evolver_async.config.load import load, load_written
from evolver_async.config.shape import shape_of
from evolver_async.launch.pace import Pace, step_estimate
from evolver_async.memory.plan import MemoryPlan, memory_plan
from evolver_async.metrics.tail import Tail

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "bandit.yaml"
MIB = 1 << 20
SHORT = ("stages.0.steps=1", "stages.1.steps=3", "eval.every=0", "metrics.panel=none")
SMALL_BATCH = (
    *("rollout.group_size=4", "learner.minibatches=1", "actors.groups=2", "actors.count=1"),
    *("learner.groups_per_step=4", "stages.0.override.learner.groups_per_step=16"),
    *("learner.token_budget=512", "engine.prefill_tokens=512"),
)
MILLIONS_21 = (
    *("policy.hidden_size=512", "policy.layers=6", "policy.heads=8"),
    *("policy.intermediate_size=1536", *SMALL_BATCH),
)
CASES: dict[str, tuple[str, ...]] = {
    "tiny": ("learner.token_budget=4096",),
    "21M": MILLIONS_21,
    "21M, adapters": (*MILLIONS_21, "policy.lora.rank=8"),
    "21M, critic and reference": (
        *(*MILLIONS_21, "loss.kl_coef=0.1"),
        *("advantage={kind: gae}", "critic.kind=separate"),
    ),
    "21M, two ranks": (*MILLIONS_21, "learner.ranks=2"),
}
ARITHMETIC = ROOT / "configs" / "arithmetic.yaml"
MODEL = (
    *("stages.0.steps=3", "eval.every=0", "eval.at_start=never", "metrics.panel=none"),
    *("eval.episodes=1", "eval.final_episodes=0", "selection.kind=all"),
    f"tasks.path={ROOT / 'configs' / 'rows' / 'sums.jsonl'}",
)
VLLM = (*MILLIONS_21, "engine.kind=vllm")
if importlib.util.find_spec("vllm"):
    CASES["21M, vLLM"] = VLLM
    CASES["21M, vLLM, two workers"] = (*VLLM, "engine.tensor_parallel=2", "weights.kind=collective")


def main(names: list[str]) -> None:
    load1 = psutil.getloadavg()[0]
    print(f"{psutil.cpu_count()} cores, load {load1:.1f} before the first case")
    if names[:1] == ["--model"]:
        run("model", ARITHMETIC, [f"policy.path={Path(names[1]).resolve()}", *MODEL, *names[2:]])
        return
    for name in names or CASES:
        run(name, RECIPE, [*SHORT, *CASES[name]])


def run(name: str, recipe: Path, changes: list[str]) -> None:
    """Train a case, and print what was predicted beside what was measured."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memory-") as shm,
        tempfile.TemporaryDirectory(prefix="memory-") as runs,
    ):
        dotlist = [*changes, f"weights.dir={shm}", f"run.dir={runs}", "run.name=measured"]
        config = load(recipe, dotlist)
        shape = shape_of(config)
        assert shape is not None
        command = [sys.executable, "-m", "evolver_async.cli", "train", str(recipe), *dotlist]
        peaks, shared = measured(command, Path(shm), dict(os.environ))
        run_dir = Path(runs) / "measured"
        config = load_written(run_dir)  # with the precision that was decided
        plan = memory_plan(config, shape, learner_gpu=False, actor_gpu=False)
        show(name, shape.parameters, plan, peaks, shared)
        pace = Pace.read(run_dir)
        if pace is not None and (estimate := step_estimate(config, pace)) is not None:
            rows = Tail(run_dir / "metrics.jsonl").rows()
            last = [row for row in rows if "time/train_s" in row][-1]
            print(
                f"  a step: estimated {estimate.step_s:.1f} s (playing {estimate.playing_s:.1f},"
                f" training {estimate.training_s:.1f}), the last one waited"
                f" {last['time/wait_s']:.1f} s and trained {last['time/train_s']:.1f} s"
            )


def show(name: str, parameters: int, plan: MemoryPlan, peaks: list[Peak], shared: int) -> None:
    """Print one line a kind of process: the largest peak, and prediction divided by it."""
    print(f"\n{name}: {parameters:,} parameters; MiB predicted, measured, ratio; PSS")
    for one in plan.processes:
        found = [peak for peak in peaks if peak.role == one.role]
        if not found:
            continue
        largest = max(found, key=lambda peak: peak.private)
        print(f"  {one.role:12}{_row(one.private, largest.private)}{largest.pss / MIB:8.0f}")
    print(f"  {'weights.dir':12}{_row(plan.shared, shared)}", flush=True)


def _row(predicted: float, found: float) -> str:
    return f"{predicted / MIB:8.0f}{found / MIB:8.0f}{predicted / max(found, 1):8.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
