"""Episodes of several players at the endpoint: whose tokens and rewards are whose."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from scripted_agents import ASK, CHAT, Client, Scripted, run

from actors.checks.config import check
from actors.endpoint.outcome import AgentOutcome, outcome_of
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Role, TurnFlag

EVEN, ODD = PLAYERS = ("even", "odd")


async def say(client: Client, player: str, messages: list[Any]) -> None:
    """Ask for a player's next turn, and append it."""
    answer = await client.chat.completions.create(model=player, messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def pennies(client: Client) -> dict[str, float]:
    """Two rounds of matching pennies; both are told the same, so only their names differ."""
    talks: dict[str, list[Any]] = {player: [*ASK] for player in PLAYERS}
    score = 0
    for _ in range(2):
        for player in PLAYERS:
            await say(client, player, talks[player])
        shown = {player: talks[player][-1]["content"] for player in PLAYERS}
        score += 1 if shown[EVEN] == shown[ODD] else -1
        for player in PLAYERS:
            talks[player].append({"role": "user", "content": "again"})
    return {EVEN: score, ODD: -score}


def test_each_player_has_its_own_sequences_turns_and_reward() -> None:
    engine = Scripted("head", "head", "tail", "tail")
    ran = run(pennies, engine, players=PLAYERS)
    trajectory = ran.one
    assert [(one.name, one.reward, one.success, one.turns) for one in trajectory.players] == [
        (EVEN, 2.0, True, [0, 2]),
        (ODD, -2.0, False, [1, 3]),
    ]
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    assert trajectory.turn_rewards.tolist() == [0.0, 0.0, 2.0, -2.0]
    first, second = trajectory.sequences  # although their beginnings are the same, token by token
    assert [trajectory.player_of(one) for one in (first, second)] == [EVEN, ODD]
    contexts = [request.tokens for request in engine.requests]
    for sequence, calls in ((first, (0, 2)), (second, (1, 3))):
        tokens = sequence.tokens.tolist()
        for call in calls:
            assert tokens[: len(contexts[call])] == contexts[call]
        acted = sequence.turns[sequence.roles == Role.ACTION]
        assert np.unique(acted).tolist() == [*calls]
        assert (sequence.roles[len(contexts[calls[0]]) :] != Role.PROMPT).all(), "it only grew"


def test_a_conversation_that_changes_its_player_is_not_continued() -> None:
    async def taken_over(client: Client) -> dict[str, float]:
        messages = [*ASK]
        await say(client, EVEN, messages)
        messages.append({"role": "user", "content": "and?"})
        await say(client, ODD, messages)
        return {EVEN: 1.0, ODD: 1.0}

    trajectory = run(taken_over, Scripted("head", "tail"), players=PLAYERS).one
    first, second = trajectory.sequences
    said = [CHAT.text_of(one.tokens[one.roles == Role.ACTION].tolist()) for one in (first, second)]
    assert said == ["head", "tail"]
    # the other player's words are in the context of the second, and are not trained again
    assert len(first) <= len(second) and trajectory.success


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_all_api_forms_name_the_player_as_model(path: str) -> None:
    async def player(client: Client) -> dict[str, float]:
        body: dict[str, Any] = {"max_tokens": 9} if path == "messages" else {}
        body |= {"input": "a"} if path == "responses" else {"messages": ASK}
        async with httpx.AsyncClient(headers={"x-api-key": client.api_key}) as http:
            url = f"{client.base_url}{path}"
            unknown = await http.post(url, json=body | {"model": "policy"})
            assert unknown.status_code == 404
            assert all(name in unknown.text for name in PLAYERS)
            known = await http.post(url, json=body | {"model": ODD})
            assert known.status_code == 200 and known.json()["model"] == ODD
            listed = (await http.get(f"{client.base_url}models")).json()
            assert [one["id"] for one in listed["data"]] == [*PLAYERS]
        return {EVEN: -1.0, ODD: 1.0}

    trajectory = run(player, Scripted("head"), players=PLAYERS).one
    # the one that did not move has an outcome, and no turns
    assert [(one.name, one.reward, one.turns) for one in trajectory.players] == [
        (EVEN, -1.0, []),
        (ODD, 1.0, [0]),
    ]


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({EVEN: 1.0}, ODD),
        ({EVEN: 1.0, ODD: -1.0, "third": 0.0}, "third"),
        ({EVEN: 1.0, ODD: float("nan")}, ODD),
        ({EVEN: 1.0, ODD: "much"}, ODD),
        ({}, "rollout.players"),
    ],
)
def test_rewards_of_players_are_checked(returned: dict[str, Any], named: str) -> None:
    async def player(client: Client) -> dict[str, Any]:
        await pennies(client)
        return returned

    ran = run(player, Scripted("a", "a", "a", "a"), players=PLAYERS)
    assert ran.error is not None and named in str(ran.error)
    assert ran.counts["agent/no_reward"] == 1


