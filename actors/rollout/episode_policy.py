"""The policy of one episode as the rollout sees it, and the experience that guides it."""

from typing import ClassVar, Literal, NamedTuple, Protocol

from actors.engines.engine import Generation
from actors.rollout.environment import TimedEnvironment


class Advice(NamedTuple):
    """Experience for one episode, or one of its turns; an empty text guides nothing."""

    text: str = ""
    ids: tuple[int, ...] = ()


class Guide(Protocol):
    """Source of experience from earlier episodes."""

    async def advise(self, query: str, state: str) -> Advice: ...

    def count_unguided(self) -> None:
        """Count an episode whose experience does not fit."""
        ...


class EpisodePolicy(Protocol):
    """Author of the ACTION tokens of one episode."""

    kind: ClassVar[Literal["learned", "scripted"]]

    async def advise(self, world: TimedEnvironment, query: str, state: str, /) -> Advice:
        """Return experience for an episode of the task that `query` describes, or for a turn in
        `state`."""
        return Advice()

    def count_unguided(self) -> None:
        """Count an episode whose experience does not fit."""

    async def write(self, world: TimedEnvironment, context: list[int], turn: int, /) -> Generation:
        """Return the turn that follows `context`; a scripted policy gives no `weights` and
        log-probs of 0."""
        ...

    def close(self) -> None:
        """Release what the episode holds."""
