"""Checks of a configuration that need the learner's code: the functions of a user's own."""

from collections.abc import Iterator

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.secrets import secret
from evolver_async.extension import is_own


def check(config: Config) -> None:
    """Raise ValueError, naming the key, for a function of one's own that cannot be used."""
    stages = [config, *(stage_config(config, index) for index in range(len(config.stages)))]
    for staged in stages:
        if staged.teacher.url and staged.teacher.key_env:
            secret(staged.teacher.key_env, "teacher.key_env")
        for problem in _problems(staged):
            raise ValueError(problem)


def _problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the own functions of one stage; built-in ones need no import."""
    try:
        if is_own(config.selection.kind):
            from learner.data.selection import SELECTIONS

            SELECTIONS.of(config.selection.kind)
        if is_own(config.advantage.kind):
            from learner.advantage.group_relative import ESTIMATORS

            ESTIMATORS.of(config.advantage.kind)
        if is_own(config.correction.kind):
            from learner.loss.correction import CORRECTIONS

            needs = getattr(CORRECTIONS.of(config.correction.kind), "prepare", None)
            if needs is not None and config.correction.anchor == "interpolate":
                why = f"{config.correction.kind} prepares its numbers before the step"
                yield f"correction.anchor: must be recompute: {why}"
    except ValueError as error:
        yield str(error)
