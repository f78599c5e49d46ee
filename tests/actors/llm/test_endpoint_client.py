"""The endpoint: whatever comes from there is an answer, or Unavailable with the reason."""

import asyncio
import gzip
import logging
import socket
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import DEADLINE_S
from openai_server import (
    OpenAIServer,
    Reply,
    answer,
    closed_url,
    cut,
    dripping,
    dropped,
    endless,
    garbage,
    large,
    raw,
    silence,
    status,
)
from virtual_time import pass_time

from actors.llm import endpoint_client
from actors.llm.budget import Breaker, Budget
from actors.llm.endpoint_client import Endpoint, Unavailable
from evolver_async.config import ConfigError, LlmConfig

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello ü \ud800"}]


def settings(url: str, **changes: Any) -> LlmConfig:
    """Impatient, so that tests are quick."""
    numbers: dict[str, Any] = {"timeout_s": 5.0, "retries": 0, "breaker_failures": 1000}
    return LlmConfig(**{"url": url, "model": "m", **numbers, **changes})


def with_endpoint(config: LlmConfig, use: Callable[[Endpoint], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        endpoint = Endpoint(config, "judge")
        try:
            return await asyncio.wait_for(use(endpoint), DEADLINE_S)
        finally:
            await endpoint.close()

    return asyncio.run(whole())


async def reason_of(call: Awaitable[str]) -> str:
    """Why there was no answer; "" where there was."""
    try:
        await call
    except Unavailable as error:
        return error.reason
    return ""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "PAUSE_S", 0.002)


def test_a_call_says_what_is_wanted_and_returns_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "sk-0123456789")

    async def use(endpoint: Endpoint) -> tuple[str, str, dict[str, float]]:
        first = await endpoint.complete(CHAT)
        second = await endpoint.complete(CHAT, max_tokens=7, temperature=0.5)
        return first, second, endpoint.counters()

    with OpenAIServer("héllo 😀", answer("two", tokens=25)) as server:
        config = settings(server.url + "/", key_env="SOME_VARIABLE", max_tokens=99)
        first, second, counters = with_endpoint(config, use)
    assert (first, second) == ("héllo 😀", "two")
    one, two = server.calls
    assert one.path == "/v1/chat/completions"
    assert one.headers["authorization"] == "Bearer sk-0123456789"
    assert one.headers["accept-encoding"] == "identity"
    assert one.body == {"model": "m", "messages": CHAT, "max_tokens": 99, "temperature": 0.0}
    assert (two.body["max_tokens"], two.body["temperature"]) == (7, 0.5)
    assert 0 < counters.pop("judge/seconds") < 5
    assert counters == {
        "judge/calls": 2,
        "judge/tokens": 35,
        "judge/failures": 0,
        "judge/retries": 0,
        "judge/cut": 0,
        "judge/refused_by_breaker": 0,
        "judge/refused_by_budget": 0,
    }


def test_without_a_variable_no_key_is_sent() -> None:
    with OpenAIServer("yes") as server:
        with_endpoint(settings(server.url), lambda endpoint: endpoint.complete(CHAT))
    assert "authorization" not in server.calls[0].headers


@pytest.mark.parametrize("value", [None, "", " ", "two\nlines", "schlüssel"])
def test_a_key_that_cannot_be_is_an_error_that_names_the_setting(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_VARIABLE", value)
    with pytest.raises(ConfigError, match=r"^questioning\.llm\.key_env: .*SOME_VARIABLE") as error:
        Endpoint(settings("http://x/v1", key_env="SOME_VARIABLE"), "questioning")
    assert not value or not value.strip() or value not in str(error.value)


def test_a_key_that_the_server_repeats_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "sk-0123456789")
    caplog.set_level(logging.DEBUG)

    async def use(endpoint: Endpoint) -> str:
        with pytest.raises(Unavailable) as error:
            await endpoint.complete(CHAT)
        return str(error.value)

    with OpenAIServer(status(401, "x" * 150 + " wrong key sk-0123456789!")) as server:
        config = settings(server.url, key_env="SOME_VARIABLE", breaker_failures=1)
        said = with_endpoint(config, use)
    assert "status 401" in said and "judge.llm" in said
    assert "circuit breaker opens" in caplog.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("actors")]
    for text in (said, *ours):
        assert "sk-" not in text and "0123456789" not in text


