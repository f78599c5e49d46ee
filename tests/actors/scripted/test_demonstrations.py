"""Demonstrations: the form of learned episodes, written by an expert or by chance."""

import asyncio
import itertools
import re

import msgspec
import numpy as np
import pytest
from demonstrations import demonstrated
from rollouts import TOKENIZER, FakeEngine, setting, ticket

from actors.checks.config import check
from actors.envs.base import EnvironmentFailure, make_env
from actors.envs.workshop.workshop_env import Workshop
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.scripted.demonstrations import ScriptedPolicy
from actors.ticket_progress import TicketProgress
from evolver_async.config.load import load
from evolver_async.randomness import key
from evolver_async.schema import Role, Trajectory


def test_experts_reach_the_goal() -> None:
    for slippery in (False, True):
        params = {"slippery": slippery, "success_rate": 0.98}
        for trajectory in demonstrated(ticket(params, members=8), setting(max_turns=30), 1.0):
            assert trajectory.success and trajectory.terminated and trajectory.reward == 1.0
            assert not trajectory.turn_flags.any()


def test_expert_fraction_is_kept_over_many_episodes() -> None:
    successes = [
        trajectory.success
        for group_id in range(10)
        for trajectory in demonstrated(
            ticket({"placement": "corners"}, members=16, group_id=group_id), setting(), 0.3
        )
    ]
    # The random share succeeds in about 1.5 % of these maps.
    assert 0.2 < np.mean(successes) < 0.42


def test_demonstrations_are_the_same_for_the_same_seed() -> None:
    def tokens() -> list[list[int]]:
        group = demonstrated(ticket(members=6), setting(), 0.5)
        return [trajectory.sequences[0].tokens.tolist() for trajectory in group]

    assert tokens() == tokens()
    assert len({tuple(line) for line in tokens()}) > 1


def test_scripted_sequence_has_the_shape_of_a_learned_one() -> None:
    """A learned policy that samples what the script wrote leaves the very same tokens and roles."""
    for think, count in ((False, 1), (True, 2)):
        how = setting(think=think, actions_per_turn=count)
        (scripted,) = demonstrated(ticket(members=1), how, 0.0)
        (sequence,) = scripted.sequences
        assert scripted.policy == "scripted"
        assert sequence.versions == [] and not sequence.logprobs.any()
        turns = [
            sequence.tokens[(sequence.roles == Role.ACTION) & (sequence.turns == turn)].tolist()
            for turn in range(len(scripted.turn_rewards))
        ]
        learned: list[Trajectory] = []

        def deliver(finished: Finished, into: list[Trajectory] = learned) -> None:
            into.append(finished.trajectory)

        engine = FakeEngine({"0/0/0": turns})
        asyncio.run(run_group(ticket(members=1), how, engine, TicketProgress(), deliver))
        (twin,) = learned[0].sequences
        assert twin.tokens.tolist() == sequence.tokens.tolist()
        assert twin.roles.tolist() == sequence.roles.tolist()
        assert twin.turns.tolist() == sequence.turns.tolist()
        assert learned[0].turn_rewards.tolist() == scripted.turn_rewards.tolist()


def test_a_guided_demonstration_follows_what_it_is_told_and_tells_no_skill() -> None:
    told_moves, other_moves = [], []
    tickets = [
        msgspec.structs.replace(ticket(members=12, group_id=group_id), guided=list(range(0, 12, 2)))
        for group_id in range(6)
    ]
    shown = [(one, t) for one in tickets for t in demonstrated(one, setting(max_turns=6), 0.0)]
    for one, trajectory in shown:
        (sequence,) = trajectory.sequences
        assert sequence.guided == (trajectory.member in one.guided)
        if not sequence.guided:
            continue
        text = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.EXPERIENCE].tolist())
        hints = dict(re.findall(r"- (row \d column \d) (\w+) not \w+", text))
        assert 1 <= len(hints) <= 8
        env = make_env("frozen_lake", {})
        env.reset(one.task, key(one.dynamics_seed, trajectory.member))
        for turn in range(len(trajectory.turn_rewards)):
            written = sequence.tokens[(sequence.roles == Role.ACTION) & (sequence.turns == turn)]
            move = TOKENIZER.decode(written.tolist()).split("<")[0].strip()
            best = env.solve()[:1] == [move]
            if hints.get(env.state()) in env.actions():
                assert move == hints[env.state()]
                told_moves.append(best)
            else:
                other_moves.append(best)
            if env.step(move).terminated:
                break
    assert len(told_moves) > 100 and len(other_moves) > 5
    assert 0.1 < np.mean(told_moves) < 0.6  # what it is told gives away no skill


