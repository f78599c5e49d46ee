"""Trajectories of logs: rows with tokens and the log-probs with which these were sampled.

    prompt_token_ids, token_ids, logprobs, reward    one turn, as inference servers log it
    sequences, reward                                several turns, a sequence for every context

A sequence is an object with `tokens`, either `roles` (numbers of `Role`, one a token) or `mask`
(1 for tokens that the policy sampled, else 0), and `logprobs` of all tokens or of the sampled ones.
`turns`, as in `schema.Sequence`, is optional: every run of sampled tokens is a turn. Of a row,
`success`, `turn_rewards` (one a turn) and `tokenizer` (the fingerprint of `vocabulary_hash`) are.
"""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from evolver_async.schema import Array, Role, Sequence, Trajectory

LOGGED = ("prompt_token_ids", "token_ids", "logprobs", "sequences", "reward")  # columns
ONE_TURN = "prompt_token_ids, token_ids, logprobs"
AS_ID = "token_id:"  # before the id in the place of a token's text, as vLLM returns it on request


class LoggedTrajectory(NamedTuple):
    """A trajectory of a row; its sequences have no versions. `turn_rewards`: one a turn."""

    sequences: list[Sequence]
    reward: float
    success: bool
    turn_rewards: list[float]


def is_trajectory(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Return True for a row of one of the forms above."""
    return any(row.get(columns.get(name, name)) is not None for name in ("token_ids", "sequences"))


def trajectory_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> LoggedTrajectory:
    """Return the trajectory that a row holds. Raise ValueError, naming the column."""
    reward = row.get(column := columns.get("reward", "reward"))
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"column {column}: must be a number, is {reward!r:.40}")
    sequences, turns = list[Sequence](), 0
    for where, one in _given(row, columns):
        try:
            made = _sequence(one, turns)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        sequences.append(made)
        turns = max(turns, 1 + int(made.turns.max()))
    if not turns:
        raise ValueError("has no token that was sampled")
    given = row.get("turn_rewards")
    turn_rewards = [*[0.0] * (turns - 1), float(reward)]
    if given is not None:
        turn_rewards = _numbers("column turn_rewards", given, np.float32).tolist()
        if len(turn_rewards) != turns or not all(map(math.isfinite, turn_rewards)):
            raise ValueError(f"column turn_rewards: must be {turns} numbers, one a turn")
    success = row.get("success")
    return LoggedTrajectory(
        sequences, float(reward), reward > 0 if success is None else bool(success), turn_rewards
    )


def prompt_hash(row: Mapping[str, Any], columns: Mapping[str, str]) -> int | None:
    """Return a hash of 64 bits of the tokens before the first sampled one; None if there are none
    that can be read."""
    try:
        _, first = _given(row, columns)[0]
        tokens, roles = _tokens(first)
    except (ValueError, IndexError):
        return None
    sampled = np.flatnonzero(roles == Role.ACTION)
    prompt = tokens[: sampled[0] if len(sampled) else len(tokens)]
    return int.from_bytes(blake2b(prompt.tobytes(), digest_size=8).digest())


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the row of a trajectory. Raise ValueError for what a row does not hold."""
    if trajectory.grammars:
        raise ValueError("has turns under a grammar, which a row does not hold")
    if trajectory.players:
        raise ValueError("is of several players, of which a row holds one")
    sequences, turns = list[dict[str, Any]](), 0
    for one in trajectory.sequences:
        logprobs = _short(one.logprobs[one.roles == Role.ACTION])
        made = {"tokens": one.tokens.tolist(), "roles": one.roles.tolist(), "logprobs": logprobs}
        if not np.array_equal(_sequence(made, turns).turns, one.turns):
            made["turns"] = one.turns.tolist()
        turns = max(turns, 1 + int(one.turns.max()))
        sequences.append(made)
    return {
        "sequences": sequences,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "turn_rewards": _short(trajectory.turn_rewards),
    }


def row_of_reply(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of the forms above of what OpenAI's API answered, the row itself or its
    `response`; {} if that has no ids of tokens, or several choices, whose outcomes nobody knows."""
    answered = row.get("response")
    reply: Mapping[str, Any] = answered if isinstance(answered, Mapping) else row
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        return {}
    (choice,) = choices
    prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    known = choice.get("logprobs")
    if not isinstance(known, Mapping) or not prompt:
        return {}
    content = [one for one in known.get("content") or () if isinstance(one, Mapping)]
    texts = [*(one.get("token") for one in content), *(known.get("tokens") or ())]
    tokens = choice.get("token_ids")
    if tokens is None and texts and all(str(one).startswith(AS_ID) for one in texts):
        tokens = [int(str(one).removeprefix(AS_ID)) for one in texts]
    logprobs = [one.get("logprob") for one in content] or known.get("token_logprobs")
    found = {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}
    return {} if tokens is None else found


def _short(array: Array) -> list[float]:
    """Return float32s with the fewest digits that tell them."""
    return [*map(float, map(str, array))]


def _given(
    row: Mapping[str, Any], columns: Mapping[str, str]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the sequences of a row as objects, with their places."""
    column = columns.get("sequences", "sequences")
    given = row.get(column)
    if given is None:
        prompt, tokens, logprobs = (
            _list(f"column {columns.get(name, name)}", row.get(columns.get(name, name)))
            for name in ONE_TURN.split(", ")
        )
        mask = [*[0] * len(prompt), *[1] * len(tokens)]
        one = {"tokens": [*prompt, *tokens], "mask": mask, "logprobs": logprobs}
        return [(f"columns {ONE_TURN}", one)]
    found = _list(f"column {column}", given)
    if not all(isinstance(one, Mapping) for one in found):
        raise ValueError(f"column {column}: must be a list of objects")
    return [(f"column {column}, sequence {number}", one) for number, one in enumerate(found)]


def _tokens(one: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return the tokens and the roles of a sequence."""
    tokens = _numbers("tokens", one.get("tokens"), np.int32)
    if (given := one.get("roles")) is not None:
        roles = _numbers("roles", given, np.uint8)
    else:
        sampled = _numbers("mask", one.get("mask"), np.uint8) > 0
        before = np.cumsum(sampled) == 0
        roles = np.where(before, Role.PROMPT, Role.OBSERVATION)
        roles = np.where(sampled, Role.ACTION, roles).astype(np.uint8)
    if len(roles) != len(tokens):
        raise ValueError(f"{len(roles)} roles or mask of {len(tokens)} tokens")
    return tokens, roles


def _sequence(one: Mapping[str, Any], turns: int) -> Sequence:
    """Make a sequence; without numbers of its own its turns follow the first `turns`."""
    tokens, roles = _tokens(one)
    action = roles == Role.ACTION
    given = _numbers("logprobs", one.get("logprobs"), np.float32)
    if len(given) not in (len(tokens), int(action.sum())):
        raise ValueError(f"{len(given)} logprobs of {int(action.sum())} sampled tokens")
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[action] = given[action] if len(given) == len(tokens) else given
    if (numbers := one.get("turns")) is not None:
        numbered = _numbers("turns", numbers, np.int16)
    else:
        begins = action & ~np.concatenate([[False], action[:-1]])
        numbered = np.where(action, turns - 1 + np.cumsum(begins), -1).astype(np.int16)
    return Sequence(tokens=tokens, roles=roles, turns=numbered, logprobs=logprobs, versions=[])


def _numbers(name: str, value: Any, dtype: type) -> Array:
    """Return a list of numbers as an array; whole ones for a type of integers."""
    kinds = {float, int} if dtype is np.float32 else {int, bool}
    if not kinds.issuperset(map(type, _list(name, value))):
        raise ValueError(f"{name}: must be numbers{'' if float in kinds else ' without fraction'}")
    try:
        return np.array(value, dtype)
    except OverflowError as error:
        raise ValueError(f"{name}: {error}") from None


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        kind = "missing" if value is None else type(value).__name__
        raise ValueError(f"{name}: must be a list, is {kind}")
    return value