def test_rewards_of_players_need_players() -> None:
    with pytest.raises(ValueError, match=r"rollout\.players"):
        outcome_of({EVEN: 1.0})
    with pytest.raises(ValueError, match=r"rollout\.players"):
        outcome_of(AgentOutcome({EVEN: 1.0}, True))


def test_one_number_is_the_reward_of_all_players() -> None:
    async def player(client: Client) -> float:
        await pennies(client)
        return 1.0

    trajectory = run(player, Scripted("a", "a", "a", "a"), players=PLAYERS).one
    assert [(one.reward, one.success) for one in trajectory.players] == [(1.0, True), (1.0, True)]
    assert trajectory.turn_rewards.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert (trajectory.reward, trajectory.success) == (1.0, True)


def test_a_deadline_is_told_of_by_the_last_turn_of_every_player() -> None:
    async def player(client: Client) -> float:
        await pennies(client)
        await asyncio.sleep(60)
        return 1.0

    limits = {"episode_timeout_s": 0.5, "step_timeout_s": 0.1, "truncated_reward": -0.5}
    trajectory = run(player, Scripted("a", "a", "a", "a"), players=PLAYERS, **limits).one
    late = [bool(flag & TurnFlag.LATE) for flag in trajectory.turn_flags.tolist()]
    assert late == [False, False, True, True]
    assert [one.reward for one in trajectory.players] == [-0.5, -0.5]


def test_a_conversation_without_room_is_told_of_by_its_own_player() -> None:
    async def player(client: Client) -> dict[str, float]:
        await pennies(client)
        with pytest.raises(Exception, match="context_length_exceeded"):
            long = [{"role": "user", "content": "a " * 300}]
            await client.chat.completions.create(model=EVEN, messages=long)
        return {EVEN: 0.0, ODD: 0.0}

    engine = Scripted("a", "a", "a", "a")
    trajectory = run(player, engine, players=PLAYERS, max_length=200).one
    full = [bool(flag & TurnFlag.FULL) for flag in trajectory.turn_flags.tolist()]
    assert full == [False, False, True, False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["rollout.players=[even]"], "rollout.players"),
        (["rollout.players=[even,even]"], "rollout.players"),
        (["rollout.players=[even,'an odd one']"], "rollout.players"),
        (["rollout.agent=''"], "rollout.players"),
        (["reward.terms=[{name: length}]"], "reward.terms"),
        (["advantage.baseline=shared", "selection.kind=dynamic"], "advantage.baseline"),
    ],
)
def test_settings_that_cannot_be_with_players_are_refused(options: list[str], named: str) -> None:
    usual = ["env.name=bandit", "rollout.agent=tests.support.arm_agent:puller"]
    usual += ["rollout.players=[even,odd]", "stages.0.steps=1"]
    check(load(None, usual))
    with pytest.raises(ConfigError, match=named):
        load(None, [*usual, *options])
