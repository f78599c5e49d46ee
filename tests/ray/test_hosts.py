"""Runs on a cluster of four hosts that loses those of learner, buffer and head in a drawn order.

    HOST_SEEDS=3 make test-ray ARGS=-ktest_hosts    # three minutes a seed; without it none

Nothing acknowledged is lost and nothing is trained twice. Where a run cannot go on by itself it has
saved, and one sentence says what to do, which is done here.
"""

import json
import os
import random
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from invariants import check_run
from launches import Launch
from live import check_repeats, check_updates, write_recipe
from moody import ACKED
from ray_nodes import BUFFER, Hosts, free_port
from under_fire import read_acks

from evolver_async.checkpoint.checkpoints import valid
from evolver_async.wire.keys import make

SEEDS = range(int(os.environ.get("HOST_SEEDS", "0")))
HEADS = ("head", "head and launcher")  # ways to lose it, by turns
GIVES_UP_S = 30  # of Ray without its head's service; the run ends after a third of it


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths())))  # where moody is
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(GIVES_UP_S))
        one = Hosts()
        patch.setenv("RAY_ADDRESS", one.address)
        try:
            yield one
        finally:
            one.end()


def paths() -> list[Path]:
    tests = Path(__file__).parents[1]
    return [tests / "support", tests.parent]


class Run:
    """A run on the hosts, with the step that it had reached and how often it was launched."""

    def __init__(self, start: Callable[..., Launch], directory: Path) -> None:
        make(directory / "keys", [])
        self.start = start
        self.run_dir = directory / "run"
        address = f"tcp://{BUFFER}:{free_port()}"
        places = ["launch.kind=ray", "launch.ray.shared=true", f"buffer.address={address}"]
        places += [f"security.keys={directory}/keys", "run.name=run"]
        places += ["buffer.stall_s=60", "actors.count=1"]
        self.launch = start(self.run_dir, write_recipe(directory), *places)
        self.reached = 0

    def advance(self, steps: int) -> None:
        """Wait until the run is so many steps further than it ever was."""
        goal = self.reached + steps
        while self.reached < goal:
            row = self.launch.wait_for_row(lambda row: "stage_kind" in row, f"step {goal}")
            self.reached = max(self.reached, int(row["step"]))

    def learner_node(self) -> str:
        said = (self.run_dir / "logs" / "launcher.log").read_text()
        return re.findall(r" learner runs on node (\w+)", said)[-1]

    def fail(self) -> str:
        """Wait for the end of the launch, which has saved; what it said."""
        code, errors = self.launch.end()
        assert code == 1, errors
        self.advance_to(self.launch)
        ending = json.loads((self.run_dir / "end.json").read_text())
        assert ending["state"] == "failed" and ending["reason"] in errors
        return errors

    def advance_to(self, launch: Launch) -> None:
        """Note the steps that a launch has left in the metrics."""
        rows = [row for row in launch.rows() if "stage_kind" in row]
        self.reached = max([self.reached, *(int(row["step"]) for row in rows)])

    def saved(self) -> int:
        return valid(self.run_dir / "checkpoints")[-1][1].step

    def resume(self, said: str = "") -> None:
        """Start the run again, by the command of its last line if there is one."""
        command = shlex.split(said.rpartition("continue: ")[2]) if said else []
        arguments = command[2:] or ["--resume", self.run_dir]
        tail, self.launch = self.launch.tail, self.start(self.run_dir, *arguments)
        self.launch.tail = tail


def lose(loss: str, run: Run, hosts: Hosts) -> None:
    """Lose hosts; do what the run says then, or see that it goes on by itself."""
    if loss == "learner":
        host = hosts.host_of(run.learner_node())
        hosts.lose(host)
        run.advance(2)  # which another learner has trained
        hosts.join(host)
    elif loss == "buffer":
        hosts.lose(BUFFER)
        said = run.fail()
        assert f"on {BUFFER}" in said and "buffer.address" in said
        hosts.join(BUFFER)
        run.resume(said)
    elif loss == "head":
        hosts.lose_head()
        said = run.fail()
        assert hosts.address in said and run.saved() == run.reached
        hosts.end()
        hosts.start()
        run.resume(said)
    else:
        run.launch.process.kill()
        run.launch.process.communicate()
        hosts.end()
        hosts.start()
        run.resume()


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_lost_hosts_lose_nothing(
    seed: int, hosts: Hosts, tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    rng = random.Random(seed)
    losses = ["learner", "buffer", HEADS[seed % 2]]
    rng.shuffle(losses)
    run = Run(launch, tmp_path)
    run.advance(2)
    for loss in losses:
        run.advance(rng.randint(1, 3))
        lose(loss, run, hosts)
    run.advance(2)
    run.launch.process.send_signal(signal.SIGTERM)
    code, errors = run.launch.end()
    assert code == 128 + signal.SIGTERM, errors
    acked = read_acks(tmp_path / ACKED)
    story = check_run(run.run_dir, acked)
    assert story.whole and acked and story.lineage >= len(losses)
    check_updates(run.run_dir, story, reports_lost=True)
    check_repeats(run.run_dir)
