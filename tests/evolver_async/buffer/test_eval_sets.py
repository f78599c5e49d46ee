"""Sets of evaluation episodes in the buffer: their tasks, samples, results and restarts."""

import json
from pathlib import Path
from typing import Any

import pytest
from buffer_world import World, config, trajectory

from evolver_async.buffer.arrivals import own_numbers
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.buffer.state.evaluations import EvaluationQueue, SetEpisode
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load
from evolver_async.config.sections.run import FINAL_SET, EvalSetConfig, EvalSetEnvConfig
from evolver_async.metrics.families import evaluated
from evolver_async.schema import Player, Ticket, WeightId
from evolver_async.wire import messages
from evolver_async.wire.evaluation_results import EvalResult, SetResult

SETS = {
    "ood": EvalSetConfig(env=EvalSetEnvConfig(params={"size": 5}), tasks=3),
    "sampled": EvalSetConfig(tasks=2, k=3, first=10, temperature=0.7),
}
NEWEST = WeightId(lineage=1, step=1)


def settings(sets: dict[str, EvalSetConfig] | None = None) -> Config:
    made = config(max_staleness=1)
    made.eval.sets = SETS if sets is None else sets
    return made


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, settings())
    made.resume()
    return made


def report(world: World, episodes: int, sets: list[str]) -> messages.Reply:
    """One step, at whose end an evaluation is asked for."""
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(0)]
    done = messages.Done(
        lineage=1, take=0, version=1, trained=groups, filtered={}, episodes=episodes, sets=sets
    )
    return world.one("learner", done)


def kept(world: World) -> list[EvalResult]:
    reply = world.one("learner", messages.Kept(take=1))
    assert isinstance(reply, messages.Ok)
    return reply.evals


def evaluating(world: World, number: int) -> list[Ticket]:
    """The next `number` tickets of evaluations."""
    tickets: list[Ticket] = []
    while len(tickets) < number:
        got = [ticket for ticket in world.lease(credit=1) if ticket.kind == "eval"]
        assert got, f"{len(tickets)} of {number} tickets"
        tickets += got
    return tickets[:number]