NESTED = b'{"choices":[{"message":{"content":"x"}}],"z":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
HOSTILE: dict[str, tuple[Reply, str]] = {
    "no JSON": (garbage(), "garbage"),
    "nothing": (Reply(), "garbage"),
    "another JSON": (raw([1, 2]), "garbage"),
    "no choices": (raw({"choices": []}), "garbage"),
    "no text": (raw({"choices": [{"message": {"content": None}}]}), "no_text"),
    "no content": (raw({"choices": [{"message": {}}]}), "no_text"),
    "a number": (raw({"choices": [{"message": {"content": 3}}]}), "garbage"),
    "half a character": (
        Reply(body=b'{"choices":[{"message":{"content":"\\ud800 "}}]}'),
        "garbage",
    ),
    "nested": (Reply(body=NESTED), "garbage"),
    "compressed": (
        Reply(body=gzip.compress(b" " * (64 << 20)), headers={"content-encoding": "gzip"}),
        "garbage",
    ),
    "10 MB": (large(), "too_long"),
    "endless": (endless(), "too_long"),
    "endless error": (Reply(status=500, body=b"x" * 65536, repeat=1024), "too_long"),
    "500": (status(500), "status"),
    "429": (status(429), "status"),
    "401": (status(401), "status"),
    "a redirect": (Reply(status=302, headers={"location": "http://127.0.0.1:1/"}), "status"),
    "created": (Reply(status=201, body=b"{}"), "status"),
    "cut": (cut(), "connection"),
    "dropped": (dropped(), "connection"),
    "large header": (Reply(headers={"x": "y" * 200_000}), "connection"),
    "silence": (silence(), "timeout"),
    "dripping": (dripping(), "timeout"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_answer_is_unavailable_for_that_reason(name: str) -> None:
    reply, expected = HOSTILE[name]

    async def use(endpoint: Endpoint) -> tuple[str, dict[str, float]]:
        return await reason_of(endpoint.complete(CHAT)), endpoint.counters()

    with OpenAIServer(reply) as server:
        tracemalloc.start()
        began = time.monotonic()
        config = settings(server.url, timeout_s=0.5 if expected == "timeout" else 20.0)
        reason, counters = with_endpoint(config, use)
        elapsed, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert reason == expected
    assert (counters["judge/calls"], counters["judge/failures"]) == (1, 1)
    assert elapsed < 10
    if name != "10 MB":  # there the server's own copy is measured as well
        assert peak < 16 << 20


def test_who_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: Any, **__: Any) -> None:
        assert host in ("no.such.host.invalid", b"no.such.host.invalid")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def use(endpoint: Endpoint) -> str:
        return await reason_of(endpoint.complete(CHAT))

    assert with_endpoint(settings(closed_url()), use) == "connection"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert with_endpoint(settings("http://no.such.host.invalid/v1"), use) == "connection"


def test_an_answer_of_the_largest_size_is_still_one() -> None:
    async def use(endpoint: Endpoint) -> int:
        return len(await endpoint.complete(CHAT))

    with OpenAIServer("x" * 500_000) as server:
        assert with_endpoint(settings(server.url, max_bytes=501_000), use) == 500_000


@pytest.mark.parametrize("usage", [None, 7, [], {"total_tokens": -1}])
def test_a_usage_that_makes_no_sense_is_replaced_by_an_estimate(usage: Any) -> None:
    async def use(endpoint: Endpoint) -> float:
        await endpoint.complete(CHAT)
        return endpoint.counters()["judge/tokens"]

    for said in (usage, {"total_tokens": 10**400}, {"total_tokens": "9"}, {"total_tokens": 1e300}):
        reply = raw({"choices": [{"message": {"content": "a" * 4000}}], "usage": said})
        with OpenAIServer(reply) as server:
            assert 1000 < with_endpoint(settings(server.url), use) < 1300


@pytest.mark.parametrize(
    ("text", "finish", "advice"),
    [(None, "length", True), ("", "length", True), (None, "content_filter", False)],
)
def test_an_answer_without_text_is_paid_and_not_asked_for_again(
    text: str | None, finish: str, advice: bool
) -> None:
    message = {"role": "assistant", "content": text, "reasoning_content": "thoughts"}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    reply = raw({"choices": [choice], "usage": {"total_tokens": 2100}})
    said: list[str] = []

    async def use(endpoint: Endpoint) -> dict[str, float]:
        for _ in range(3):
            with pytest.raises(Unavailable) as error:
                await endpoint.complete(CHAT)
            said.append(f"{error.value.reason}: {error.value}")
        return endpoint.counters()

    limits = {"retries": 3, "breaker_failures": 1, "max_tokens": 2048, "budget_tokens": 4000}
    with OpenAIServer(reply, reply, "never asked for") as server:
        counters = with_endpoint(settings(server.url, **limits), use)
    assert len(server.calls) == 2 and counters["judge/tokens"] == 4200
    assert said[0] == said[1] and finish in said[0] and said[0].startswith("no_text: judge.llm: ")
    assert ("raise judge.llm.max_tokens (2048)" in said[0]) == advice
    assert said[2].startswith("budget: ")


def test_answers_that_are_cut_are_counted_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(endpoint: Endpoint) -> tuple[list[str], dict[str, float]]:
        return [await endpoint.complete(CHAT) for _ in range(3)], endpoint.counters()

    cuts = [answer("one", finish="length"), "two", answer("three", finish="length")]
    with OpenAIServer(*cuts) as server:
        texts, counters = with_endpoint(settings(server.url, max_tokens=9), use)
    assert texts == ["one", "two", "three"] and counters["judge/cut"] == 2
    assert counters["judge/failures"] == 0
    warnings = [one.getMessage() for one in caplog.records if "max_tokens" in one.getMessage()]
    assert len(warnings) == 1 and "judge.llm.max_tokens (9)" in warnings[0]


def test_what_may_be_gone_the_next_time_is_tried_again() -> None:
    async def use(endpoint: Endpoint) -> tuple[str, dict[str, float]]:
        return await endpoint.complete(CHAT), endpoint.counters()

    with OpenAIServer(status(500), status(429), garbage(), dropped(), "at last") as server:
        text, counters = with_endpoint(settings(server.url, retries=4), use)
    assert text == "at last"
    assert counters["judge/retries"] == counters["judge/failures"] == 4


@pytest.mark.parametrize("reply", [status(400), status(401), status(404), large()])
def test_what_stays_as_it_is_is_not_tried_again(reply: Reply) -> None:
    async def use(endpoint: Endpoint) -> str:
        return await reason_of(endpoint.complete(CHAT))

    with OpenAIServer(reply, otherwise="never asked for") as server:
        assert with_endpoint(settings(server.url, retries=4), use) in ("status", "too_long")
    assert len(server.calls) == 1


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "PAUSE_S", 0.1)
    times: list[float] = []

    def fail(body: dict[str, Any]) -> Reply:
        times.append(time.monotonic())
        return status(503)

    async def use(endpoint: Endpoint) -> str:
        return await reason_of(endpoint.complete(CHAT))

    with OpenAIServer(otherwise=fail) as server:
        assert with_endpoint(settings(server.url, retries=3), use) == "status"
    pauses = [after - before for before, after in pairwise(times)]
    units = [pause / 2**attempt for attempt, pause in enumerate(pauses)]
    assert min(units) >= 0.05, "jitter: half to one and a half"
    assert min(units) < 0.4, "a machine that stands still lengthens some"
    assert len(pauses) == 3


