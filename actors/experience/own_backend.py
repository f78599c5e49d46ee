"""An experience backend of one's own: an actor asks it instead of the experience service.

Its failures leave episodes unguided and are counted; only groups of training reach it.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from actors.envs.base import one_line
from actors.envs.return_checks import text
from actors.experience.guide import SPLIT, NoAnswer
from actors.rollout.environment import own_cancellation
from evolver_async.config import Config
from evolver_async.extension import RAISED, own_function
from evolver_async.wire import messages
from evolver_async.wire.transcripts import Transcript

CONTRIBUTE_S = 600.0  # a language model may read the episodes meanwhile


class ExperienceBackend(Protocol):
    """Result of `experience.kind=package.module:function`; each actor makes one, in its loop.

    Its methods run in the loop of all episodes of the actor, so that they must not block.
    """

    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        """Return at most `top_k` texts that help with the task that `query` describes."""
        ...

    async def contribute(self, query: str, episodes: Sequence[Transcript]) -> None:
        """Take the finished episodes of one group, which are those of one task."""
        ...

    async def close(self) -> None: ...


class OwnBackend:
    """A user's backend, limited to `CONTRIBUTE_S` for each group; without `limited`, as in a serial
    run with its virtual clock, to nothing."""

    name = "experience.kind"

    def __init__(self, backend: ExperienceBackend, top_k: int, *, limited: bool) -> None:
        self._backend = backend
        self._top_k = top_k
        self._limited = limited

    async def retrieve(self, query: str, state: str, timeout_s: float) -> messages.Guidance:
        """Return the backend's texts; a text is known again by its checksum. It is asked in words
        alone, without the key of a state."""
        try:
            async with asyncio.timeout(timeout_s if self._limited else None):
                found = await self._backend.retrieve(query, self._top_k)
            texts = [text("an experience", one) for one in found][: self._top_k]
        except (*RAISED, asyncio.CancelledError) as error:
            raise _no_answer(error) from error
        ids = [zlib.crc32(one.encode("utf-8", "surrogatepass")) for one in texts]
        return messages.Guidance(ids=ids, texts=texts)

    async def contribute(self, group: messages.Contribute) -> None:
        """Hand in a group, unless it was held out."""
        if group.split != SPLIT:
            return
        try:
            async with asyncio.timeout(CONTRIBUTE_S if self._limited else None):
                await self._backend.contribute(group.query, group.episodes)
        except (*RAISED, asyncio.CancelledError) as error:
            raise _no_answer(error) from error

    async def close(self) -> None:
        await self._backend.close()


def own_backend(config: Config) -> OwnBackend:
    """Make the backend that the configuration names, in the actor's loop."""
    experience = config.experience
    make = load_backend(experience.kind)
    return OwnBackend(make(config), experience.top_k, limited=config.launch.kind != "serial")


def load_backend(name: str) -> Callable[[Config], ExperienceBackend]:
    """Import the function of a user's backend. Raise ValueError, which names the key."""
    return own_function("experience.kind", name, ["config"])


def _no_answer(error: BaseException) -> NoAnswer:
    """Raise a cancellation of the caller; return any other error as one of a backend."""
    if own_cancellation(error):
        raise error
    late = isinstance(error, TimeoutError) and not str(error)
    return NoAnswer("no answer in time" if late else one_line(error))