def requested(k: int, tasks: int = 2) -> EvaluationQueue:
    queue = EvaluationQueue()
    queue.request(NEWEST, 0, 0, 1, {"set": (tasks, k)})
    for episode in (None, *(SetEpisode("set", n // k, 1.0) for n in range(tasks * k))):
        queue.granted(NEWEST, episode)
    assert queue.next() is None
    queue.arrived(NEWEST, None, 5, True, 0.25, 7, {"reward/exact": 0.5, "env/moves": 7.0})
    return queue


def arrive(queue: EvaluationQueue, task: int, success: bool, reward: float, turns: int = 2) -> None:
    numbers = {"env/length": reward} | ({"reward/exact": 1.0} if success else {})  # or it abstains
    place = SetEpisode("set", task, 1.0)
    queue.arrived(NEWEST, place, task % 2, success, reward, turns, numbers)


def test_avg_counts_all_samples_and_best_the_best_of_each_task() -> None:
    queue = requested(k=2)
    arrive(queue, 0, False, -1.0)
    arrive(queue, 1, True, -2.0, turns=4)
    arrive(queue, 0, True, 0.5)  # the best of its task comes last, that of the other one first
    assert queue.results == []
    arrive(queue, 1, False, -3.5, turns=4)
    (result,) = queue.results
    assert (result.success, result.reward_mean, result.turns_mean) == (1.0, 0.25, 7.0)
    assert result.numbers == {"reward/exact": 0.5, "env/moves": 7.0}
    assert result.sets == [
        SetResult(
            name="set",
            k=2,
            episodes=4,
            success=0.5,
            reward_mean=-1.5,
            turns_mean=3.0,
            tasks=2,
            best_success=1.0,
            best_reward=-0.75,
            distinct=2,
            numbers={"env/length": -1.5, "reward/exact": 1.0},
        )
    ]


def test_an_episode_has_its_terms_and_the_environments_own_numbers(world: World) -> None:
    one = trajectory(world.lease(credit=1)[0], 0, terms={"exact": 0.5}, metrics={"moves": 7.0})
    assert own_numbers(one) == {"reward/exact": 0.5, "env/moves": 7.0}


def test_an_episode_of_several_players_has_their_outcomes(world: World) -> None:
    players = [Player(name="even", reward=1.5, success=True, turns=[0])]
    players.append(Player(name="odd", reward=-1.5, success=False, turns=[]))
    one = trajectory(world.lease(credit=1)[0], 0, players=players)
    assert own_numbers(one) == {
        "player/even/reward": 1.5,
        "player/even/success": 1.0,
        "player/odd/reward": -1.5,
        "player/odd/success": 0.0,
    }
    for name in own_numbers(one):
        assert evaluated(f"eval/{name}") and evaluated(f"eval/harder/{name}")


def test_numbers_with_the_same_task_count_once_as_distinct() -> None:
    queue = requested(k=1, tasks=4)
    for task in range(4):  # two contents
        arrive(queue, task, True, 1.0)
    (result,) = queue.results
    assert (result.distinct, result.sets[0].distinct, result.sets[0].tasks) == (1, 2, 4)


def test_a_task_with_a_lost_sample_has_no_best() -> None:
    queue = requested(k=2)
    arrive(queue, 0, True, 1.0)
    queue.lost(NEWEST, SetEpisode("set", 0, 1.0))
    arrive(queue, 1, False, 0.0)
    arrive(queue, 1, False, 0.5)
    (result,) = queue.results
    (found,) = result.sets
    assert (found.episodes, found.tasks, found.lost, result.lost) == (3, 1, 1, 0)
    assert (found.success, found.best_success, found.best_reward) == (1 / 3, 0.0, 0.5)


def test_the_deciding_set_is_played_first_and_samples_share_their_task(world: World) -> None:
    assert isinstance(report(world, 2, ["ood", "sampled"]), messages.Ok)
    tickets = evaluating(world, 11)
    names = [ticket.task.task_id.removeprefix("frozen_lake/validation/") for ticket in tickets]
    assert names == ["0", "1", "0", "1", "2", *["10"] * 3, *["11"] * 3]
    assert [ticket.members for ticket in tickets] == [[0]] * 5 + [[0], [1], [2]] * 2
    assert [ticket.sampling.temperature for ticket in tickets] == [0.0] * 5 + [0.7] * 6
    assert [ticket.task.params for ticket in tickets[2:5]] == [{"size": 5}] * 3
    assert all(ticket.guided == [] and ticket.weights == NEWEST for ticket in tickets)
    assert len({ticket.dynamics_seed for ticket in tickets[5:8]}) == 1


def test_a_guided_set_asks_for_experience_and_the_deciding_one_does_not(tmp_path: Path) -> None:
    asked = settings({"with_pool": EvalSetConfig(tasks=2, k=2, temperature=1.0, guided=True)})
    asked.experience.kind, asked.loss.boost, asked.rollout.guided_fraction = "contrast", 0.0, 0.0
    world = World(tmp_path, asked)
    world.resume()
    report(world, 2, ["with_pool"])
    tickets = evaluating(world, 6)
    assert [ticket.guided for ticket in tickets] == [[], [], [0], [1], [0], [1]]
    assert world.store.state.guidance.guided == 0, "none is a group of training"


@pytest.mark.parametrize("played", [0, 1, 4, 7, 10])
def test_an_evaluation_goes_on_where_the_buffer_was_killed(world: World, played: int) -> None:
    report(world, 2, ["ood", "sampled"])
    tickets = evaluating(world, 11)
    for index, ticket in enumerate(tickets[:played]):
        world.finish([ticket], reward=float(index % 3))
    world.kill()
    (evaluation,) = world.store.state.evaluations.running
    assert (evaluation.arrived, evaluation.episodes) == (played, 11)
    world.pass_time(11.0)  # the leases end
    again = {ticket.group_id: ticket for ticket in evaluating(world, 11 - played)}
    assert again.keys() == {ticket.group_id for ticket in tickets[played:]}
    for index, ticket in enumerate(tickets[played:], played):
        world.finish([again[ticket.group_id]], reward=float(index % 3))
    (result,) = kept(world)
    ood, sampled = result.sets
    rewards = [float(index % 3) for index in range(11)]
    assert result.reward_mean == sum(rewards[:2]) / 2 and result.episodes == 2
    assert (ood.name, ood.reward_mean, ood.episodes) == ("ood", sum(rewards[2:5]) / 3, 3)
    assert (sampled.name, sampled.k, sampled.tasks) == ("sampled", 3, 2)
    assert sampled.reward_mean == pytest.approx(sum(rewards[5:]) / 6)
    assert sampled.best_reward == (max(rewards[5:8]) + max(rewards[8:])) / 2
    assert sampled.best_success == 1.0


def test_only_the_sets_that_were_asked_for_are_played(world: World) -> None:
    report(world, 1, ["ood"])
    world.finish(evaluating(world, 4))
    assert [[one.name for one in result.sets] for result in kept(world)] == [["ood"]]


def test_an_unknown_set_is_refused_by_its_name(world: World) -> None:
    resume = messages.Resume(lineage=1, take=0, version=0, episodes=1, sets=["other"])
    for reply in (report(world, 1, ["ood", "other"]), world.one("learner", resume)):
        assert isinstance(reply, messages.Reject)
        assert reply.reason == "sets: stage 0 has no other"


def test_a_resume_asks_for_the_same_sets_again(world: World) -> None:
    report(world, 1, ["sampled"])
    world.finish(evaluating(world, 3))
    resume = messages.Resume(
        lineage=1, take=1, version=1, episodes=1, sets=["sampled"], process="second"
    )
    assert isinstance(world.one("learner", resume), messages.Resumed)
    tickets = evaluating(world, 7)
    assert {ticket.weights for ticket in tickets} == {WeightId(lineage=2, step=1)}
    world.finish(tickets)
    (result,) = kept(world)
    assert [(one.name, one.episodes) for one in result.sets] == [("sampled", 6)]


def test_a_set_that_a_resume_removed_gives_no_tickets_until_its_evaluation_ends(
    world: World,
) -> None:
    report(world, 1, ["ood"])
    world.finish(evaluating(world, 2))
    world.settings = settings({})
    world.kill()
    assert all(ticket.kind != "eval" for ticket in world.lease(credit=2))
    assert world.resume(lineage=1, take=1, version=1) == 2
    assert world.store.state.evaluations.running == []


def sets_of(*arguments: str) -> dict[str, Any]:
    return eval_sets_of(load(None, ["stages=[{kind: rl, steps: 1}]", *arguments]))


def test_tasks_of_a_set_are_stable_and_disjoint_from_training() -> None:
    made = sets_of(
        "eval.sets={a: {tasks: 4}, b: {tasks: 4, first: 4}, c: {split: train}}",
        "eval.sets.t={split: test, first: 4}",
    )
    ids = {name: [one.task(n).task_id for n in range(4)] for name, one in made.items()}
    assert ids["a"] == [held_out_task(made["a"].source, n).task_id for n in range(4)]
    assert ids["b"] == [f"frozen_lake/validation/{n}" for n in range(4, 8)]
    assert ids["c"] == [f"frozen_lake/train/{n}" for n in range(4)]
    assert ids["t"] == [f"frozen_lake/test/{n}" for n in range(4, 8)]
    assert ids[FINAL_SET] == [f"frozen_lake/test/{n}" for n in range(4)]
    assert len({one for names in ids.values() for one in names}) == 20


def test_a_set_takes_the_stage_s_environment_or_one_of_its_own() -> None:
    run = ("env.name=bandit", "env.params={low: 0.1, high_probability: 0.9}")
    made = sets_of(*run, "eval.sets={a: {env: {params: {low: 0.2}}}, b: {env: {name: sokoban}}}")
    assert made["a"].task(0).params == {"low": 0.2, "high_probability": 0.9}
    assert (made["b"].task(0).env, made["b"].task(0).params) == ("sokoban", {})


def test_a_set_without_environment_has_the_tasks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"query": "a", "split": "train"}\n{"query": "b", "split": "test"}\n')
    made = sets_of(f"tasks.path={path}", "eval.sets={a: {tasks: 2}, b: {split: train}}")
    tasks = [made["a"].task(number) for number in range(2)]
    assert [task.query for task in tasks] == ["b", "b"] and made["b"].task(0).query == "a"
    assert len({task.task_id for task in tasks}) == 2
    assert len(made["a"].examples()) == 1
    with pytest.raises(ConfigError, match=r"eval\.sets\.c\.split: .* no task of the validation"):
        sets_of(f"tasks.path={path}", "eval.sets={c: {split: validation}}")
    with pytest.raises(
        ConfigError, match=r"tasks\.path: .* no task of the validation .*eval\.split"
    ):
        sets_of(f"tasks.path={path}", "eval.split=validation")


def test_the_deciding_evaluation_is_of_the_split_that_is_configured() -> None:
    for split in ("auto", "test", "validation"):
        source = source_of(load(None, ["stages=[{kind: rl, steps: 1}]", f"eval.split={split}"]))
        decides = "validation" if split == "auto" else split
        assert held_out_task(source, 3).task_id == f"frozen_lake/{decides}/3"


def test_the_end_has_a_set_of_the_split_test_unless_that_decides(tmp_path: Path) -> None:
    assert sets_of("eval.final_episodes=3")[FINAL_SET].tasks == 3
    assert sets_of("eval.final_episodes=0") == sets_of("eval.split=test") == {}
    path = tmp_path / "tasks.jsonl"
    rows = [{"query": name, "split": name} for name in ("train", "validation", "test")]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert sets_of(f"tasks.path={path}")[FINAL_SET].tasks == 1, "no row is played twice"
    for missing, decides in (("test", "validation"), ("validation", "test")):
        kept = [row for row in rows if row["split"] != missing]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        config = load(None, ["stages=[{kind: rl, steps: 1}]", f"tasks.path={path}"])
        assert source_of(config).evaluated == decides and eval_sets_of(config) == {}
    with pytest.raises(ConfigError, match=r"^eval\.sets\.test: "):
        sets_of("eval.sets={test: {tasks: 4}}")
