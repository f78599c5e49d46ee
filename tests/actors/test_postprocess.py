"""What comes after an episode: judged, graded, handed in, learned from, and nothing of it lost."""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from rollouts import CHAT, Corridor
from workers import Buffer, Walker, granted, run, version

from actors.endpoint.runner import RewardMissing
from actors.engines.engine import Generation, Request
from actors.failure_counts import FailureCounts
from actors.judge.audit import AuditedJudge
from actors.judge.configured_judge import make_judge, timeout_s_of
from actors.judge.judge import Judge, JudgedEpisode
from actors.judge.own_judge import OwnJudge
from actors.postprocess import ActorComponents
from actors.questioning.grade import Grade
from actors.rewards.scorer import RewardScorer
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from evolver_async.config import Config, ConfigError, JudgeConfig, RewardConfig
from evolver_async.config.sections.reward import TermConfig
from evolver_async.schema import Task, TurnFlag
from evolver_async.wire import messages, trajectory_bytes
from evolver_async.wire.transcripts import Turn

__all__ = ["run"]  # the fixture


class Court:
    """A judge that takes its time; `finds` nothing where it is told so."""

    generated = 0

    def __init__(self, seconds: float = 0.0, finds: bool = True) -> None:
        self.seconds, self.finds = seconds, finds
        self.heard: list[JudgedEpisode] = []

    async def label(self, episode: JudgedEpisode) -> tuple[list[int], str]:
        self.heard.append(episode)
        await asyncio.sleep(self.seconds)
        return ([1, -1, 1], "rule") if self.finds else ([], "")

    def counters(self) -> dict[str, float]:
        return {"judge/heard": float(len(self.heard))}

    async def close(self) -> None: ...


class Teacher(Court):
    """Questions, grades and guides: all that a run may ask for."""

    def __init__(self, *grades: Grade | None) -> None:
        super().__init__()
        self.given = iter(grades)
        self.contributed: list[Any] = []
        self.graded: list[tuple[int, str]] = []

    async def explore(self, ticket, setting, engine, progress, deliver) -> None:
        await run_group(ticket, setting, engine, progress, deliver)

    async def questions(self, ticket, finished, progress) -> list[Task]:
        await asyncio.sleep(50.0)
        made = replace(ticket.task, split="train", origin="synthetic")
        return [replace(made, task_id=f"made/{i}") for i in range(len(finished) * 10)]

    def grades(self, task: Task) -> bool:
        return bool(task.query)

    async def grade(self, task, turns, ending) -> Grade | None:
        self.graded.append((len(turns), ending))
        return next(self.given)

    def contribute(self, task, query, transcripts, stage) -> None:
        self.contributed.append((task.task_id, query, transcripts))


def test_labels_travel_with_the_trajectory(run: Callable[..., None]) -> None:
    buffer, court = Buffer((0.0, granted())), Court()
    run(buffer, Walker(), 60.0, ActorComponents(judge=court))
    pushed = [push.trajectory for push in buffer.seen(messages.Push)]
    assert [trajectory.labels.tolist() for trajectory in pushed] == [[1, -1, 1]] * 2
    assert {trajectory.label_source for trajectory in pushed} == {"rule"}
    assert [episode.success for episode in court.heard] == [True, True]
    assert buffer.seen(messages.Counters)[-1].values == {"judge/heard": 2.0}


def test_an_episode_that_is_not_judged_has_a_zero_for_every_turn(run: Callable[..., None]) -> None:
    buffer = Buffer((0.0, granted()))
    run(buffer, Walker(), 60.0, ActorComponents(judge=Court(finds=False)))
    for push in buffer.seen(messages.Push):
        assert push.trajectory.labels.tolist() == [0, 0, 0]
        assert push.trajectory.label_source == ""


class Expert(Corridor):
    """A corridor that demonstrates its way."""

    def actions(self) -> list[str]:
        return ["left", "right"]

    def solve(self) -> list[str]:
        return ["right"] * (self.length - self.position)


