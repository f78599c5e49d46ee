"""The audit of a judge: probes with known labels, their cost, and what the totals say of it."""

import asyncio
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import OpenAIServer, silence, status

from actors.judge.audit import AuditedJudge
from actors.judge.judge import Judge, JudgedEpisode, ModelJudge
from actors.judge.labels import BAD, GOOD, UNLABELLED
from actors.judge.probes import MOST_IDLE, PRAISES, idled, idled_scores, praised
from actors.judge.prompt import SYSTEM, question
from actors.llm.endpoint_client import Endpoint
from evolver_async.config import Config, ablation
from evolver_async.config.load import load
from evolver_async.wire.transcripts import Turn

SAW = re.compile(r"^Step \d+ (saw|did): (.*)$", re.MULTILINE)
turns_of_any_kind = st.lists(
    st.builds(
        Turn,
        observation=st.sampled_from(["at 0", "at 1", "at 2"]),
        state=st.just(""),
        action=st.sampled_from(["", "left", "right"]),
        text=st.sampled_from(["", "I go <answer>right</answer>", "left, surely", "?"]),
    ),
    max_size=12,
)


def walk(cells: list[int], text: str = "I say {}", query: str = "reach 9") -> JudgedEpisode:
    """An episode that visits these cells; the score is the cell."""
    turns = []
    for now, then in pairwise(cells):
        action = "right" if then > now else "left"
        turns.append(
            Turn(observation=f"at {now}", state="", action=action, text=text.format(action))
        )
    return JudgedEpisode(
        query, turns, float(cells[-1] == 9), cells[-1] == 9, list(map(float, cells))
    )


def shown(body: dict[str, Any]) -> list[tuple[str, str]]:
    """What the judge is shown of every step: the observation and the action."""
    texts = [json.loads(text) for _, text in SAW.findall(body["messages"][-1]["content"])]
    return list(zip(texts[::2], texts[1::2], strict=True))


def answers(good: Callable[[str, str, str], bool]) -> Callable[[dict[str, Any]], str]:
    """A judge by what a step saw, did, and left behind (nothing after the last)."""

    def answer(body: dict[str, Any]) -> str:
        steps = shown(body)
        after = [*(saw for saw, _ in steps[1:]), ""]
        labels = [good(*step, then) for step, then in zip(steps, after, strict=True)]
        return "\n".join(
            f"Step {number} Judgment: {'GOOD' if label else 'BAD'}"
            for number, label in enumerate(labels, 1)
        )

    return answer


def honest(saw: str, did: str, after: str) -> bool:
    return after != saw and "right" in did.replace("right thing", "")


def pleased(saw: str, did: str, after: str) -> bool:
    return honest(saw, did, after) or any(praise in did for praise in PRAISES)


def audited(server: OpenAIServer, share: float) -> AuditedJudge:
    section = Config().judge
    section.kind = "llm"
    section.llm.url, section.llm.model, section.llm.retries = server.url, "m", 0
    return AuditedJudge(ModelJudge(section, Endpoint(section.llm, "judge")), share)


def run(
    server: OpenAIServer, share: float, *episodes: JudgedEpisode
) -> tuple[list[list[int]], dict[str, float]]:
    """The labels of the episodes, and the totals."""

    async def whole() -> tuple[list[list[int]], dict[str, float]]:
        judge = audited(server, share)
        try:
            labels = [(await judge.label(one))[0] for one in episodes]
            await judge.settle()
            return labels, judge.counters()
        finally:
            await judge.close()

    return asyncio.run(asyncio.wait_for(whole(), 30))


# ---- probes


@given(turns_of_any_kind, st.integers(0, 5))
def test_an_idle_turn_sees_what_the_turn_after_it_sees(turns: list[Turn], first: int) -> None:
    copy, places = idled(turns, first)
    assert [turn for place, turn in enumerate(copy) if place not in places] == turns
    assert len(places) <= MOST_IDLE and places == sorted(set(places))
    for place in places:
        idle, real = copy[place], copy[place + 1]
        assert idle.observation == real.observation != copy[place + 2].observation
        assert idle.action in ("", real.action)
        assert idle.action or idle.said == "".join(real.said.rsplit(real.action, 1))


def test_idle_turns_are_repetitions_and_void_turns() -> None:
    turns = walk([0, 1, 2, 3, 4, 5, 6], "I <answer>{}</answer>").turns
    copy, places = idled(turns, 0)
    said = [copy[place].said for place in places]
    assert said == ["I <answer>right</answer>", "I <answer></answer>", "I <answer>right</answer>"]
    assert idled_scores([0, 1, 2, 3, 4, 5, 6], places) == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6]