def test_guidance_holds_states_of_other_tasks_and_the_right_ones_are_followed() -> None:
    """The states told are in no order of their own, so that only their names lead to the moves."""
    foreign, orders = 0, set()
    for group_id in range(12):
        asked = ticket({"fatal": False}, members=4, group_id=group_id, env="workshop")
        guided = msgspec.structs.replace(asked, guided=[0, 1, 2, 3])
        for trajectory in demonstrated(guided, setting(), 0.5):
            (sequence,) = trajectory.sequences
            text = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.EXPERIENCE].tolist())
            hints = dict(re.findall(r"- (\w+) (\w+) not \w+", text))
            env = Workshop(fatal=False)
            env.reset(asked.task, 0)
            assert 3 <= len(hints) <= 8 and set(env.item) & hints.keys()
            foreign += len(hints.keys() - set(env.item))
            orders.add(tuple(env.item.index(name) for name in hints if name in env.item))
            for turn, name in enumerate(env.item):
                here = (sequence.roles == Role.ACTION) & (sequence.turns == turn)
                move = TOKENIZER.decode(sequence.tokens[here].tolist()).split("<")[0].strip()
                assert move == hints.get(name, move)
    assert foreign > 100 and {(0, 1, 2), (2, 1, 0), (1, 0, 2)} <= orders


def test_a_demonstration_follows_no_hint_that_is_not_shown() -> None:
    """Without it in the context, what follows it would be a lesson in random moves."""
    asked = ticket({"fatal": False}, members=8, env="workshop")
    guided = msgspec.structs.replace(asked, guided=list(range(8)))
    env = Workshop()
    item = env.reset(asked.task, 0).splitlines()[0].split()[1:]
    right = dict(zip(item, env.solve(), strict=True))
    (bare, *_) = demonstrated(asked, setting(), 1.0)
    prompt = int((bare.sequences[0].roles == Role.ACTION).argmax())
    tight = prompt + asked.sampling.max_tokens + 1
    for how, least, most in ((setting(hint_chars=65), 2, 3), (setting(max_length=tight), 0, 0)):
        for trajectory in demonstrated(guided, how, 1.0):
            (sequence,) = trajectory.sequences
            text = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.EXPERIENCE].tolist())
            hints = dict(re.findall(r"- (\w+) (\w+) not \w+", text))
            assert least <= len(hints) <= most
            for turn in range(len(trajectory.turn_rewards)):
                here = (sequence.roles == Role.ACTION) & (sequence.turns == turn)
                move = TOKENIZER.decode(sequence.tokens[here].tolist()).split("<")[0].strip()
                assert move == hints.get(item[turn], right[item[turn]])


def test_guidance_is_the_same_for_the_same_seed_also_where_other_tasks_have_huge_numbers() -> None:
    def told(group_id: int) -> list[list[int]]:
        asked = ticket({"fatal": False}, members=4, group_id=group_id, env="workshop")
        numbered = msgspec.structs.replace(asked.task, map_seed=(1 << 63) - 1 - group_id)
        guided = msgspec.structs.replace(asked, task=numbered, guided=[0, 1, 2, 3])
        return [t.sequences[0].tokens.tolist() for t in demonstrated(guided, setting(), 0.5)]

    assert told(0) == told(0) != told(1)


def test_a_synthetic_task_is_guided_by_states_of_its_own() -> None:
    """Its goal may not exist on another map."""
    asked = ticket({"fatal": False, "until": 2}, members=4, env="workshop")
    made = msgspec.structs.replace(asked.task, origin="synthetic")
    guided = msgspec.structs.replace(asked, task=made, guided=[0, 1, 2, 3])
    item = Workshop().reset(made, 0).splitlines()[0].split()[1:3]
    for trajectory in demonstrated(guided, setting(), 0.5):
        (sequence,) = trajectory.sequences
        text = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.EXPERIENCE].tolist())
        assert set(re.findall(r"- (\w+) \w+ not \w+", text)) <= set(item)


def test_guided_demonstrations_need_an_environment_that_can_be_rewound() -> None:
    sft = ["env.name=bandit", "experience={kind: contrast, internalise: none}"]
    sft.append("stages=[{kind: sft, steps: 1}]")
    with pytest.raises(ValueError, match=r"^rollout\.guided_fraction: bandit has no"):
        check(load(None, sft))
    check(load(None, [*sft, "rollout.guided_fraction=0"]))
    check(load(None, [*sft[1:]]))


def test_a_demonstrated_turn_beyond_the_limit_is_the_environments_failure() -> None:
    one = ticket(members=1)
    (written,) = demonstrated(one, setting(), 1.0)
    sequence = written.sequences[0]
    counts = np.bincount(sequence.turns[sequence.roles == Role.ACTION])
    few = msgspec.structs.replace(one.sampling, max_tokens=int(counts.max()) - 1)
    with pytest.raises(EnvironmentFailure, match=r"tokens: rollout\.max_tokens is"):
        demonstrated(msgspec.structs.replace(one, sampling=few), setting(), 1.0)


def test_a_random_turn_beyond_the_limit_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = itertools.cycle(["left " * 50, "left"])
    monkeypatch.setattr(ScriptedPolicy, "_answer", lambda *_: next(answers))
    (written,) = demonstrated(ticket(members=1), setting(), 0.0)
    assert written.sequences
    with pytest.raises(EnvironmentFailure, match=r"tokens: rollout\.max_tokens is"):
        demonstrated(ticket(members=1), setting(), 1.0)