def test_the_server_says_how_long_to_wait() -> None:
    async def use(endpoint: Endpoint) -> tuple[str, float]:
        began = time.monotonic()
        reason = await reason_of(endpoint.complete(CHAT))
        return reason, time.monotonic() - began

    for wanted, least, most, reason in (
        ("1", 1.0, 20.0, ""),
        ("3600", 0.0, 20.0, "status"),  # longer than anybody waits: not tried again
        ("soon", 0.0, 20.0, ""),
        ("-1", 0.0, 20.0, ""),
        ("1e9", 0.0, 20.0, ""),
    ):
        with OpenAIServer(status(429, retry_after=wanted), "yes") as server:
            got, elapsed = with_endpoint(settings(server.url, retries=1), use)
        assert got == reason and least <= elapsed < most, wanted


def test_a_failing_endpoint_is_left_alone_and_tried_by_one_caller_only() -> None:
    async def use(endpoint: Endpoint) -> None:
        for _ in range(3):
            assert await reason_of(endpoint.complete(CHAT)) == "status"
        asked = [endpoint.complete(CHAT) for _ in range(5)]
        assert set(await asyncio.gather(*map(reason_of, asked))) == {"breaker"}
        assert len(server.calls) == 3
        pass_time(60.0)
        asked = [endpoint.complete(CHAT) for _ in range(5)]
        reasons = await asyncio.gather(*map(reason_of, asked))
        assert sorted(reasons) == ["", *["breaker"] * 4]
        asked = [endpoint.complete(CHAT) for _ in range(5)]
        assert set(await asyncio.gather(*map(reason_of, asked))) == {""}
        assert endpoint.counters()["judge/refused_by_breaker"] == 9

    slow = Reply(body=answer("yes").body, after_s=0.1)
    with OpenAIServer(*[status(500)] * 3, slow, otherwise="yes") as server:
        with_endpoint(settings(server.url, breaker_failures=3, breaker_s=60.0), use)
    assert len(server.calls) == 9


