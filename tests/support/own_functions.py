"""Functions of a user's own for every key that takes one, and some that cannot be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors.formats.turns import ThinkAnswer
from actors.judge.judge import Judge, JudgedEpisode, Labels
from evolver_async.config import AdvantageConfig, CorrectionConfig, SelectionConfig
from evolver_async.schema import Array, Group
from learner.advantage.group_relative import EstimatorInput
from learner.advantage.rewards import Rewards
from learner.loss.correction import ActionTokens, Corrected, correction


@correction(reads_anchor=False, clips=False)
def halved(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """The policy gradient with half of its weight."""
    one_N = torch.ones_like(tokens.old_N)
    weight_N = one_N * settings.params["weight"]
    return Corrected(tokens.theta_N, weight_N, one_N, one_N)


def centred(
    rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig
) -> tuple[Array, float]:
    """Rewards less their mean over the whole step."""
    advantage_P = rewards.reward_P - rewards.reward_P.mean()
    return advantage_P[rewards.trajectory_U], given.baseline


def first_two(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    return set(range(min(2, len(groups))))


def last_in(held: Any, lag: int, params: dict[str, Any]) -> float:
    return -held.order


def by_table(held: Any, lag: int, params: dict[str, Any]) -> float:
    """A rank for some groups alone."""
    return params["ranks"].get(lag)


def broken_order(held: Any, lag: int, params: dict[str, Any]) -> float:
    raise OSError("the table of ranks is missing")


def no_format(*, think: bool, actions_per_turn: int) -> ThinkAnswer:
    """Make a format, and forget to return it."""
    ThinkAnswer(think=think, actions_per_turn=actions_per_turn)  # pyright: ignore


def sink(row: Mapping[str, Any], run_dir: Path) -> None:
    with open(run_dir / "sink.jsonl", "a") as file:
        file.write(json.dumps({"step": row["step"]}) + "\n")


def broken_sink(row: Mapping[str, Any], run_dir: Path) -> None:
    raise RuntimeError("no room")


class Shouted(ThinkAnswer):
    """A turn format under another name."""


class Praise(Judge):
    """A judge to which every turn is good."""

    async def label(self, episode: JudgedEpisode) -> Labels:
        return [1] * len(episode.turns), "praise"


def praise(config: Any, engine: Any, chat: Any, failures: Any) -> Judge:
    return Praise()


def too_few() -> None:
    """Takes no argument."""


constant = 3