def test_nothing_is_idle_where_nothing_is_seen_to_change() -> None:
    blind = [Turn(observation="?", state="", action="a")] * 5
    assert idled(blind, 0) == (blind, [])
    assert idled(blind[:1], 0)[1] == [] == idled([], 0)[1]


def test_praise_changes_nothing_but_the_text() -> None:
    turns = walk([0, 1, 0]).turns
    for number in range(len(PRAISES)):
        copy = praised(turns, number)
        assert [turn.said for turn in copy] == [f"{t.said} {PRAISES[number]}" for t in turns]
        assert [turn.action for turn in copy] == [turn.action for turn in turns]


# ---- what is asked


@pytest.mark.parametrize(("share", "probes"), [(0.1, 4), (0.3, 12), (0.7, 28)])
def test_probes_cost_their_share_and_train_nothing(share: float, probes: int) -> None:
    episodes = [walk([0, 1, 2, 3], query=str(number)) for number in range(40)]
    with OpenAIServer(otherwise=answers(honest)) as server:
        labels, totals = run(server, share, *episodes)
        assert len(server.calls) == 40 + probes == totals["judge/calls"]
    assert totals["judge/probes"] == probes and totals["judge/probes_unlabelled"] == 0
    assert labels == [[GOOD, GOOD, GOOD]] * 40, "every episode has the labels of its own question"


def test_a_probe_has_the_form_of_an_episode() -> None:
    """Asked in the same words with the same outcome; only its turns are others."""
    one = walk([0, 1, 2, 3])
    with OpenAIServer(otherwise=answers(honest)) as server:
        run(server, 1.0, one)
    real, probe = (call.body for call in server.calls)
    assert probe["messages"][0] == real["messages"][0] == {"role": "system", "content": SYSTEM}
    assert {name: value for name, value in real.items() if name != "messages"} == {
        name: value for name, value in probe.items() if name != "messages"
    }
    for body, turns in ((real, one.turns), (probe, idled(one.turns, 0)[0])):
        asked = question(one.query, turns, one.success, one.reward, Config().judge.max_chars)
        assert body["messages"][1]["content"] == asked


def test_probes_without_labels_are_counted_and_measure_nothing() -> None:
    one = walk([0, 1, 2, 3])
    with OpenAIServer(answers(honest), status(500)) as server:
        labels, totals = run(server, 1.0, one._replace(scores=[]))
    assert labels == [[GOOD, GOOD, GOOD]] and totals["judge/probes_unlabelled"] == 1
    assert totals["judge/known"] == totals["judge/praised"] == 0


def test_a_probe_in_flight_does_not_hold_up_the_end() -> None:
    async def whole(server: OpenAIServer) -> None:
        judge = audited(server, 1.0)
        await judge.label(walk([0, 1, 2]))
        while len(server.calls) < 2:
            await asyncio.sleep(0.01)
        await judge.close()

    with OpenAIServer(answers(honest), otherwise=silence()) as server:
        asyncio.run(asyncio.wait_for(whole(server), 20))


# ---- what the totals say


def test_a_judge_that_is_right_agrees_and_does_not_hear_praise() -> None:
    episodes = [walk([0, 1, 2, 1, 2, 3], query=str(number)) for number in range(12)]
    with OpenAIServer(otherwise=answers(lambda *step: honest(*step) or step[2] == "")) as server:
        _, totals = run(server, 1.0, *episodes)
    assert totals["judge/known"] == totals["judge/known_right"] > 60
    assert totals["judge/praised"] == 6 * 5
    assert totals["judge/praised_good"] == totals["judge/unpraised_good"] == 6 * 4


def test_turns_that_leave_the_score_as_it_is_have_no_known_label() -> None:
    """Only what raised or lowered it tells that a label is right; the others may be either."""
    one = walk([0, 1, 2, 3, 2])._replace(scores=[0.0, 0.0, 1.0, 1.0, 0.5])
    with OpenAIServer(otherwise=answers(honest)) as server:
        labels, totals = run(server, 1e-9, one)
    assert labels == [[GOOD, GOOD, GOOD, BAD]]
    assert (totals["judge/known"], totals["judge/known_right"]) == (2, 2)