@pytest.mark.parametrize("kind", ["rollout", "eval", "demo", "explore"])
def test_only_rollouts_are_judged_and_feed_the_experience(
    run: Callable[..., None], kind: str
) -> None:
    pinned = {"weights": version(1)} if kind == "eval" else {}
    buffer, teacher = Buffer((0.0, granted({"kind": kind, **pinned}, env=Expert))), Teacher()
    components = ActorComponents(judge=teacher, guide=teacher, questioner=teacher)  # type: ignore[arg-type]
    run(buffer, Walker(), 100.0, components)
    pushed = [push.trajectory for push in buffer.seen(messages.Push)]
    assert len(pushed) == 2 and buffer.seen(messages.Release) == []
    rollout = kind == "rollout"
    assert [len(teacher.heard), len(teacher.contributed)] == ([2, 1] if rollout else [0, 0])
    assert {one.label_source for one in pushed} == {"rule" if rollout else ""}


def test_a_slow_judge_holds_up_no_other_group(run: Callable[..., None]) -> None:
    """One group at a time: the second is played while the first is still being judged."""
    court = Court(seconds=40.0)
    buffer = Buffer((0.0, granted()), (1.0, granted({"group_id": 1})))
    run(buffer, Walker(), 30.0, ActorComponents(judge=court), groups=1)
    assert len(court.heard) == 4


class Late:
    """Agents whose episodes are rewarded after 40 s, member 1's never."""

    def __init__(self, engine: Walker) -> None:
        self.engine = engine

    def worked_s(self) -> float:
        return 0.0

    def counters(self) -> dict[str, float]:
        return {}

    async def run(self, ticket, setting, progress, deliver) -> None:
        def begin(finished: Finished) -> None:
            async def rewarded() -> Finished:
                await asyncio.sleep(40.0)
                if finished.trajectory.member == 1:
                    raise RewardMissing
                found = replace(finished.trajectory, reward=7.0)
                return dataclasses.replace(finished, trajectory=found)

            deliver(dataclasses.replace(finished, rewarded=rewarded))

        await run_group(ticket, setting, self.engine, progress, begin)

    async def close(self) -> None: ...


def test_an_episode_that_waits_for_its_reward_holds_up_no_other_group(
    run: Callable[..., None],
) -> None:
    """One group at a time: the second is played while the first still waits."""
    engine = Walker()
    buffer = Buffer((0.0, granted()), (1.0, granted({"group_id": 1})))
    components = ActorComponents(agents=Late(engine))  # type: ignore[arg-type]
    run(buffer, engine, 60.0, components, groups=1)
    found = [(one.trajectory.group_id, one.trajectory.reward) for one in buffer.seen(messages.Push)]
    assert found == [(0, 7.0), (1, 7.0)]
    back = [(one.group_id, one.members, one.reason) for one in buffer.seen(messages.Release)]
    assert back == [(0, [1], "reward"), (1, [1], "reward")]