def test_a_bad_request_says_nothing_about_the_endpoint() -> None:
    async def use(endpoint: Endpoint) -> list[str]:
        return [await reason_of(endpoint.complete(CHAT)) for _ in range(4)]

    with OpenAIServer(*[status(400)] * 3, "yes") as server:
        assert with_endpoint(settings(server.url, breaker_failures=2), use)[-1] == ""


def test_a_parameter_that_a_model_refuses_is_sent_once() -> None:
    async def use(endpoint: Endpoint) -> list[str]:
        return [await endpoint.complete(CHAT, max_tokens=7) for _ in range(2)]

    limit = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    refused = status(400, limit), status(400, "'temperature' does not support 0.0")
    with OpenAIServer(*refused, "one", "two") as server:
        assert with_endpoint(settings(server.url), use) == ["one", "two"]
    told = [call.body.keys() - {"model", "messages"} for call in server.calls]
    old, new = {"max_tokens"}, {"max_completion_tokens"}
    assert told == [old | {"temperature"}, new | {"temperature"}, new, new]
    assert server.calls[-1].body["max_completion_tokens"] == 7


@given(st.lists(st.tuples(st.sampled_from("sfun"), st.floats(0, 3)), max_size=40))
def test_breaker_against_its_definition(events: list[tuple[str, float]]) -> None:
    """Never more than one call while it rests on failures, none before `rest_s` after the last."""
    breaker, failures, rest_s = Breaker(3, 2.0), 3, 2.0
    now, in_a_row, last_failure, open_calls = 0.0, 0, 0.0, 0
    for event, later_s in events:
        now += later_s
        if event == "n":
            admitted = breaker.admits(now)
            resting = in_a_row >= failures
            assert admitted == (not resting or (now >= last_failure + rest_s and not open_calls))
            open_calls = 1 if resting and admitted else open_calls if resting else 0
            continue
        open_calls = 0
        if event == "s":
            breaker.succeeded()
            in_a_row = 0
        elif event == "f":
            in_a_row, last_failure = in_a_row + 1, now
            assert breaker.failed(now) == (in_a_row >= failures)
        else:
            breaker.undecided()


