"""Words of the environments of a run, each of which the tiny preset's tokenizer makes a token."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from actors.envs.base import Env, EnvError, make_env, one_line
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.extension import RAISED
from evolver_async.schema import Task


@runtime_checkable
class Worded(Env, Protocol):
    """Environment whose texts have words of their own, which the tiny preset is to know."""

    def vocabulary(self) -> list[str]:
        """Return these words, each of ASCII letters alone; known before `reset`."""
        ...


def vocabulary_of(config: Config) -> list[str]:
    """Return the words that the environments of all stages name, each once, in their order.

    EnvError if one of them fails.
    """
    found: dict[str, None] = {}
    for task in {(one.env, repr(one.params)): one for one in _examples(config)}.values():
        env = make_env(task.env, task.params)
        if isinstance(env, Worded):
            try:
                words = env.vocabulary()
                if other := [word for word in words if not (word.isascii() and word.isalpha())]:
                    raise ValueError(f"{other[0]!r} is not of ASCII letters alone")
            except RAISED as error:
                problem = f"cannot name its words: {one_line(error)}"
                raise EnvError(f"env.name: {task.env!r} {problem}") from error
            found |= dict.fromkeys(words)
    return list(found)


def _examples(config: Config) -> Iterator[Task]:
    """Yield a task of every environment that is trained or evaluated, stage by stage."""
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        source = source_of(staged)
        yield from source.examples()
        yield from source.examples(source.evaluated)
        for chosen in eval_sets_of(staged).values():
            yield from chosen.examples()
