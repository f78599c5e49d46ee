"""People who use the policy: their conversations are recorded, rated later, and delivered."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from browser import EXECUTABLE, browsing
from launches import free_port, wait_for
from msgspec.structs import replace
from scripted_agents import ASK, CHAT, LOOK, NEW, Scripted, called, setting, ticket

from actors.endpoint.conversation_file import ConversationFile
from actors.endpoint.conversations import OPERATOR, Conversations, user_keys
from actors.engines.engine import Engine
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress, renewal
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.sections.rollout import EndpointConfig, RolloutConfig, ServeConfig
from evolver_async.schema import Role
from evolver_async.wire import messages
from evolver_async.wire.client import Rejected

KEYS, RUN = "EVOLVER_TEST_USERS", "EVOLVER_TEST_OPERATOR"
ANNE, BERT, OPERATING = (f"{name}-{'k' * 20}" for name in ("anne", "bert", "operator"))
WANTED = f"rollout={{agent: users, reward_wait_s: 9, endpoint: {{port: 8200, key_env: {RUN}}}}}"
PLAIN = "env.name=bandit", "eval.episodes=0", "stages=[{kind: rl, steps: 9}]"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, f"anne={ANNE} bert={BERT}")
    monkeypatch.setenv(RUN, OPERATING)


class People:
    """Conversations of a running actor, and the tickets that it holds."""

    reply: object = messages.Ack()  # None: none comes

    def __init__(
        self, engine: Engine, wait_s: float, serve: dict[str, Any], path: Path | None
    ) -> None:
        self.path = path
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        endpoint = EndpointConfig(port=port, key_env=RUN)
        served = ServeConfig(users_env=KEYS, **serve)
        rollout = RolloutConfig(endpoint=endpoint, serve=served, reward_wait_s=wait_s)
        self.served = Conversations(engine, CHAT, rollout, file=ConversationFile(path))
        self.http = httpx.AsyncClient(trust_env=False, timeout=20)
        self.finished: list[Finished] = []
        self.progress = TicketProgress()
        self.tickets: list[asyncio.Task[None]] = []

    def grant(self, group: int, members: int = 1, **changes: Any) -> asyncio.Task[None]:
        """Give the actor a ticket."""
        given = replace(ticket(members), group_id=group)
        run = self.served.run(given, setting(**changes), self.progress, self.deliver)
        self.tickets.append(asyncio.create_task(run))
        return self.tickets[-1]

    def deliver(self, finished: Finished) -> None:
        """Take a conversation as the buffer does, or as `reply` says."""
        self.finished.append(finished)
        assert finished.settled is not None
        if self.reply is not None:
            asyncio.get_running_loop().call_soon(finished.settled, self.reply)

    async def ask(
        self, method: str, path: str, body: Any = None, key: str = ANNE, **headers: str
    ) -> tuple[int, Any]:
        headers = {"x-api-key": key} | {
            name.replace("_", "-"): one for name, one in headers.items()
        }
        while True:
            try:
                answer = await self.http.request(
                    method, f"{self.url}/{path}", json=body, headers=headers
                )
            except httpx.ConnectError:  # it does not listen yet
                await asyncio.sleep(0.01)
            else:
                return answer.status_code, answer.json()

    async def say(self, messages: list[Any], key: str = ANNE, **options: Any) -> Any:
        headers = {name: options.pop(name) for name in ("x_train",) if name in options}
        body = {"messages": messages} | options
        status, answer = await self.ask("POST", "v1/chat/completions", body, key, **headers)
        assert status == 200, answer
        return answer

    async def rate(self, id: str, reward: float, key: str = ANNE) -> int:
        return (await self.ask("POST", f"episodes/{id}/reward", {"reward": reward}, key))[0]

    async def listed(self, key: str = OPERATING) -> list[Any]:
        return (await self.ask("GET", "episodes", key=key))[1]["episodes"]

    @property
    def delivered(self) -> list[tuple[int, int, float]]:
        found = [one.trajectory for one in self.finished]
        return [(one.group_id, one.member, one.reward) for one in found]


@asynccontextmanager
async def _people(
    engine: Engine, wait_s: float, serve: dict[str, Any], path: Path | None
) -> AsyncIterator[People]:
    one = People(engine, wait_s, serve, path)
    try:
        yield one
    finally:
        for task in one.tickets:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await one.http.aclose()
        await one.served.close()


def live(
    people: Callable[[People], Awaitable[None]],
    engine: Engine,
    wait_s: float = 60.0,
    path: Path | None = None,
    **serve: Any,
) -> None:
    async def whole() -> None:
        async with _people(engine, wait_s, serve, path) as one, asyncio.timeout(30):
            await people(one)

    asyncio.run(whole())


def reply(answer: Any) -> dict[str, Any]:
    return answer["choices"][0]["message"]


def test_a_rated_conversation_takes_the_place_of_a_ticket_with_the_weights_that_spoke() -> None:
    async def people(one: People) -> None:
        permit = one.grant(7)
        first = await one.say(ASK)
        more = [*ASK, reply(first), {"role": "user", "content": "and now?"}]
        second = await one.say(more)
        assert not permit.done() and not one.finished  # nobody has rated it
        (row,) = await one.listed()
        assert (row["user"], row["state"], row["answers"]) == ("anne", "open", 2)
        assert await one.rate(second["id"], 0.5) == 200  # by the id of any answer
        await permit
        assert one.delivered == [(7, 0, 0.5)]
        (sequence,) = one.finished[0].trajectory.sequences
        said = sequence.tokens[sequence.roles == Role.ACTION].tolist()
        assert "left" in CHAT.text_of(said) and "right" in CHAT.text_of(said)
        assert sequence.versions[-1].weights == NEW
        assert [await one.rate(row["episode"], 0.5), await one.rate(row["episode"], 1)] == [
            200,
            409,
        ]
        assert [found["state"] for found in await one.listed()] == ["delivered"]
        assert one.served.counters()["serve/delivered"] == 1

    live(people, Scripted("left", "right"))


def test_ratings_wait_for_tickets() -> None:
    async def people(one: People) -> None:
        first = one.grant(0)
        ids = [(await one.say(ASK))["id"] for _ in range(2)]
        for number, id in enumerate(ids):
            assert await one.rate(id, float(number)) == 200
        await first
        assert one.delivered == [(0, 0, 0.0)]
        await one.grant(1)
        assert one.delivered == [(0, 0, 0.0), (1, 0, 1.0)]

    live(people, Scripted("left", "right"))


def test_a_group_holds_conversations_that_began_with_the_same_messages() -> None:
    async def people(one: People) -> None:
        pair = one.grant(3, members=2)
        other = [{"role": "user", "content": "something else"}]
        for said, reward in ((ASK, 1.0), (other, 0.25), (ASK, 0.0)):
            assert not pair.done()
            await one.rate((await one.say(said))["id"], reward)
        await pair
        assert one.delivered == [(3, 0, 1.0), (3, 1, 0.0)]
        assert len({found.trajectory.content for found in one.finished}) == 1
        # What of the group came to nothing is granted again: a conversation of its own prompt.
        again = one.grant(3)
        await one.rate((await one.say(other))["id"], 0.5)
        assert not again.done()
        await one.rate((await one.say(ASK))["id"], 0.75)
        await again
        assert one.delivered[2:] == [(3, 0, 0.75)]

    live(people, Scripted(*"abcdef"))


def test_all_forms_continue_one_conversation_and_tools_can_be_called() -> None:
    async def people(one: People) -> None:
        one.grant(0)
        call = reply(await one.say(ASK, tools=[LOOK]))
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a door"}
        await one.say([*ASK, call, result], tools=[LOOK])
        begun = {"input": "hello"}
        _, answer = await one.ask("POST", "v1/responses", begun)
        more = {"input": "go on", "previous_response_id": answer["id"]}
        status, last = await one.ask("POST", "v1/responses", more)
        assert status == 200
        assert (await one.ask("POST", "v1/responses", more, key=BERT))[0] == 400  # it is anne's
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        status, said = await one.ask("POST", "v1/messages", body)
        assert status == 200
        assert [row["answers"] for row in await one.listed()] == [1, 2, 2]
        for id in (last["id"], said["id"]):
            assert await one.rate(id, 1) == 200

    live(people, Scripted(called("north"), "a door", "one", "two", "three"))


# ---- restarts


def killed(one: People, path: Path) -> Path:
    """Return a copy of an actor's file as a kill would leave it now."""
    assert one.path is not None
    for name in one.path.parent.glob(f"{one.path.name}*"):
        shutil.copy(name, path.parent / name.name.replace(one.path.stem, path.stem))
    return path


