"""Questions to a language model whose answers must be JSON of a given form."""

import asyncio
import json
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from actors.llm.endpoint_client import Endpoint

T = TypeVar("T")

ATTEMPTS = 2  # until an answer can be parsed
QUESTION_CHARS = 24_000  # of all recorded texts in one question
TEXT_CHARS = 2_000  # of one of them
FENCE = "```"

log = logging.getLogger(__name__)


class JsonClient:
    """Client of one endpoint. `malformed`: number of answers that could not be parsed.

    `limit_s` limits each question, waits, retries and all its attempts included.
    """

    def __init__(self, endpoint: Endpoint, limit_s: float = math.inf) -> None:
        self._endpoint = endpoint
        self._limit_s = limit_s
        self.malformed = 0

    async def ask(
        self, system: str, question: str, parse: Callable[[str], T], temperature: float = 0.0
    ) -> T | None:
        """Return the parsed answer; None if `parse` raises ValueError for every answer.

        Raise Unavailable.
        """
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit_s
        for _ in range(ATTEMPTS):
            within_s = deadline - loop.time()
            answer = await self._endpoint.complete(chat, temperature=temperature, within_s=within_s)
            try:
                return parse(answer)
            except ValueError as error:
                self.malformed += 1
                problem = f"the answer cannot be parsed: {str(error)[:200]}"
                self._endpoint.failed(problem)
                log.info("%s", problem)
            again = f"{problem}. Answer again, with the JSON alone."
            if reply := answer.strip()[:TEXT_CHARS]:
                chat.append({"role": "assistant", "content": reply})
            chat.append({"role": "user", "content": again})
        return None

    def counters(self) -> dict[str, float]:
        return self._endpoint.counters() | {"questioning/malformed": float(self.malformed)}

    async def close(self) -> None:
        await self._endpoint.close()


def decode_json(answer: str, kind: type[T]) -> T:
    """Decode an answer as a `kind`. Raise ValueError.

    Thoughts before it, and text around the last code fence, are left out where they must be.
    """
    text = answer.strip()
    after = text.partition("</think>")[2].strip()
    problem = "it is empty"
    for part in filter(None, (text, after, _fenced(after), _fenced(text))):
        try:
            return msgspec.json.decode(part, type=kind)
        except RecursionError:
            problem = "nested too deeply"
        except ValueError as error:
            problem = str(error)
    raise ValueError(problem)


def _fenced(text: str) -> str:
    """Return what stands within the last code fence; nothing without one."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(FENCE)]
    if len(fences) >= 2:
        return "\n".join(lines[fences[-2] + 1 : fences[-1]])
    whole = text.startswith(FENCE) and text.endswith(FENCE)
    return text.strip("` ").removeprefix("json") if whole else ""


def as_json(value: Any) -> str:
    """Encode recorded data for a question as JSON, which no text in it can break out of."""
    return json.dumps(value, ensure_ascii=False, indent=1)


def truncate(texts: list[str]) -> list[str]:
    """Cut the longest texts to equal lengths, so that all fit a question together."""
    limit, room = TEXT_CHARS, QUESTION_CHARS
    for place, length in enumerate(sorted(min(len(text), TEXT_CHARS) for text in texts)):
        share = room // (len(texts) - place)
        if length > share:
            limit = min(limit, share)
            break
        room -= length
    return [text if len(text) <= limit else f"{text[:limit]} …" for text in texts]


def newest(texts: list[str]) -> list[str]:
    """Return the last texts that fit a question together, in their order."""
    room, kept = QUESTION_CHARS, list[str]()
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return kept[::-1]


def step_records(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Convert (action, observation after it) pairs for a question."""
    texts = truncate([text for pair in pairs for text in pair])
    return [{"did": texts[i], "saw": texts[i + 1]} for i in range(0, len(texts), 2)]
