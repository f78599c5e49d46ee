"""Experience backends of a user's, well or badly behaved."""

import asyncio
from collections.abc import Sequence

from evolver_async.config import Config
from evolver_async.wire.transcripts import Transcript


class Shelf:
    """Gives the first action of a success back, for the same task."""

    def __init__(self) -> None:
        self.lessons: dict[str, str] = {}

    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        return [self.lessons[query]][:top_k] if query in self.lessons else []

    async def contribute(self, query: str, episodes: Sequence[Transcript]) -> None:
        for episode in episodes:
            if episode.success:
                self.lessons[query] = f"say {episode.turns[0].action}"

    async def close(self) -> None: ...


class Slow(Shelf):
    async def contribute(self, query: str, episodes: Sequence[Transcript]) -> None:
        await asyncio.sleep(500)
        await super().contribute(query, episodes)


class Hanging(Shelf):
    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        await asyncio.sleep(1000)
        return []


class Cancelling(Shelf):
    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        raise asyncio.CancelledError


class Numbers(Shelf):
    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        return [1]  # pyright: ignore[reportReturnType]

    async def contribute(self, query: str, episodes: Sequence[Transcript]) -> None:
        raise RuntimeError("the shelf is full")


def shelf(config: Config) -> Shelf:
    kinds = {"slow": Slow, "hanging": Hanging, "cancelling": Cancelling, "numbers": Numbers}
    return kinds.get(config.experience.params.get("kind", ""), Shelf)()


def nothing() -> Shelf:
    return Shelf()
