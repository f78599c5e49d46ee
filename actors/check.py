"""What the rollout wing refuses before anything is started."""

from actors.envs.base import Goals, Rewindable, Scored, Solvable, make_env
from actors.llm import authorization
from actors.questioning.profile import load_profile
from actors.turns import FORMATS
from evolver_async.config import Config
from evolver_async.config.load import stage_config


def check(config: Config) -> None:
    """ValueError names the key that cannot be: environment, its parameters, its profile, turn
    format.

    Every stage is checked with its own overrides.
    """
    for name in ("experience", "judge", "questioning"):
        section = getattr(config, name)
        if section.kind == "llm":
            authorization(section.llm, name)
    if config.questioning.profile:
        load_profile(config.questioning.profile)
    for index, stage in enumerate(config.stages):
        staged = stage_config(config, index)
        env = make_env(staged.env.name, staged.env.params)
        if stage.kind == "sft" and not isinstance(env, Solvable):
            raise ValueError(f"stages[{index}].kind: {staged.env.name} has no solve and actions")
        guided = staged.experience.kind != "none" and staged.rollout.guided_fraction > 0
        if stage.kind == "sft" and guided and not isinstance(env, Rewindable):
            raise ValueError(
                f"rollout.guided_fraction: {staged.env.name} has no state and snapshot, without"
                f" which no demonstration of stages[{index}] can be guided: override it with 0"
            )
        if stage.kind == "rl" and staged.judge.kind == "rule" and not isinstance(env, Scored):
            raise ValueError(f"judge.kind: rule needs a score, which {staged.env.name} has not")
        if staged.questioning.kind == "goals" and not isinstance(env, Goals):
            raise ValueError(f"questioning.kind: {staged.env.name} makes no goals of its states")
        rollout = staged.rollout
        if rollout.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"rollout.format: no turn format {rollout.format!r} (known: {known})")
        style = FORMATS[rollout.format](
            think=rollout.think, actions_per_turn=rollout.actions_per_turn
        )
        if rollout.max_tokens < style.min_tokens:
            raise ValueError(
                f"rollout.max_tokens: {rollout.max_tokens} is too small for one turn"
                f" (at least {style.min_tokens})"
            )
