"""Finished episodes: the trajectory that is sent, and what follows from an episode besides."""

import math
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.rollout.episode_config import Setting
from evolver_async.randomness import key
from evolver_async.schema import (
    REWARD_ROUNDING,
    Grammar,
    Player,
    Policy,
    Sequence,
    Ticket,
    Trajectory,
)
from evolver_async.wire.transcripts import Transcript, Turn


@dataclass(frozen=True)
class Finished:
    """One finished episode. `rewarded`: waits for the reward of one that has none yet, and returns
    it with the reward. `settled`: told what became of one that can be delivered again: the reply
    to it, or the exception that kept it from being sent or answered. `query`: its task as text;
    `ending`: its last observation; `instructions`: the environment's in plain English, as they are
    after `reset`; `acted`: the actions that the environment was given, in order; `tools`: specs of
    those that turns could call.

    `scores`: the environment's before the first turn and after each. These, the instructions, the
    actions and the transcript are empty where nothing reads them.
    """

    trajectory: Trajectory
    transcript: Transcript
    query: str
    instructions: str
    ending: str
    acted: list[str]
    tools: list[dict[str, Any]]
    scores: list[float]
    rewarded: "Callable[[], Awaitable[Finished]] | None" = None
    settled: Callable[[object], None] | None = None


Deliver = Callable[[Finished], None]


class RewardTooLarge(ValueError):
    """Reward that the buffer would refuse."""


def refuse_large(largest: float, reward: float, turn_rewards: np.ndarray) -> None:
    """Raise RewardTooLarge if the outcome or a turn has a reward beyond `largest`, of any sign."""
    found = max(map(abs, (reward, *turn_rewards.tolist())))
    if found > largest * REWARD_ROUNDING:
        limit = f"the largest that safety.max_reward allows is {largest:g}"
        raise RewardTooLarge(f"a reward of {found:g}, {limit}")


def assembled(
    ticket: Ticket,
    member: int,
    setting: Setting,
    policy: Policy,
    sequences: list[Sequence],
    *,
    rewards: Iterable[float],
    flags: Iterable[int],
    outcome: tuple[bool, bool],
    seconds: tuple[float, float, float],
    turns: list[Turn],
    query: str,
    content: str,
    instructions: str,
    ending: str,
    acted: list[str],
    tools: list[dict[str, Any]],
    experience_ids: list[int],
    scores: list[float],
    metrics: Mapping[str, float],
    grammars: Iterable[Grammar] = (),
    players: Iterable[Player] = (),
) -> Finished:
    """Assemble a finished episode of K turns without labels. `rewards`, `flags`: K each;
    `content`: the text that tells its task; `outcome`: success and termination; `seconds`: in the
    environment, of generation, in all; `metrics`: the environment's own; `players`: those of an
    episode of several, whose mean reward is the episode's. Raises RewardTooLarge."""
    reward = math.fsum(rewards)
    turn_rewards = np.fromiter(rewards, np.float32)
    if own := [player.reward for player in players]:
        reward = statistics.fmean(own)
    for one in (reward, *own):
        refuse_large(setting.max_reward, one, turn_rewards)
    trajectory = Trajectory(
        group_id=ticket.group_id,
        member=member,
        attempt=ticket.attempt,
        actor=setting.actor,
        incarnation=setting.incarnation,
        content=key(0, "content", ticket.task.env, content),
        sequences=sequences,
        reward=reward,
        success=outcome[0],
        terminated=outcome[1],
        truncated=not outcome[1],
        turn_rewards=turn_rewards,
        turn_flags=np.fromiter(flags, np.uint8),
        labels=np.zeros(len(turn_rewards), np.int8),
        label_source="",
        experience_ids=experience_ids,
        policy=policy,
        metrics=dict(metrics),
        grammars=[*grammars],
        players=[*players],
        timing=dict(zip(("env_s", "generate_s", "total_s"), seconds, strict=True)),
    )
    transcript = Transcript(
        trajectory_id=trajectory.trajectory_id,
        reward=trajectory.reward,
        success=trajectory.success,
        experience_ids=experience_ids,
        turns=turns,
    )
    texts = query, instructions, ending
    return Finished(trajectory, transcript, *texts, acted, tools, scores)
