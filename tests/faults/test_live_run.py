"""Faults 1, 3, 9, 10, 21, 27, 29, 30 in a real run: a launcher, a buffer, a learner, two actors.

One run bears them all, one after the other; after each it has to go on, its ledger has to close and
its journal must tell nothing impossible. At last it is ended in three ways, and what it left behind
is looked at from all sides. (2, many kills of the buffer, is in `test_delivery`.)
"""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import live as fire
import moody
import pytest
from invariants import Story, check_leaks, check_named, check_run, traces
from launches import COMMAND, DEADLINE_S, Launch, alive, is_step, launching, wait_for
from live import child, status, stopped, story

from evolver_async.checkpoint.checkpoints import valid
from evolver_async.config.load import load
from evolver_async.process.rendezvous import weights_dir
from evolver_async.weights.channel.interface import read_head

LEASE_S = 2.0
POISONED = f"moody:Moody/train/{moody.POISON}"
ROLES = {"buffer", "learner", "actor-0", "actor-1"}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Launch]]:
    with pytest.MonkeyPatch.context() as patch, launching() as start:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))  # where moody is
        yield start


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Launch]) -> Launch:
    """The run that everything happens to."""
    directory = tmp_path_factory.mktemp("live")
    recipe, anchor = fire.write_recipe(directory), "correction.anchor=interpolate"
    run = start(directory / "live", recipe, "run.name=live", anchor)
    run.wait_for_steps(2)
    return run


@pytest.fixture
def run(live: Launch) -> Iterator[Launch]:
    """The run, which must go on after the test, with I1 to I3 unharmed."""
    yield live
    live.rows()
    live.wait_for_steps(2)
    fire.check_ledger(status(live)["ledger"])
    story(live)


def completed(run: Launch, groups: dict[int, Any]) -> None:
    """Wait until nobody has to work on these groups any more."""
    assert groups, "there was nothing to lose"

    def left() -> bool:
        told = story(run)
        return all(told.complete(group_id) for group_id in groups)

    wait_for(left, f"the end of groups {sorted(groups)}")


def busy(run: Launch, actor: str) -> dict[int, set[int]]:
    """What `actor` is working on, as soon as there is something."""
    return wait_for(lambda: story(run).waited_for(actor), f"work of {actor}")


def arrived(run: Launch) -> None:
    """What was sent before has been read and committed: the buffer answers in order."""
    time.sleep(0.3)
    for _ in range(2):
        status(run)


@contextlib.contextmanager
def at_work(run: Launch, name: str) -> Iterator[dict[int, set[int]]]:
    """An actor stands still amid these groups; none of their members is on its way."""
    while True:
        busy(run, name)
        with stopped(child(run, name)):
            arrived(run)
            held = story(run).waited_for(name)
            if held:  # else it was between two groups
                yield held
                return


@contextlib.contextmanager
def published(run: Launch) -> Iterator[None]:
    """The learner stands still, and not amid a publish: actors would wait for what it announced."""
    directory = weights_dir(load(run.run_dir / "config.yaml"), run.run_dir)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with stopped(child(run, "learner")):
            arrived(run)
            if str(read_head(directory)) == status(run)["head"]:
                yield
                return
    raise AssertionError("what the learner announced is never there")


def test_1_an_actor_killed_in_its_episodes_is_replaced_and_its_groups_complete(
    run: Launch,
) -> None:
    actor = child(run, "actor-0")
    with at_work(run, "actor-0") as held:
        actor.kill()
    completed(run, held)
    assert child(run, "actor-0") != actor
    check_named(run_log(run), "actor-0 was killed by SIGKILL", "restart")


def test_1_an_actor_killed_between_sending_and_the_ack_has_delivered_or_is_replaced(
    run: Launch,
) -> None:
    """The buffer stands still meanwhile: what was sent is in its socket, nothing is answered."""
    actor = child(run, "actor-1")
    held = busy(run, "actor-1")
    with stopped(child(run, "buffer")):
        time.sleep(0.6)  # an episode takes 0.2 s
        actor.kill()
        wait_for(lambda: not alive(actor), "the end of the actor")
    completed(run, held)
    assert child(run, "actor-1") != actor