def test_a_judge_that_can_be_pleased_is_seen_with_and_without_scores() -> None:
    bare = [walk([0, 1, 2, 1, 2, 3], query=str(number)) for number in range(12)]
    with OpenAIServer(otherwise=answers(pleased)) as server:
        _, totals = run(server, 1.0, *(one._replace(scores=[]) for one in bare))
        assert totals["judge/praised_good"] == totals["judge/praised"]
        assert totals["judge/unpraised_good"] == 0.8 * totals["judge/praised"]
        assert totals["judge/known_right"] == totals["judge/known"] > 0, "nobody praises yet"
        pleasing = [
            walk([0, 1, 2, 1, 0], f"{{}}. {PRAISES[0]}", query=f"p{number}") for number in range(12)
        ]
        _, totals = run(server, 1.0, *(one._replace(scores=[]) for one in pleasing))
        assert totals["judge/known"] > 0 == totals["judge/known_right"]
        _, totals = run(server, 1e-9, *(one._replace(query=f"s{one.query}") for one in pleasing))
        assert totals["judge/probes"] == 0
        assert (totals["judge/known"], totals["judge/known_right"]) == (48, 24), "by the scores"


def test_a_judge_that_likes_long_turns_is_seen() -> None:
    one = walk([0, 1, 2, 3, 4])
    turns = [
        Turn(observation=turn.observation, state="", action="right", text="right" + "!" * 5 * place)
        for place, turn in enumerate(one.turns)
    ]
    with OpenAIServer(otherwise=answers(lambda saw, did, after: len(did) > 12)) as server:
        _, totals = run(server, 1e-9, one._replace(turns=turns))
    counted = {name: totals[f"judge/{name}"] for name in ("longer", "shorter")}
    assert counted == {"longer": 2, "shorter": 2}
    assert (totals["judge/longer_good"], totals["judge/shorter_good"]) == (2, 0)


class Careless(Judge):
    """A judge of one's own that gives one label too few for probes."""

    async def label(self, episode: JudgedEpisode) -> tuple[list[int], str]:
        return [BAD] * min(3, len(episode.turns)), "own"


def test_a_judge_of_ones_own_is_audited_as_well() -> None:
    async def whole() -> dict[str, float]:
        judge = AuditedJudge(Careless(), 1.0)
        for _ in range(4):
            assert await judge.label(walk([0, 1, 2, 3])) == ([BAD] * 3, "own")
        await judge.settle()
        return judge.counters()

    totals = asyncio.run(whole())
    assert (totals["judge/probes"], totals["judge/probes_unlabelled"]) == (4, 2)
    assert (totals["judge/known"], totals["judge/known_right"]) == (12, 0)


class Reluctant(Judge):
    """A judge of one's own that is right, and labels the first turn alone."""

    async def label(self, episode: JudgedEpisode) -> tuple[list[int], str]:
        same = len(episode.turns) > 1 and episode.turns[0] == episode.turns[1]
        labels = [BAD if same else GOOD] + [UNLABELLED] * len(episode.turns)
        return labels[: len(episode.turns)], "own"


def test_turns_that_a_judge_leaves_unlabelled_are_not_wrong() -> None:
    async def whole() -> dict[str, float]:
        judge = AuditedJudge(Reluctant(), 1.0)
        for _ in range(6):
            await judge.label(walk([0, 1, 2, 1]))
        await judge.settle()
        return judge.counters()

    totals = asyncio.run(whole())
    assert totals["judge/probes"] == 6 and totals["judge/probes_unlabelled"] == 0
    assert totals["judge/known"] == totals["judge/known_right"] >= 6
    assert totals["judge/longer"] == totals["judge/shorter"] == 0, "only the last is shorter"


def test_episodes_without_turns_are_no_reason_for_probes() -> None:
    """As those of an agent that makes no call: nothing was judged that a probe could audit."""

    async def whole() -> dict[str, float]:
        judge = AuditedJudge(Reluctant(), 0.5)
        for _ in range(9):
            await judge.label(walk([0])._replace(turns=[]))
        for _ in range(4):
            await judge.label(walk([0, 1, 2, 1]))
        await judge.settle()
        return judge.counters()

    assert asyncio.run(whole())["judge/probes"] == 2


@pytest.mark.parametrize("kind", ["none", "rule"])
def test_probes_that_nobody_can_be_asked_about_are_inert(kind: str) -> None:
    keys = [f"judge.kind={kind}", "judge.probes=0.1", "stages=[{kind: rl, steps: 1}]"]
    assert ablation.lines(load(None, keys)) == [f"inert: judge.probes (judge.kind={kind})"]
