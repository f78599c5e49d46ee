"""Questions to a language model whose answers are JSON of one form, or are no answers."""

import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from actors.llm.client import Endpoint

T = TypeVar("T")

ATTEMPTS = 2  # at an answer that can be read
SHOWN_CHARS = 24_000  # of all recorded texts in one question
TEXT_CHARS = 2_000  # of one of them

log = logging.getLogger(__name__)


class Asker:
    """One actor's endpoint. `malformed`: answers that could not be read."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.malformed = 0

    async def ask(
        self, system: str, question: str, parse: Callable[[str], T], temperature: float = 0.0
    ) -> T | None:
        """What `parse` makes of an answer; None where it raises ValueError at each of them.

        Raises Unavailable.
        """
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for _ in range(ATTEMPTS):
            answer = await self._endpoint.complete(chat, temperature=temperature)
            try:
                return parse(answer)
            except (ValueError, RecursionError) as error:
                self.malformed += 1
                said = f"an answer that cannot be read: {str(error)[:200]}"
                self._endpoint.failed(said)
                log.info("%s", said)
        return None

    def counters(self) -> dict[str, float]:
        return self._endpoint.counters() | {"questioning/malformed": float(self.malformed)}

    async def close(self) -> None:
        await self._endpoint.close()


def convert(answer: str, kind: type[T]) -> T:
    """The JSON that an answer is, perhaps within a fence, as a `kind`; else ValueError."""
    text = answer.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    return msgspec.json.decode(text, type=kind)


def shown(value: Any) -> str:
    """Recorded data in a question: JSON, so that no text in it can end its place."""
    return json.dumps(value, ensure_ascii=False, indent=1)


def cut(texts: list[str]) -> list[str]:
    """The texts, each cut to its fair share of a question."""
    most = min(TEXT_CHARS, SHOWN_CHARS // max(1, len(texts)))
    return [text if len(text) <= most else f"{text[:most]} …" for text in texts]


def steps_shown(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """(action, what came of it) pairs for a question."""
    cuts = cut([text for pair in pairs for text in pair])
    return [{"did": cuts[i], "saw": cuts[i + 1]} for i in range(0, len(cuts), 2)]
