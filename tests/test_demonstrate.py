"""Demonstrations: the form of learned episodes, written by an expert or by chance."""

import asyncio

import numpy as np
from test_rollout import FakeEngine, setting, ticket

from actors.demonstrate import demonstrate_group
from actors.progress import Progress
from actors.rollout import Setting, run_group
from evolver_async.schema import Role, Ticket, Trajectory


def demonstrated(ticket: Ticket, setting: Setting, expert_fraction: float) -> list[Trajectory]:
    done: list[Trajectory] = []

    async def deliver(trajectory: Trajectory) -> None:
        done.append(trajectory)

    asyncio.run(demonstrate_group(ticket, setting, expert_fraction, Progress(), deliver))
    return sorted(done, key=lambda trajectory: trajectory.member)


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

        async def deliver(trajectory: Trajectory, into: list[Trajectory] = learned) -> None:
            into.append(trajectory)

        engine = FakeEngine({"0/0/0": turns})
        asyncio.run(run_group(ticket(members=1), how, engine, Progress(), deliver))
        (twin,) = learned[0].sequences
        assert twin.tokens.tolist() == sequence.tokens.tolist()
        assert twin.roles.tolist() == sequence.roles.tolist()
        assert twin.turns.tolist() == sequence.turns.tolist()
        assert learned[0].turn_rewards.tolist() == scripted.turn_rewards.tolist()
