"""A ticket: what an actor is told of the members of a group that it is to play."""

import random

import msgspec

from evolver_async.buffer.state.groups import HeldGroup
from evolver_async.config import Config
from evolver_async.randomness import key
from evolver_async.schema import Sampling, Ticket, WeightId
from evolver_async.wire.envelope import LIMITS

REPLY_BYTES = LIMITS.header_bytes // 2  # of tickets in a reply, to which one more may be added


def ticket_of(
    config: Config, held: HeldGroup, members: list[int], weights: WeightId | None
) -> Ticket:
    """Make the ticket of `members` of a group, under the configuration of its stage.

    `weights`: the oldest that may play it; None before the first.
    """
    seed = config.run.seed
    # Evaluations of all weights have the same episodes, and sets share the luck of their tasks.
    draws = held.task.task_id if held.kind == "eval" else held.group_id
    evaluated = config.eval if held.episode is None else held.episode
    temperature = {"eval": evaluated.temperature, "explore": config.questioning.temperature}
    return Ticket(
        group_id=held.group_id,
        task=held.task,
        kind=held.kind,
        stage=held.stage,
        members=members,
        guided=[member for member in members if member in held.guided],
        dynamics_seed=key(seed, "dynamics", held.kind, draws),
        attempt=held.attempt,
        weights=weights,
        lease_s=config.buffer.lease_s,
        sampling=Sampling(
            temperature=temperature.get(held.kind, config.rollout.temperature),
            max_tokens=config.rollout.max_tokens,
        ),
    )


def encoded_bytes(ticket: Ticket) -> int:
    """Return the size of a ticket in the head of a message, most of which is its task."""
    return len(msgspec.msgpack.encode(ticket))


def guided_members(seed: int, group_id: int, size: int, fraction: float) -> list[int]:
    """Draw the round(fraction x size) members of a group that experience guides, in order."""
    draw = random.Random(key(seed, "guided", group_id))
    return sorted(draw.sample(range(size), round(fraction * size)))
