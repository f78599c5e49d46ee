"""What users do between launches: drawn serial runs are stopped, resumed, changed, forked, rerun.

    FAULT_RUNS=400 make faults ARGS=-kdrawn_launches    runs 0 to 399, each with a seed of its own

What is refused names a key and changes no file. What is accepted ends whole, and its steps are
repeated bit by bit from the checkpoint at which its configuration changed last.
"""

import os
import random
import re
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from drawn_options import KEY, OPTIONS, Died, draw, finite_rows
from invariants import check_run

from evolver_async.checkpoint.checkpoints import CheckpointError, resumable, valid
from evolver_async.config import Config
from evolver_async.errors import TrainingError
from evolver_async.launch.forking import fork
from evolver_async.launch.resumption import resume
from evolver_async.launch.run_directory import origin_of
from evolver_async.launch.serial import run
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.results.takes import RecordedTakes
from evolver_async.study.rerun import plan
from learner.diagnostics.step_rows import StepRows
from learner.rerun.main import rerun
from learner.train import Learner

RUNS = int(os.environ.get("FAULT_RUNS", "8"))
LAUNCHES = 2  # before the last one
MOMENTS = [(Learner, "sample"), (Learner, "publish"), (Learner, "save"), (StepRows, "write")]
CHANGES: dict[str, tuple[Any, ...]] = OPTIONS | {
    "learner.lr": ("1e-3", "0"),
    "learner.groups_per_step": (2, 8),
    "buffer.max_staleness": (0, 1, 3),
    "buffer.reuse": (1, 2),
    "actors.count": (1, 3),
    "actors.groups": (1, 5),
    "engine.slots": (1, 64),
    "eval.every": (0, 1, 2),
    "eval.episodes": (2, 6),
    "eval.final_episodes": (0, 6),
    "checkpoint.every": (2, 50),
    "rollout.group_size": (6,),
    "rollout.max_tokens": (3, 8),
    "rollout.temperature": (0.7,),
    "run.seed": (77,),
    "policy.hidden_size": (32,),
    "experience.kind": ("none", "contrast"),
    "safety.action": ("warn", "rollback"),
}
NAMED = re.compile(rf"{KEY.pattern}|\bstages\b|--step\b|no checkpoint\b")
RISING = ("time_s", "progress/env_steps", "progress/tokens", "version", "stage")


