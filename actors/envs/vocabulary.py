"""Words of the environments of a run, each of which the tiny preset's tokenizer makes a token."""

from typing import Protocol, runtime_checkable

from actors.envs.base import Env, EnvError, make_env, one_line
from evolver_async.config import Config
from evolver_async.config.load import stage_config


@runtime_checkable
class Worded(Env, Protocol):
    """Environment whose texts have words of their own, which the tiny preset is to know."""

    def vocabulary(self) -> list[str]:
        """Return these words, each of letters alone; known before `reset`."""
        ...


def vocabulary_of(config: Config) -> list[str]:
    """Return the words that the environments of all stages name, each once, in their order.

    EnvError if one of them fails.
    """
    found: dict[str, None] = {}
    for index in range(len(config.stages)):
        chosen = stage_config(config, index).env
        env = make_env(chosen.name, chosen.params)
        if isinstance(env, Worded):
            try:
                found |= dict.fromkeys(env.vocabulary())
            except Exception as error:
                problem = f"cannot name its words: {one_line(error)}"
                raise EnvError(f"env.name: {chosen.name!r} {problem}") from error
    return list(found)