class BadCourt(Court):
    """A judge that fails in the way of its name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    async def label(self, episode: JudgedEpisode) -> tuple[list[int], str]:
        match self.way:
            case "raises":
                raise KeyError("mine")
            case "cancels":
                raise asyncio.CancelledError("mine")
            case "hangs":
                await asyncio.sleep(10_000.0)
            case "miscounts":
                return [1, -1], "mine"
            case "overrates":
                return [5, 1, 1], "mine"
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("raises", "KeyError: 'mine'"),
        ("cancels", "CancelledError: mine"),
        ("hangs", "judge.timeout_s=5 has passed"),
        ("miscounts", "are not 0 labels"),
        ("overrates", "are not 0 labels"),
        ("returns nothing", "TypeError"),
    ],
)
@pytest.mark.parametrize("audited", [False, True])
def test_a_judge_that_fails_leaves_the_episode_unlabelled(
    run: Callable[..., None], way: str, said: str, audited: bool
) -> None:
    failures, court = FailureCounts(), BadCourt(way)
    judge: Judge = OwnJudge(court, 5, failures)  # type: ignore[arg-type]
    judge = AuditedJudge(judge, 0.5) if audited else judge
    buffer = Buffer((0.0, granted()))
    components = ActorComponents(judge=judge, failures=failures)
    run(buffer, Walker(), 60.0, components)
    pushed = [push.trajectory for push in buffer.seen(messages.Push)]
    assert [one.labels.tolist() for one in pushed] == [[0, 0, 0]] * 2
    assert {one.label_source for one in pushed} == {""}
    assert buffer.seen(messages.Release) == []
    (total,) = components.failures.totals()
    assert (total.kind, total.name, total.count) == ("judge", "judge.kind", 2)
    assert said in total.error
    counted = judge.counters()
    assert (counted["judge/labelled"], counted["judge/unlabelled"]) == (0.0, 2.0)


@pytest.mark.parametrize("finds", [True, False])
def test_the_episodes_that_an_own_judge_labels_are_counted(finds: bool) -> None:
    judge = OwnJudge(Court(finds=finds), 5, FailureCounts())  # type: ignore[arg-type]
    turns = [Turn(observation="", state="", action="")] * 3
    asyncio.run(judge.label(JudgedEpisode("", turns, 1.0, True, [])))
    found = {"judge/labelled": float(finds), "judge/unlabelled": float(not finds)}
    assert judge.counters() == {"judge/heard": 1.0} | found


@pytest.mark.parametrize("source", [5, "x" * 101, "\ud800"])
def test_labels_of_an_unusable_source_are_a_failure(source: Any) -> None:
    class Nameless(Court):
        async def label(self, episode: JudgedEpisode) -> tuple[list[int], str]:
            return [1], source

    judge = OwnJudge(Nameless(), 5, failures := FailureCounts())  # type: ignore[arg-type]
    turns = [Turn(observation="", state="", action="")]
    assert asyncio.run(judge.label(JudgedEpisode("", turns, 1.0, True, []))) == ([], "")
    (total,) = failures.totals()
    assert total.name == "judge.kind" and judge.counters()["judge/unlabelled"] == 1.0


@pytest.mark.parametrize(
    ("totals", "said"),
    [
        ({"mine": "many"}, "counters: TypeError: 'mine' must be a number, is a str"),
        ({"mine": math.nan}, "counters: ValueError: 'mine' must be finite, is nan"),
        ({5: 1.0}, "counters: TypeError: a name must be a text, is a int"),
        (None, "counters: TypeError: they must be a dict of numbers, are a NoneType"),
    ],
)
def test_unusable_counters_of_an_own_judge_are_a_failure(totals: Any, said: str) -> None:
    """It is noted once, as every note asks for a report, which reads the counters."""

    class Miscounting(Court):
        def counters(self) -> dict[str, float]:
            return totals

    judge = OwnJudge(Miscounting(), 5, failures := FailureCounts())  # type: ignore[arg-type]
    for _ in range(2):
        assert judge.counters() == {"judge/labelled": 0.0, "judge/unlabelled": 0.0}
    (total,) = failures.totals()
    assert (total.name, total.error, total.count) == ("judge.kind", said, 1)


def no_judge(config: Config, engine: object, chat: object, failures: FailureCounts) -> None:
    """Function for `judge.kind` that forgets to return its judge."""


def test_a_function_that_makes_no_judge_is_named() -> None:
    config = Config(judge=JudgeConfig(kind=f"{__name__}:no_judge"))
    with pytest.raises(
        ConfigError, match=r"^judge\.kind: .*:no_judge returned NoneType, not a Judge"
    ):
        make_judge(config, None, None)  # type: ignore[arg-type]


def test_a_serial_run_limits_no_judge() -> None:
    own = Config(judge=JudgeConfig(kind="mine:judge", timeout_s=7.0))
    assert timeout_s_of(own) == 7.0
    own.launch.kind = "serial"
    assert timeout_s_of(own) is None


def test_what_is_being_judged_when_the_actor_leaves_is_handed_in(run: Callable[..., None]) -> None:
    buffer = Buffer((0.0, granted()))
    run(buffer, Walker(), 10.0, ActorComponents(judge=Court(seconds=1000.0)))
    pushed = [push.trajectory for push in buffer.seen(messages.Push)]
    assert sorted(trajectory.member for trajectory in pushed) == [0, 1]
    assert all(trajectory.label_source == "" for trajectory in pushed)
    assert buffer.seen(messages.Release) == []


def test_an_episode_too_large_to_send_is_a_failure_of_its_task(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor goes on: a next one would be granted the same task, and end as well."""
    monkeypatch.setattr(trajectory_bytes, "PARCEL_BYTES", 100)
    buffer = Buffer((0.0, granted()))
    run(buffer, Walker(), 60.0)
    assert buffer.seen(messages.Push) == []
    (release,) = buffer.seen(messages.Release)
    assert (release.reason, release.members) == ("environment", [0, 1])
    (failure,) = buffer.seen(messages.Counters)[-1].failures
    assert (failure.kind, failure.count) == ("environment", 2)
    assert "Corridor" in failure.name and "the limit is 100" in failure.error


