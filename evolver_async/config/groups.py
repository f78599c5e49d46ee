"""What an rl stage asks of its groups: their size, who of them trains, what length costs."""

from evolver_async.config import Config
from evolver_async.config.values import require

COMPARING = ("spread", "top_p", "top_k", "min_p", "resample_on_correct", "dynamic")


def check_groups(config: Config) -> None:
    """Raises ConfigError for what an rl stage cannot do with the members of its groups."""
    _check_size(config)
    selection, advantage = config.selection, config.advantage
    require(
        selection.members <= config.rollout.group_size,
        "selection.members",
        f"must be at most rollout.group_size ({config.rollout.group_size})",
    )
    require(
        selection.members in (0, config.rollout.group_size) or selection.members >= 4,
        "selection.members",
        f"must be 0 or at least 4 (two good and two bad ones), is {selection.members}",
    )
    require(
        not selection.members or selection.kind == "resample_on_correct",
        "selection.members",
        f"selection.kind={selection.kind} keeps groups whole: leave it at 0",
    )
    require(
        (advantage.overlong_cache > 0) == (advantage.overlong_limit > 0),
        "advantage.overlong_cache",
        "advantage.overlong_limit and advantage.overlong_cache need each other",
    )
    require(
        advantage.overlong_cache <= advantage.overlong_limit,
        "advantage.overlong_cache",
        f"must be at most advantage.overlong_limit ({advantage.overlong_limit})",
    )


def _check_size(config: Config) -> None:
    """Relative advantages and selection by spread need somebody to compare with."""
    for name, value, compares in (
        ("advantage.kind", config.advantage.kind, ("grpo", "adca", "rloo")),
        ("selection.kind", config.selection.kind, COMPARING),
    ):
        require(
            config.rollout.group_size > 1 or value not in compares,
            "rollout.group_size",
            f"{name}={value} compares the members of a group, so it needs at least 2",
        )