def test_what_was_answered_and_rated_survives_a_kill(tmp_path: Path) -> None:
    first, second = tmp_path / "first.sqlite", tmp_path / "second.sqlite"
    told: list[Any] = []

    async def before(one: People) -> None:
        one.grant(0, members=2)
        opened, rated = [await one.say(ASK) for _ in range(2)]
        assert await one.rate(rated["id"], 0.5) == 200
        told.extend((opened, rated))
        killed(one, second)

    async def after(one: People) -> None:
        permit = one.grant(1)
        opened, rated = told
        assert [(row["state"], row["answers"]) for row in await one.listed(ANNE)] == [
            ("delivered", 1),
            ("open", 1),
        ]
        await permit
        assert one.delivered == [(1, 0, 0.5)]
        assert [await one.rate(rated["id"], reward) for reward in (0.5, 1)] == [200, 409]
        more = [*ASK, reply(opened), {"role": "user", "content": "and now?"}]
        last = await one.say(more)
        assert await one.rate(opened["id"], 1) == 200  # by the name of an answer of before
        await one.grant(2)
        (sequence,) = one.finished[-1].trajectory.sequences
        said = [CHAT.text_of(sequence.tokens[sequence.turns == turn].tolist()) for turn in (0, 1)]
        assert [text.strip() for text in said] == ["left", "up"], "one stream of both processes"
        assert sequence.action_tokens == (sequence.roles == Role.ACTION).sum() > 0
        assert (await one.ask("GET", f"episodes/{last['id']}"))[1]["state"] == "delivered"

    live(before, Scripted("left", "right"), path=first)
    live(after, Scripted("up"), path=second)