def test_a_graded_episode_is_worth_its_grade_wherever_it_goes(run: Callable[..., None]) -> None:
    ticket = granted()
    ticket = replace(ticket, task=replace(ticket.task, query="walk", origin="synthetic"))
    buffer, teacher = Buffer((0.0, ticket)), Teacher(Grade(0.8, True), Grade(0.25, False))
    run(buffer, Walker(), 60.0, ActorComponents(guide=teacher, questioner=teacher))  # type: ignore[arg-type]
    pushed = {push.trajectory.member: push.trajectory for push in buffer.seen(messages.Push)}
    assert [(pushed[m].reward, pushed[m].success) for m in (0, 1)] == [(0.8, True), (0.25, False)]
    ((task_id, query, transcripts),) = teacher.contributed
    assert (task_id, query) == ("t", "walk\nat 0")
    assert sorted((one.reward, one.success) for one in transcripts) == [(0.25, False), (0.8, True)]
    assert [ending for _, ending in teacher.graded] == ["at 3", "at 3"]


def test_an_episode_without_a_grade_is_played_again(run: Callable[..., None]) -> None:
    ticket = granted()
    ticket = replace(ticket, task=replace(ticket.task, query="walk", origin="synthetic"))
    buffer = Buffer((0.0, ticket))
    run(buffer, Walker(), 60.0, ActorComponents(questioner=Teacher(None, Grade(1.0, True))))  # type: ignore[arg-type]
    (push,) = buffer.seen(messages.Push)
    (release,) = buffer.seen(messages.Release)
    assert release.reason == "grade"
    assert [push.trajectory.member, *release.members] in ([0, 1], [1, 0])


def test_of_an_episode_without_a_grade_nothing_is_learned(run: Callable[..., None]) -> None:
    ticket = granted()
    ticket = replace(ticket, task=replace(ticket.task, query="walk", origin="synthetic"))
    teacher = Teacher(None, Grade(0.8, True))
    run(Buffer((0.0, ticket)), Walker(), 60.0, ActorComponents(guide=teacher, questioner=teacher))  # type: ignore[arg-type]
    ((_, _, transcripts),) = teacher.contributed
    assert [(one.reward, one.success) for one in transcripts] == [(0.8, True)]


def test_what_exploration_suggests_is_offered_before_it_is_handed_in(
    run: Callable[..., None],
) -> None:
    buffer = Buffer((0.0, granted({"kind": "explore"})))
    run(buffer, Walker(), 100.0, ActorComponents(questioner=Teacher()))  # type: ignore[arg-type]
    order = [type(r) for r in buffer.requests if isinstance(r, messages.Offer | messages.Push)]
    assert order == [messages.Offer, messages.Offer, messages.Push, messages.Push]
    assert [len(offer.tasks) for offer in buffer.seen(messages.Offer)] == [16, 4]


@pytest.mark.parametrize("leaves_s", [10.0, 200.0])
def test_exploration_is_handed_in_though_its_actor_leaves(
    run: Callable[..., None], leaves_s: float
) -> None:
    buffer = Buffer((0.0, granted({"kind": "explore"})))
    run(buffer, Walker(), leaves_s, ActorComponents(questioner=Teacher()))  # type: ignore[arg-type]
    assert len(buffer.seen(messages.Push)) == 2
    assert bool(buffer.seen(messages.Offer)) == (leaves_s > 50.0)


class Reluctant(Buffer):
    """Takes trajectories only from some time on."""

    def handle(self, peer: str, request: Any, now: float) -> list[messages.Reply]:
        if isinstance(request, messages.Push) and now < 53.0:
            return [messages.Retry(seconds=0.5)]
        return super().handle(peer, request, now)