def test_1_9_21_actors_stop_at_their_credit_while_the_learner_stands_still(run: Launch) -> None:
    """And one of them is killed while it idles."""
    lineage = story(run).lineage
    buffer = child(run, "buffer")
    with published(run):

        def full() -> dict[str, Any] | None:
            now = status(run)
            idle = {name for name, waits in now["waiting"].items() if "lease" in waits}
            reached = now["outstanding"] == now["limit"] and not now["groups"]["open"]
            return now if reached and {"actor-0", "actor-1"} <= idle else None

        before, rss = wait_for(full, "the limit"), buffer.memory_info().rss
        child(run, "actor-0").kill()
        time.sleep(2 * LEASE_S)
        after = status(run)
        assert after["outstanding"] == after["limit"] == before["limit"]
        assert after["ledger"]["received"] == before["ledger"]["received"]
        assert buffer.memory_info().rss - rss < 10 << 20

        def named() -> bool:  # a slow actor may just have loaded the newest weights
            reason = status(run)["waiting"].get("actor-1", {}).get("lease", {}).get("reason", "")
            return "full" in reason and "learner" in reason

        wait_for(named, "the reason of actor-1")
    run.rows()
    run.wait_for_steps(2)
    assert story(run).lineage == lineage, "standing still is no death"


def test_9_an_actor_that_stood_still_finds_its_groups_in_other_hands(run: Launch) -> None:
    actor = child(run, "actor-0")
    with at_work(run, "actor-0") as held:
        completed(run, held)
        turned_away = status(run)["ledger"]["refused"]
    log = run.run_dir / "logs" / "actor-0.log"

    def noticed() -> bool:
        now = status(run)["ledger"]["refused"]
        refused = any(
            now[fate]["trajectories"] > turned_away[fate]["trajectories"]
            for fate in ("duplicate", "stale")
        )
        return refused or any(f"group {group_id}" in log.read_text() for group_id in held)

    wait_for(noticed, "FENCED, DUP or STALE")
    assert alive(actor) and busy(run, "actor-0"), "the same process works on"


def test_9_a_buffer_that_stood_still_for_longer_than_a_lease_goes_on(run: Launch) -> None:
    buffer = child(run, "buffer")
    with stopped(buffer):
        time.sleep(1.5 * LEASE_S)
    run.rows()
    run.wait_for_steps(2)
    assert child(run, "buffer") == buffer


def test_10_an_actor_whose_loop_hangs_loses_its_groups_though_its_sockets_live(
    run: Launch,
) -> None:
    actors = [child(run, name) for name in ("actor-0", "actor-1")]
    hang_s = 20.0
    held = {name: busy(run, name) for name in ("actor-0", "actor-1")}
    (run.run_dir.parent / "hang").write_text(str(hang_s))
    wait_for((run.run_dir.parent / "hung").exists, "the hanging step")
    began = time.monotonic()
    held = {name: story(run).waited_for(name) for name in held}

    def taken_over() -> list[int]:
        told = story(run)
        return [
            group_id
            for name, groups in held.items()
            for group_id, members in groups.items()
            if any(told.owners[group_id][member] != name for member in members)
            and told.complete(group_id)
        ]

    assert wait_for(taken_over, "a group that another completed")
    assert time.monotonic() - began < hang_s, "while it hung"
    assert all(alive(actor) for actor in actors)


def test_27_a_poison_task_is_quarantined_also_for_the_next_buffer(run: Launch) -> None:
    wait_for(lambda: POISONED in status(run)["quarantined"], "the quarantine")
    child(run, "buffer").kill()
    assert status(run)["quarantined"] == {POISONED: "environment"}
    assert story(run).quarantined == {POISONED: "environment"}  # and it is granted never again
    log = "".join(path.read_text() for path in run.run_dir.glob("logs/actor-*.log"))
    check_named(log, "moody:Moody", "this map is poison")


def waiting(run: Launch, rng: random.Random) -> None:
    """The learner waits for a take: the actors stand still."""
    with stopped(child(run, "actor-0"), child(run, "actor-1")):
        wait_for(lambda: "learner" in status(run)["waiting"], "a learner that waits")
        kill_learner(run)