def test_a_conversation_of_which_the_buffer_said_nothing_is_sent_again_with_its_number(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.sqlite", tmp_path / "second.sqlite"
    sent: list[Finished] = []

    async def before(one: People) -> None:
        one.reply = None
        permit = one.grant(0)
        await one.rate((await one.say(ASK))["id"], 1)
        await permit
        killed(one, second)
        sent.extend(one.finished)

    async def after(one: People) -> None:
        one.reply = messages.Dup()
        await one.grant(5)
        sent.extend(one.finished)
        assert [row["state"] for row in await one.listed()] == ["delivered"]

    async def at_last(one: People) -> None:
        permit = one.grant(6)
        assert [row["state"] for row in await one.listed()] == ["delivered"]
        assert not permit.done()

    live(before, Scripted("left"), path=first)
    live(after, Scripted(), path=second)
    live(at_last, Scripted(), path=second)
    numbers = {one.trajectory.conversation for one in sent}
    assert len(sent) == 2 and len(numbers) == 1 and numbers != {msgspec.UNSET}


def test_a_conversation_that_the_buffer_did_not_take_is_delivered_with_another_ticket() -> None:
    async def people(one: People) -> None:
        for number, reply in enumerate((messages.Stale(), TimeoutError(), messages.Ack())):
            one.reply = reply
            permit = one.grant(number)
            if not number:
                await one.rate((await one.say(ASK))["id"], 1)
            await permit
        assert one.delivered == [(0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0)]
        assert one.served.counts["delivered"] == 1
        one.reply = Rejected("reward")
        await one.rate((await one.say(ASK))["id"], 1)
        await one.grant(3)
        assert one.served.counts["undelivered"] == 1 and len(await one.listed()) == 1

    live(people, Scripted("left", "right"))


def test_a_group_keeps_its_prompt_over_a_restart(tmp_path: Path) -> None:
    path, other = tmp_path / "file.sqlite", [{"role": "user", "content": "something else"}]

    async def before(one: People) -> None:
        pair = one.grant(3, members=2)
        for _ in range(2):
            await one.rate((await one.say(ASK))["id"], 1)
        await pair

    async def after(one: People) -> None:
        again = one.grant(3)
        await one.rate((await one.say(other))["id"], 0.5)
        assert not again.done()
        await one.rate((await one.say(ASK))["id"], 0.75)
        await again
        assert one.delivered == [(3, 0, 0.75)]

    live(before, Scripted("left", "right"), path=path)
    live(after, Scripted("left", "right"), path=path)


def test_deletion_leaves_no_text_on_the_disk_and_says_what_the_buffer_has(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"

    def texts() -> bytes:
        return b"".join(one.read_bytes() for one in tmp_path.iterdir())

    async def people(one: People) -> None:
        one.grant(0)
        for number in range(3):
            said = [{"role": "user", "content": f"my secret {number}"}]
            id = (await one.say(said))["id"]
            if not number:
                await one.rate(id, 1)
        assert b"my secret 0" in texts() and b"my secret 2" in texts()
        assert (await one.ask("DELETE", f"episodes/{id}"))[1] == {"forgotten": 1, "delivered": 0}
        assert b"my secret 2" not in texts()
        answer = await one.ask("DELETE", "episodes/of/anne", key=OPERATING)
        assert answer[1] == {"forgotten": 1, "delivered": 1}
        assert b"my secret" not in texts() and await one.listed() == []

    live(people, Scripted("left", "right", "up"), path=path)


def test_a_file_that_is_none_of_conversations_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    path.write_text("something else" * 100)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        ConversationFile(path)


# ---- users


def test_users_see_and_rate_their_own_conversations_alone() -> None:
    async def people(one: People) -> None:
        one.grant(0)
        id = (await one.say(ASK))["id"]
        assert await one.listed(BERT) == [] and len(await one.listed(ANNE)) == 1
        assert await one.rate(id, 1, key=BERT) == 404
        assert (await one.ask("GET", f"episodes/{id}", key=BERT))[0] == 404
        assert (await one.ask("DELETE", f"episodes/{id}", key=BERT))[0] == 404
        for key in ("", "x" * 30, ANNE[:-1]):
            for method, path in (("GET", "episodes"), ("POST", "v1/chat/completions")):
                assert (await one.ask(method, path, key=key))[0] == 401
        _, whole = await one.ask("GET", f"episodes/{id}", key=OPERATING)
        assert [said["content"] for said in whole["messages"]] == ["find it", "gold"]
        assert await one.rate(id, 1, key=OPERATING) == 200

    live(people, Scripted("gold"))


def test_a_conversation_that_may_not_train_is_answered_and_forgotten() -> None:
    async def people(one: People) -> None:
        one.grant(0)
        first = await one.say(ASK)
        assert len(await one.listed()) == 1
        more = [*ASK, reply(first), {"role": "user", "content": "keep this to yourself"}]
        second = await one.say(more, x_train="no")  # which takes what came before along
        assert reply(second)["content"] == "right" and await one.listed() == []
        for id in (first["id"], second["id"]):
            assert await one.rate(id, 1) == 404
        third = await one.say([{"role": "user", "content": "hi"}])
        gone = {"forgotten": 1, "delivered": 0}
        assert (await one.ask("DELETE", f"episodes/{third['id']}")) == (200, gone)
        assert await one.rate(third["id"], 1) == 404
        assert one.finished == [] and one.served.counts["opted_out"] == 1

    live(people, Scripted("left", "right", "up"))


def test_what_a_user_said_is_forgotten_on_the_operators_demand() -> None:
    async def people(one: People) -> None:
        one.grant(0, members=2)
        ids = [(await one.say(ASK, key=key))["id"] for key in (ANNE, BERT)]
        await one.rate(ids[0], 1)  # and waits for its like
        assert (await one.ask("DELETE", "episodes/of/anne"))[0] == 403
        answer = await one.ask("DELETE", "episodes/of/anne", key=OPERATING)
        assert answer == (200, {"forgotten": 1, "delivered": 0})
        assert [row["user"] for row in await one.listed()] == ["bert"]
        await one.rate(ids[1], 1, key=BERT)
        assert one.finished == []

    live(people, Scripted("left", "right"))


def test_rules_of_redaction_act_before_the_policy_reads() -> None:
    engine = Scripted("noted", "again")

    async def people(one: People) -> None:
        one.grant(0)
        secret = [{"role": "user", "content": "I am anne@example.org, born 1999"}]
        first = await one.say(secret)
        await one.say([*secret, reply(first), {"role": "user", "content": "and bert@example.org"}])
        for request in engine.requests:
            assert "example.org" not in CHAT.decoded(request.tokens)
        (row,) = await one.listed()
        assert row["prompt"] == "I am [redacted], born 1999" and row["answers"] == 2

    live(people, engine, redact=[r"\S+@\S+\.org"])


def test_a_user_has_a_limit_and_the_memory_of_an_actor_too() -> None:
    async def people(one: People) -> None:
        one.grant(0)
        for _ in range(3):
            await one.say(ASK)
        status, answer = await one.ask("POST", "v1/chat/completions", {"messages": ASK})
        assert (status, answer["error"]["code"]) == (429, "rate_limit")
        await one.say(ASK, key=BERT)
        assert [row["user"] for row in await one.listed()] == ["bert", "anne"]
        assert one.served.counts["unrewarded"] == 2

    live(people, Scripted(*"abcd"), calls_per_minute=3, conversations=2)


def test_a_conversation_that_nobody_rates_in_time_is_counted_and_trains_nothing() -> None:
    async def people(one: People) -> None:
        one.grant(0)
        id = (await one.say(ASK))["id"]
        while await one.listed():
            await asyncio.sleep(0.05)
        assert await one.rate(id, 1) == 404
        counts = one.served.counters()
        assert (counts["serve/unrewarded"], counts["serve/delivered"]) == (1, 0)
        assert one.finished == []

    live(people, Scripted("gold"), wait_s=0.2)


def test_bad_ratings_are_refused_and_the_conversation_goes_on() -> None:
    async def people(one: People) -> None:
        one.grant(0, max_reward=10.0)
        id = (await one.say(ASK))["id"]
        path = f"episodes/{id}/reward"
        for body in ({}, {"reward": "1"}, {"reward": {"a": 1}}, {"error": "x"}, {"reward": 11}):
            assert (await one.ask("POST", path, body))[0] == 400, body
        assert (await one.ask("POST", f"episodes/{id}/finish", {}))[0] == 404
        assert await one.rate(id, 1) == 200

    live(people, Scripted("gold"))


def test_a_ticket_that_waits_for_people_seems_to_work() -> None:
    async def people(one: People) -> None:
        permit = one.grant(5)

        def told() -> int:
            work = int(1000 * one.served.worked_s())
            return renewal({5: one.progress}, work, None, None, one.progress.clock, 0).progress[5]

        while not one.progress.waiting:
            await asyncio.sleep(0.01)
        before = told()
        while told() == before:
            await asyncio.sleep(0.01)
        assert "waiting" in one.progress.slowest()[0] and one.progress.played == 0
        permit.cancel()
        await asyncio.wait([permit])
        assert not one.served._permits

    live(people, Scripted())


def test_keys_of_users_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*user_keys(RUN, KEYS).values()] == [OPERATOR, "anne", "bert"]
    assert [*user_keys(RUN, "").values()] == [OPERATOR]
    for wrong in (ANNE, "anne=short", f"operator={ANNE}", f"a={ANNE} b={ANNE}", f"a={OPERATING}"):
        monkeypatch.setenv(KEYS, wrong)
        with pytest.raises(ConfigError, match=r"^rollout\.serve\.users_env: ") as refused:
            user_keys(RUN, KEYS)
        assert ANNE not in str(refused.value) and OPERATING not in str(refused.value)


@pytest.mark.skipif(EXECUTABLE is None, reason="no chromium is on the PATH")
def test_the_page_lists_rates_and_draws_and_runs_no_text_of_a_user(tmp_path: Path) -> None:
    hostile = "<img src=x onerror='document.title = 1'>"
    rows = "[...document.querySelectorAll('#list tr')].map(row => row.children[{}].textContent)"

    async def people(one: People) -> None:
        one.grant(4)
        await one.say([{"role": "user", "content": hostile}])
        await one.say(ASK, key=BERT)
        await asyncio.to_thread(visit, one)
        assert one.delivered == [(4, 0, 1.0)]

    def visit(one: People) -> None:
        with browsing(tmp_path) as tab:

            def enter(key: str) -> None:
                tab.evaluate(f"document.getElementById('key').value = {key!r}")
                tab.evaluate("document.querySelector('#enter button').click()")

            def text(name: str) -> str:
                return tab.evaluate(f"document.getElementById({name!r}).textContent")

            tab.open(f"{one.url}/")
            enter("no-key")
            wait_for(lambda: text("problem"), "the refusal of a wrong key")
            refused, tab.problems = tab.problems, []
            assert len(refused) == 1 and "401" in refused[0]
            enter(OPERATING)
            wait_for(lambda: tab.evaluate(rows.format(1)) == ["bert", "anne"], "both users")
            assert tab.evaluate(rows.format(0)) == ["find it", hostile]
            tab.evaluate("document.querySelectorAll('#list tr')[1].click()")
            wait_for(lambda: hostile in text("detail"), "the messages")
            tab.evaluate("document.querySelector('[data-reward=\\'1\\']').click()")
            wait_for(lambda: tab.evaluate(rows.format(2)) == ["open", "delivered"], "the rating")
            assert tab.evaluate("document.querySelector('polyline').getAttribute('points')")
            assert "1.00" in text("numbers")
            assert tab.problems == [] and tab.evaluate("document.title") == "Conversations"

    live(people, Scripted("left", "right"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("rollout.reward_wait_s=0", "rollout.reward_wait_s"),
        ("rollout.endpoint.key_env=''", "rollout.endpoint.key_env"),
        ("rollout.endpoint.port=0", "rollout.endpoint.port"),
        ("rollout.agent_reward=judged", "rollout.agent_reward"),
        ("rollout.players=[a, b]", "rollout.players"),
        ("eval.episodes=9", "eval.episodes"),
        ("rollout.serve.redact=['(']", "rollout.serve.redact"),
        ("actors.count=2", "actors.count"),
    ],
)
def test_settings_that_conversations_cannot_have_are_refused(change: str, named: str) -> None:
    good = [WANTED, *PLAIN, "actors.count=1"]
    load(None, good)
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        load(None, [*good, change])
