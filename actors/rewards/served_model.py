"""Term `reward_model`: a conversation as a reward model gets it, and the client of a served one."""

import asyncio

import httpx
import msgspec

from actors.llm.endpoint_client import (
    LONGEST_PAUSE_S,
    Unavailable,
    authorization,
    pause_before_retry,
    status_failure,
)
from actors.rewards.facts import EpisodeFacts, Message, Unscorable
from evolver_async.config.sections.reward import ScoringModelConfig
from evolver_async.schema import Role

MOST_BYTES = 1 << 20  # of a server's answer
EXCERPT = 200  # characters of an answer in an error


def conversation(facts: EpisodeFacts) -> list[Message]:
    """Return all messages of an episode."""
    return [*facts.prompt, *facts.completion]


def last_tokens(facts: EpisodeFacts) -> list[int]:
    """Return the tokens of the last context in which the policy wrote, without experience: what a
    reward model of the run was trained on."""
    written = [one for one in facts.trajectory.sequences if (one.roles == Role.ACTION).any()]
    last = (written or facts.trajectory.sequences)[-1]
    return last.tokens[last.roles != Role.EXPERIENCE].tolist()


class _ScoreEntry(msgspec.Struct):
    """One entry of an answer: a plain score, vLLM's /classify or its /pooling."""

    score: float | None = None
    probs: list[float] | None = None
    data: list[float] | None = None

    def values(self) -> list[float]:
        return [self.score] if self.score is not None else self.probs or self.data or []


class _ScoreReply(_ScoreEntry):
    data: list[_ScoreEntry] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class ServedModel:
    """Client of a reward model at a URL, which gets `{"model": …, "messages": […]}`.

    It answers `{"score": number}`, or as vLLM's /classify and /pooling do.
    """

    def __init__(self, settings: ScoringModelConfig, timeout_s: float) -> None:
        self._settings, self._timeout_s = settings, timeout_s
        headers = authorization(settings.key_env, "reward.model.key_env")
        headers["content-type"] = "application/json"
        self._client = httpx.AsyncClient(headers=headers, timeout=None)

    async def score(self, facts: EpisodeFacts) -> float:
        """Return the reward of an episode, with retries. Raises Unscorable: it is never guessed."""
        named = {"model": self._settings.name} if self._settings.name else {}
        body = msgspec.json.encode({"messages": conversation(facts)} | named)
        attempt = 0
        while True:
            try:
                return await self._scored(body)
            except Unavailable as failure:
                pause_s = pause_before_retry(body, attempt, failure)
                last = attempt == self._settings.retries or pause_s > LONGEST_PAUSE_S
                if last or not failure.retryable:
                    raise Unscorable(f"got {failure}") from None
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _scored(self, body: bytes) -> float:
        """Ask once. Raise Unavailable, or Unscorable for an answer that would be the same again."""
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self._settings.url, content=body)
        except TimeoutError:
            raise Unavailable("timeout", f"no answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            text = f"no answer: {type(error).__name__}: {error}"
            raise Unavailable("connection", text) from None
        if response.status_code != 200:
            raise status_failure(response, response.content)
        shown = response.text[:EXCERPT]
        if len(response.content) > MOST_BYTES:
            raise Unscorable(f"got more than {MOST_BYTES} bytes: {shown!r}")
        try:
            answer = msgspec.json.decode(response.content, type=_ScoreReply)
        except (ValueError, RecursionError) as error:
            raise Unscorable(f"got no score: {error}: {shown!r}") from None
        found = (
            answer.values()
            if answer.data is None
            else [value for one in answer.data for value in one.values()]
        )
        if len(found) != 1:
            raise Unscorable(f"got {len(found)} scores, not one: {shown!r}")
        return found[0]

    async def close(self) -> None:
        await self._client.aclose()
