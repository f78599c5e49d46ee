"""The buffer's part of Self-Questioning: exploration is granted when due, and never trained."""

import msgspec
import pytest
from buffer_world import HEAD, World, config, synthetic, trajectory

from evolver_async.config import QuestioningConfig
from evolver_async.schema import Ticket
from evolver_async.wire import messages


def exploring(tmp_path, *, share: float = 0.5, stages: list[str] | None = None, **keys) -> World:
    section = QuestioningConfig(
        **{"kind": "goals", "every": 2, "groups": 1, "temperature": 1.5, **keys}
    )
    settings = config(synthetic=share, questioning=section, max_staleness=3, stages=stages)
    world = World(tmp_path, settings)
    world.resume()
    return world


def kinds(tickets: list[Ticket]) -> list[str]:
    return [ticket.kind for ticket in tickets]


def offer(world: World, *numbers: int) -> None:
    request = messages.Offer(tasks=[synthetic(number) for number in numbers])
    assert isinstance(world.one("actor-0", request), messages.Ok)


def test_exploration_is_granted_after_so_many_groups_and_beside_admission(tmp_path):
    world = exploring(tmp_path, share=0.0)
    tickets = world.lease(credit=20)
    assert kinds(tickets) == [*["rollout"] * 2, "explore", *["rollout"] * 6]  # (S+1)·B = 8
    assert world.replay.outstanding() == world.replay.limit() == 8
    explore = tickets[2]
    assert explore.sampling.temperature == 1.5 and explore.guided == []
    assert tickets[0].sampling.temperature == 1.0
    assert explore.members == tickets[0].members
    world.finish([explore])
    assert kinds(world.lease(credit=20)) == ["explore"]  # due since long, and admission is full


def test_nothing_explores_while_enough_tasks_were_never_played(tmp_path):
    world = exploring(tmp_path, share=1.0, max_untried=3)
    offer(world, 0, 1, 2)
    tickets = world.lease(credit=4)
    assert kinds(tickets) == ["rollout"] * 4
    world.finish(tickets[:1])
    assert "explore" in kinds(world.lease(credit=4))


def test_what_explored_is_counted_and_not_kept(tmp_path):
    world = exploring(tmp_path)
    (ticket,) = (t for t in world.lease(credit=1) if t.kind == "explore")
    world.push(ticket, 0)
    assert world.store.cached == {}
    assert isinstance(world.push(ticket, 0), messages.Dup)
    world.push(ticket, 1)
    ledger = world.store.state.ledger
    assert msgspec.to_builtins(ledger.closed["explore"]) == {
        "filtered": {"explored": {"groups": 1, "trajectories": 2, "tokens": 6}}
    }
    assert ticket.group_id not in world.replay.at.groups
    assert isinstance(world.push(ticket, 1), messages.Stale)


@pytest.mark.parametrize("kind", ["rollout", "explore", "demo"])
def test_only_rollouts_tell_of_the_policys_success(tmp_path, kind: str):
    """The choice of tasks and guidance go by groups that the policy plays to be trained."""
    section = QuestioningConfig(kind="goals", every=1, groups=1)
    settings = config(
        train=4, questioning=section, max_staleness=3, stages=["sft" if kind == "demo" else "rl"]
    )
    world = World(tmp_path, settings)
    world.resume()
    ticket = next(one for one in world.lease(credit=4) if one.kind == kind)
    world.push(ticket, 0, reward=1.0, guided=True)
    world.push(ticket, 1)
    known = {ticket.task.task_id: 0.5} if kind == "rollout" else {}
    assert world.store.state.tasks.cursor.success == known
    assert world.store.state.guidance.gains == ([1.0] if known else [])


def test_the_turns_of_explorations_are_counted_once_and_survive_a_restart(tmp_path):
    world = exploring(tmp_path)
    tickets = world.lease(credit=4)
    for ticket in tickets:
        world.finish([ticket])
    (ticket,) = (t for t in tickets if t.kind == "explore")
    turns = len(trajectory(ticket, 0).turn_rewards)
    status = world.service.status(world.now)["questioning"]
    assert (status["explored"], status["explored_turns"]) == (2.0, 2.0 * turns) and turns > 0
    world.push(ticket, 1)
    world.kill()
    world.resume()
    assert world.service.status(world.now)["questioning"] == status


def test_the_first_tasks_are_looked_for_at_once_and_rollouts_wait_for_them(tmp_path):
    world = exploring(tmp_path, share=1.0, groups=2)
    tickets = world.lease(credit=9)
    assert kinds(tickets) == ["explore", "explore"]
    reply = world.one("actor-0", messages.Lease(credit=9, weights=HEAD))
    assert isinstance(reply, messages.Wait) and "no synthetic task yet" in reply.reason
    world.finish(tickets)
    offer(world, 1, 2)
    granted = world.lease(credit=20)
    assert {t.task.origin for t in granted if t.kind == "rollout"} == {"synthetic"}
    assert kinds(granted).count("rollout") == 8


@pytest.mark.parametrize(("share", "waits"), [(0.0, "group"), (0.5, "group"), (1.0, "a task")])
def test_a_learner_waits_for_a_task_only_if_there_is_none(tmp_path, share: float, waits: str):
    """An exploration of an actor that is gone looks the same, and tasks of the set are left."""
    world = exploring(tmp_path, share=share, every=1)
    world.finish([ticket for ticket in world.lease(credit=2) if ticket.kind == "rollout"])
    for seconds in (0.0, 1000.0):
        world.pass_time(seconds)
        reply = world.one("learner", messages.Sample(lineage=1, take=0, stage=0))
        assert isinstance(reply, messages.Wait)
        assert f"; waits for {waits}" in reply.reason