def test_calls_at_a_time_are_bounded_and_used() -> None:
    async def use(endpoint: Endpoint) -> None:
        await asyncio.gather(*(endpoint.complete(CHAT) for _ in range(20)))

    with OpenAIServer(otherwise=Reply(body=answer("yes").body, after_s=0.2)) as server:
        with_endpoint(settings(server.url, concurrency=4), use)
    assert len(server.calls) == 20 and server.most == 4


@pytest.mark.parametrize(
    ("limit", "calls"),
    [({"budget_calls": 3}, 3), ({"budget_tokens": 25}, 3), ({"budget_s": 3.0}, 2)],
)
def test_a_budget_ends_the_calls(limit: dict[str, Any], calls: int) -> None:
    async def use(endpoint: Endpoint) -> list[str]:
        return [await reason_of(endpoint.complete(CHAT)) for _ in range(6)]

    after_s = 1.5 if "budget_s" in limit else 0.0
    with OpenAIServer(otherwise=Reply(body=answer("yes").body, after_s=after_s)) as server:
        reasons = with_endpoint(settings(server.url, **limit), use)
    assert reasons == [""] * calls + ["budget"] * (6 - calls)
    assert len(server.calls) == calls


def test_failed_calls_use_up_the_budget_too() -> None:
    async def use(endpoint: Endpoint) -> str:
        return await reason_of(endpoint.complete(CHAT))

    with OpenAIServer() as server:
        assert with_endpoint(settings(server.url, retries=9, budget_calls=4), use) == "budget"
    assert len(server.calls) == 4


def test_a_budget_names_what_is_used_up() -> None:
    budget = Budget(LlmConfig(budget_calls=2, budget_s=1.5))
    budget.spend(calls=1, seconds=1.4)
    assert budget.exhausted() == ""
    budget.spend(seconds=0.1)
    assert budget.exhausted() == "the budget of 1.5 seconds is used up"


def test_a_time_limit_holds_for_waiting_and_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "PAUSE_S", 0.05)

    async def use(endpoint: Endpoint) -> list[tuple[str, float]]:
        async def one() -> tuple[str, float]:
            began = time.monotonic()
            reason = await reason_of(endpoint.complete(CHAT, within_s=0.5))
            return reason, time.monotonic() - began

        return await asyncio.gather(*(one() for _ in range(60)))

    for otherwise, reasons in ((silence(), {"timeout"}), (status(500), {"status", "timeout"})):
        with OpenAIServer(otherwise=otherwise) as server:
            config = settings(server.url, concurrency=1, retries=100)
            for reason, elapsed in with_endpoint(config, use):
                assert reason in reasons and elapsed < 20  # 60 after each other: 30 s


def test_more_calls_than_can_be_made_in_time_do_not_open_the_breaker() -> None:
    """Half of the time is left for a call that begins, so that none is cut short by its wait."""

    async def use(endpoint: Endpoint) -> tuple[list[str], dict[str, float]]:
        calls = (endpoint.complete(CHAT, within_s=4.0) for _ in range(8))
        reasons = await asyncio.gather(*map(reason_of, calls))
        assert await reason_of(endpoint.complete(CHAT)) == "", "the breaker is closed"
        return reasons, endpoint.counters()

    with OpenAIServer(otherwise=Reply(body=answer("yes").body, after_s=1.2)) as server:
        config = settings(server.url, concurrency=1, breaker_failures=1)
        reasons, counters = with_endpoint(config, use)
    assert set(reasons) == {"", "timeout"} and counters["judge/failures"] == 0
    assert counters["judge/calls"] == reasons.count("") + 1, "what timed out made no call"


def test_a_cancelled_call_leaves_room_for_others() -> None:
    async def use(endpoint: Endpoint) -> str:
        assert await reason_of(endpoint.complete(CHAT)) == "status"
        pass_time(60.0)
        trial = asyncio.create_task(endpoint.complete(CHAT))
        while len(server.calls) < 2:
            await asyncio.sleep(0.01)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        return await endpoint.complete(CHAT)

    with OpenAIServer(status(500), silence(), "yes") as server:
        config = settings(server.url, concurrency=1, breaker_failures=1, breaker_s=60.0)
        assert with_endpoint(config, use) == "yes"