def test_an_exploration_on_its_way_is_handed_in_though_its_actor_leaves(
    run: Callable[..., None],
) -> None:
    buffer = Reluctant((0.0, granted({"kind": "explore"})))
    run(buffer, Walker(), 51.0, ActorComponents(questioner=Teacher()))  # type: ignore[arg-type]
    assert len(buffer.seen(messages.Push)) == 2
    assert buffer.seen(messages.Release) == []


def test_no_evaluation_waits_for_an_endpoint_that_explores(run: Callable[..., None]) -> None:
    class Slow(Teacher):
        async def explore(self, ticket, setting, engine, progress, deliver) -> None:
            await asyncio.sleep(1000.0)

    evaluation = granted({"kind": "eval", "group_id": 1, "weights": version(1)})
    buffer = Buffer((0.0, granted({"kind": "explore"})), (1.0, evaluation))
    run(buffer, Walker(), 60.0, ActorComponents(questioner=Slow()), questioning="llm")  # type: ignore[arg-type]
    assert [push.trajectory.group_id for push in buffer.seen(messages.Push)] == [1, 1]


class Mumbler(Walker):
    """Walks right for `readable` turns, then writes nothing that can be read."""

    def __init__(self, readable: int) -> None:
        super().__init__()
        self.readable = readable

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        if len(self.requests) <= self.readable:
            return generation
        tokens = CHAT.tokens_of("mumble")
        weights = generation.weights[:1] * len(tokens)
        return Generation(tokens=tokens, logprobs=[-1.0] * len(tokens), weights=weights)


@pytest.mark.parametrize("readable, failures", [(3, 0), (0, 1)])
def test_an_unreadable_group_of_one_is_a_failure_only_where_nothing_was_read(
    run: Callable[..., None], readable: int, failures: int
) -> None:
    groups = [granted({"group_id": number, "members": [0]}) for number in range(2)]
    buffer, components = Buffer((0.0, groups[0]), (5.0, groups[1])), ActorComponents()
    run(buffer, Mumbler(readable), 60.0, components, groups=1)
    first, second = (push.trajectory for push in buffer.seen(messages.Push))
    assert all(second.turn_flags & TurnFlag.FORMAT_ERROR)
    assert any(first.turn_flags & TurnFlag.FORMAT_ERROR) == (readable == 0)
    assert len(components.failures.totals()) == failures


def test_terms_make_the_reward_that_judge_and_experience_see(run: Callable[..., None]) -> None:
    buffer, court = Buffer((0.0, granted())), Court()
    terms = [TermConfig("tool_calls"), TermConfig("success", 2.0), TermConfig("env", 0.5)]
    scorer = RewardScorer(Config(reward=RewardConfig(terms, "total", 2.4)))
    run(buffer, Walker(), 60.0, ActorComponents(judge=court, scorer=scorer))
    pushes = buffer.seen(messages.Push)
    one = pushes[0].trajectory
    assert one.terms == {"tool_calls": 0.0, "success": 1.0, "env": one.terms["env"]}
    assert one.reward == pytest.approx(2.0 + 0.5 * one.terms["env"])
    assert sum(one.turn_rewards.tolist()) == pytest.approx(one.reward)
    assert {episode.reward for episode in court.heard} == {p.trajectory.reward for p in pushes}
    assert one.success == (one.reward >= 2.4) == court.heard[0].success


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raises failed: KeyError: 'turns'"),
        ("enormous", "enormous, env led to a reward of 1e+09, the largest that safety.max_reward"),
    ],
)
def test_a_failing_reward_term_is_named_and_does_not_end_the_actor(
    run: Callable[..., None], name: str, problem: str
) -> None:
    scorer = RewardScorer(Config(reward=RewardConfig([TermConfig(f"own_rewards:{name}")])))
    buffer, components = Buffer((0.0, granted())), ActorComponents(scorer=scorer)
    run(buffer, Walker(), 60.0, components)
    assert not buffer.seen(messages.Push)
    (total,) = components.failures.totals()
    assert (total.kind, total.name) == ("reward", "reward.terms")
    assert problem.replace(", env", "") in str(total)