def saving(run: Launch, rng: random.Random) -> None:
    """It writes a checkpoint: there is one that has no name yet."""
    directory = run.run_dir / "checkpoints"
    known = {path.name for path, _ in valid(directory)}
    deadline = time.monotonic() + DEADLINE_S
    while {path.name for path in directory.iterdir()} <= known:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.001)
    kill_learner(run)


def training(run: Launch, rng: random.Random) -> None:
    """Any moment of a step."""
    run.rows()
    run.wait_for_steps(1)
    time.sleep(rng.uniform(0.0, 0.5))
    kill_learner(run)


def kill_learner(run: Launch) -> None:
    learner = child(run, "learner")
    learner.kill()
    wait_for(lambda: not alive(learner), "the end of the learner")


@pytest.mark.parametrize("phase", [waiting, saving, training])
def test_3_a_killed_learner_goes_on_from_its_newest_checkpoint(
    run: Launch, rng: random.Random, phase: Callable[..., None]
) -> None:
    lineage = story(run).lineage
    phase(run, rng)
    kept = valid(run.run_dir / "checkpoints")[-1][1].step
    run.rows()
    row = run.wait_for_row(is_step, "a step of the next learner")
    assert row["step"] == kept + 1
    assert story(run).lineage == lineage + 1


def test_30_a_run_that_is_running_is_not_started_again(run: Launch) -> None:
    command = [*COMMAND, "train", "--resume", str(run.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    check_named(done.stderr, str(run.run_dir), "already running")


# ---- 29


@pytest.fixture(scope="module")
def ends(live: Launch, start: Callable[..., Launch]) -> dict[str, Any]:
    """Ends the run by Ctrl-C twice, then, taken up again, by the launcher's death, by SIGTERM.

    Only then are the invariants of the whole looked at.
    """
    seen: dict[str, Any] = {}
    run_dir = live.run_dir
    children = live.children()
    for _ in range(2):
        live.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    seen["interrupted"] = live.end(), survivors(children), check_run(run_dir)

    second = start(run_dir, "--resume", run_dir)
    children = wait_for(
        lambda: (found := second.children()) and set(found) == ROLES and found, "all roles"
    )
    second.wait_for_steps(1)
    second.process.kill()
    second.process.wait()
    wait_for(lambda: not survivors(children), "the end of all without a launcher")
    seen["orphaned"] = check_run(run_dir)

    before = traces()  # what the killed launcher could not tidy up is still there
    third = start(run_dir, "--resume", run_dir)
    third.wait_for_steps(2)
    children = third.children()
    third.process.send_signal(signal.SIGTERM)
    seen["terminated"] = third.end(), survivors(children), check_run(run_dir)
    check_leaks(before)
    seen["left"] = traces().directories & before.directories
    return seen


def survivors(children: dict[str, Any]) -> list[str]:
    return [name for name, process in children.items() if alive(process)]


def test_29_a_second_ctrl_c_ends_everything_at_once(ends: dict[str, Any]) -> None:
    (code, _), left, told = ends["interrupted"]
    assert (code, left) == (128 + signal.SIGINT, [])
    assert told.whole and told.lineage >= 1


def test_29_nobody_outlives_the_launcher(ends: dict[str, Any]) -> None:
    told: Story = ends["orphaned"]
    assert told.lineage == ends["interrupted"][2].lineage + 1


def test_29_sigterm_leaves_a_checkpoint_of_the_last_step_and_nothing_else(
    ends: dict[str, Any], live: Launch
) -> None:
    (code, errors), left, told = ends["terminated"]
    assert (code, left, errors) == (128 + signal.SIGTERM, [], "")
    assert ends["left"] == set(), "the next launch swept what the killed one left"
    step = valid(live.run_dir / "checkpoints")[-1][1].step
    assert step == max(told.settled) + 1, "every take that was reported is in it"
    assert told.next_take - step <= 1, "at most the one that its learner did not wait for any more"
    fire.check_updates(live.run_dir, told)


def test_3_every_repeated_take_trained_bitwise_the_same(ends: dict[str, Any], live: Launch) -> None:
    assert ends["terminated"] and fire.check_repeats(live.run_dir) >= 1


def run_log(run: Launch) -> str:
    return (run.run_dir / "logs" / "launcher.log").read_text()
