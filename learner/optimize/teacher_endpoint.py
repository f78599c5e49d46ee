"""Endpoint of a teacher: the log-probs of a prompt's tokens by `POST <url>/completions`, as vLLM
serves them (`prompt_logprobs`).

The endpoint's model must have the policy's tokenizer, as prompts are tokens. Its answers name the
text of every token, by which another tokenizer is noticed.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from evolver_async.config import TeacherConfig
from evolver_async.config.secrets import mask, secret
from evolver_async.errors import TrainingError
from evolver_async.files import parsed
from evolver_async.schema import Array

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a call is repeated, doubled each time
RETRIED = (408, 425, 429)  # and all from 500 on
EXCERPT = 300  # characters of a refusal


class TeacherEndpoint:
    """Calls of `settings.url`. TrainingError, which names the key, if one stays without answer."""

    def __init__(self, settings: TeacherConfig) -> None:
        headers = {}
        if settings.key_env:
            key = secret(settings.key_env, "teacher.key_env")
            headers["authorization"] = f"Bearer {key}"
        self._settings = settings
        self._client = httpx.Client(timeout=settings.timeout_s, headers=headers)

    def top(self, rows: list[list[int]], texts: Callable[[int], str]) -> list[tuple[Array, Array]]:
        """Return the `top_k` likeliest tokens at each place of every row but the first.

        They are int64[T - 1, K], with log-probs float32[T - 1, K]. texts: of a token, in the
        policy's tokenizer.
        """

        def of(row: list[int]) -> tuple[Array, Array]:
            return self._read(row, self._call(row), texts)

        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            return list(pool.map(of, rows))

    def _call(self, row: list[int]) -> dict[str, Any]:
        settings, problem = self._settings, ""
        request = {
            "model": settings.model,
            "prompt": row,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": settings.top_k,
        }
        for attempt in range(settings.retries + 1):
            if attempt:
                time.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (attempt - 1)))
            try:
                answer = self._client.post(f"{settings.url}/completions", json=request)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == httpx.codes.OK:
                return parsed(answer.content)
            problem = f"status {answer.status_code}: {mask(answer.text)[:EXCERPT]!r}"
            if answer.status_code < 500 and answer.status_code not in RETRIED:
                break
        raise TrainingError(f"teacher.url: {settings.url}: {problem}")

    def _read(
        self, row: list[int], answer: dict[str, Any], texts: Callable[[int], str]
    ) -> tuple[Array, Array]:
        where, most = f"teacher.url: {self._settings.url}", self._settings.top_k
        try:
            places = answer["choices"][0]["prompt_logprobs"][1:]
            token_TK = np.zeros((len(places), most), np.int64)
            logp_TK = np.zeros((len(places), most), np.float32)
            for index, listed in enumerate(places):
                own = listed[str(row[index + 1])]  # always listed, whatever its rank
                said, ours = own.get("decoded_token"), texts(row[index + 1])
                if (
                    said is not None
                    and "\ufffd" not in said + ours
                    and said.strip() != ours.strip()
                ):
                    token = f"token {row[index + 1]} is {said!r} there and {ours!r} here"
                    raise TrainingError(f"{where}: has another tokenizer: {token}")
                likeliest = sorted(listed.items(), key=lambda one: -one[1]["logprob"])[:most]
                token_TK[index] = [int(token) for token, _ in likeliest]
                logp_TK[index] = [one["logprob"] for _, one in likeliest]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            wanted = f"prompt_logprobs with {most} tokens a place, as vLLM does"
            raise TrainingError(f"{where}: did not answer {wanted}: {error!r}") from error
        if len(places) != len(row) - 1 or not math.isfinite(float(logp_TK.sum())):
            raise TrainingError(f"{where}: has not one finite log-prob for every token")
        return token_TK, logp_TK