class Ending:
    """The end of a launch by a stop signal or death, at the n-th of a kind of moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end: Callable[[], None] | None = None
        self.moment, self.number = "", 0
        for owner, name in MOMENTS:
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def draw(self, rng: random.Random) -> None:
        self.end = rng.choice((_die, _stop, _stop))
        self.moment, self.number = rng.choice(MOMENTS)[1], rng.randint(1, 6)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self.number -= name == self.moment
            if self.end is not None and self.number <= 0:
                end, self.end = self.end, None
                end()
            return result

        return watched


def _die() -> None:
    raise Died


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _changes(rng: random.Random, config: Config) -> list[str]:
    """Draw some changes, most often with one that gives a finished run something to train."""
    keys = rng.sample(sorted(CHANGES), rng.randint(0, 4))
    last, longer = len(config.stages) - 1, config.stages[-1].steps + rng.randint(1, 3)
    more = [f"stages.{last}.steps={longer}", f"stages.{last}.tokens=0"]
    added = [f"stages+={{kind: {rng.choice(('rl', 'sft', 'dpo'))}, steps: 2}}"]
    return [f"{key}={rng.choice(CHANGES[key])}" for key in keys] + rng.choice((more, added, []))


class Launches:
    """The launches of a run, of which forks take the place.

    `since`: the step from which all steps were trained with the present configuration.
    """

    def __init__(self, config: Config, run_dir: Path, rng: random.Random) -> None:
        self.config, self.run_dir, self.rng = config, run_dir, rng
        self.since = 0

    def launch(self) -> None:
        """Train until the launch ends; check what it leaves."""
        try:
            assert run(self.config, self.run_dir) in (0, 128 + signal.SIGTERM)
        except Died:
            print("died")
        except TrainingError as error:
            print("ended:", error)
        check_run(self.run_dir)
        _check_rows(self.run_dir)
        self._check_rerun()

    def prepare(self) -> None:
        """Resume or fork with drawn changes, without those that are refused.

        A run that cannot go on even without changes stays as it is.
        """
        rng, runs = self.rng, self.run_dir.parent
        saved = sorted({manifest.step for _, manifest in valid(self.run_dir / "checkpoints")})
        step = rng.choice((None, None, *saved, "best", 99))
        name = f"fork{len(list(runs.glob('*/config.yaml')))}" if rng.random() < 0.4 else ""
        changes = _changes(rng, self.config) if rng.random() < 0.6 else []
        before = _digests(runs)
        while True:
            print(f"{name or 'resume'} --step {step}", *changes)
            try:
                if name:
                    made = fork(self.run_dir, name, changes, step)
                else:
                    made = resume(self.run_dir, changes, step), self.run_dir
                break
            except (ValueError, CheckpointError) as error:
                print("refused:", error)
                assert NAMED.search(str(error)), f"{changes} are refused, no key is named: {error}"
                assert _digests(runs) == before, f"{changes} are refused: {error}"
                if not changes:
                    return
                named = [one for one in changes if re.split(r"[+=]", one)[0] in str(error)]
                changes.remove(rng.choice(named or changes))
        if name:
            after = _digests(runs)
            assert {path: after.get(path) for path in before} == before, "the old run has changed"
        (self.config, self.run_dir), again = made, not (changes or name)
        found = resumable(self.run_dir / "checkpoints")
        newest = found[-1][1].step if found else 0
        self.since = min(self.since, newest) if again else newest

    def _check_rerun(self) -> None:
        """Train the steps since the newest change again: they are bitwise the same."""
        results = load_run(self.run_dir)
        saved = [manifest.step for _, manifest in resumable(self.run_dir / "checkpoints")]
        begin = min(step for step in (0, *saved) if step >= self.since)
        complete = RecordedTakes(results.history, results.journal).complete
        forked = origin_of(self.run_dir) is not None  # its first weights are in a checkpoint
        if not complete or begin > max(complete) or (begin not in saved and forked):
            return
        outcome = rerun(plan(results, [], (begin + 1, max(complete) + 1)), lambda _: None)
        print(*outcome.lines, sep="\n")
        assert outcome.code == 0, outcome.lines


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_of_drawn_options_goes_on_from_every_end_with_drawn_changes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    drawn = draw(rng, tmp_path, seed)
    print(*drawn.changes, sep="\n")
    ending = Ending(monkeypatch)
    launches = Launches(drawn.config, drawn.run_dir, rng)
    for _ in range(LAUNCHES):
        ending.draw(rng)
        launches.launch()
        launches.prepare()
    ending.end = None
    launches.launch()


def _check_rows(run_dir: Path) -> None:
    """Every lineage counts its steps without a gap, and so does the line that counts."""
    rows = finite_rows(run_dir)
    taken = [row for row in rows if "stage_kind" in row]
    for lineage in {row["lineage"] for row in taken}:
        steps = [row["step"] for row in taken if row["lineage"] == lineage]
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"lineage {lineage}"
    line = [row for row in current_rows(rows) if "stage_kind" in row]
    assert [row["step"] for row in line] == list(range(1, len(line) + 1))
    for name in RISING:
        values = [row[name] for row in line]
        assert values == sorted(values), f"{name} falls: {values}"


def _digests(directory: Path) -> dict[str, str]:
    """The hash of every file, but for the locks of runs."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(one): sha256(one.read_bytes()).hexdigest() for one in files if one.name != "lock"}