def test_explorations_that_find_no_task_leave_room_for_other_groups(tmp_path):
    """They took all of it where actors play no more groups than explore at a time."""
    world = exploring(tmp_path, share=0.5, groups=2)
    played = []
    for _ in range(12):
        tickets = world.lease(credit=1)
        played += kinds(tickets)
        world.finish(tickets)
    assert played.count("rollout") >= 4 and played.count("explore") >= 4


def test_a_full_pool_takes_nothing_in_and_ends_exploration(tmp_path):
    world = exploring(tmp_path, max_tasks=3)
    offer(world, 0, 1)
    offer(world, 1, 1, 2, 3, 4)
    assert world.store.state.tasks.pool_size() == 3
    assert "explore" not in kinds(world.lease(credit=20))
    status = world.service.status(world.now)["questioning"]
    assert status == {
        "explored": 0.0,
        "explored_turns": 0.0,
        "pool_size": 3.0,
        "offered": 5.0,
        "duplicates": 2.0,
        "tried": 0.0,
        "useful": 0.0,
    }


def test_duplicates_are_counted_and_success_makes_a_task_useful(tmp_path):
    world = exploring(tmp_path, share=1.0)
    offer(world, 0, 0, 1)
    offer(world, 1)
    tickets = [t for t in world.lease(credit=3) if t.kind == "rollout"]
    for number, ticket in enumerate(tickets[:2]):
        world.push(ticket, 0, reward=1.0)
        world.push(ticket, 1, reward=float(number))
    status = world.service.status(world.now)["questioning"]
    assert (status["duplicates"], status["tried"], status["useful"]) == (2.0, 2.0, 1.0)


def test_nobody_explores_unless_asked_nor_in_a_supervised_stage(tmp_path):
    world = exploring(tmp_path / "none", kind="none", share=0.0)
    assert set(kinds(world.lease(credit=20))) == {"rollout"}
    world = exploring(tmp_path / "sft", stages=["sft", "rl"], share=1.0)
    assert set(kinds(world.lease(credit=20))) == {"demo"}


def test_a_stage_with_another_environment_explores_it_whatever_the_pool_holds(tmp_path):
    section = QuestioningConfig(kind="goals", every=8, groups=1, max_tasks=2)
    settings = config(synthetic=1.0, questioning=section, stages=["rl", "rl"])
    settings.stages[1].override = {"env": {"name": "pond"}}
    world = World(tmp_path, settings)
    world.resume()
    offer(world, 0, 1)
    assert "explore" not in kinds(world.lease(credit=20)), "the pool is full"
    assert world.sample(0, stage=1) == []  # the switch
    (ticket,) = world.lease(credit=1)
    assert (ticket.kind, ticket.task.env) == ("explore", "pond")
    world.one("actor-0", messages.Offer(tasks=[synthetic(2, env="pond")]))
    (ticket,) = world.lease(credit=1)
    assert (ticket.kind, ticket.task.env, ticket.task.origin) == ("rollout", "pond", "synthetic")


def test_tasks_of_an_environment_that_the_stage_does_not_play_never_fill_the_pool(tmp_path):
    world = exploring(tmp_path, max_tasks=3)
    for first in range(0, 12, 4):
        tasks = [synthetic(number, env="pond") for number in range(first, first + 4)]
        reply = world.one("actor-0", messages.Offer(tasks=[*tasks, synthetic(first)]))
        assert isinstance(reply, messages.Ok)
    tasks = world.store.state.tasks
    assert [task.env for task in tasks.cursor.pool] == ["frozen_lake"] * 3
    assert tasks.pool_size() == 3 and tasks.cursor.duplicates == 0


def test_a_restart_remembers_pool_way_and_exploration(tmp_path):
    """Also from a snapshot: the segments are so small that the first ones go."""

    def play(world: World, killed: bool) -> list[tuple[str, str]]:
        granted = []
        for take in range(12):
            tickets = world.lease(credit=4)
            granted += [(ticket.kind, ticket.task.task_id) for ticket in tickets]
            offer(world, take, take + 1, 100 + take)
            for number, ticket in enumerate(tickets):
                world.finish([ticket], reward=float((take + number) % 3 == 0))
            if killed:
                world.kill()
            groups = [group.group_id for group in world.sample(take)]
            world.done(take, groups, take + 1)
            world.one("learner", messages.Kept(take=take))
        return granted

    plain = exploring(tmp_path / "plain", share=0.5, every=3)
    killed = exploring(tmp_path / "killed", share=0.5, every=3)
    killed.segment_bytes = plain.store.journal.segment_bytes = 2000
    killed.kill()
    assert play(plain, False) == play(killed, True)
    assert killed.store.journal.newest > 3
    assert killed.store.state.tasks.cursor == plain.store.state.tasks.cursor
    assert killed.store.state.tasks.cursor.duplicates == 11


def test_explorations_that_nobody_runs_are_granted_again(tmp_path):
    world = exploring(tmp_path, share=1.0)
    (ticket,) = world.lease(credit=3)
    world.pass_time(100.0)
    again = world.lease(credit=3, peer="actor-1")
    assert [(t.group_id, t.attempt, t.kind) for t in again] == [(ticket.group_id, 1, "explore")]


@pytest.mark.parametrize("policy", ["learned", "scripted"])
def test_whoever_explores_may_hand_it_in(tmp_path, policy):
    world = exploring(tmp_path, share=1.0)
    (ticket,) = world.lease(credit=1)
    made = msgspec.structs.replace(trajectory(ticket, 0), policy=policy)
    assert isinstance(world.one("actor-0", messages.Push(trajectory=made)), messages.Ack)
