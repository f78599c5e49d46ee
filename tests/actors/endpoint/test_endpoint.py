"""The endpoint for agents that we did not write: what is recorded of their calls, and what is paid.

The agents here talk to it with OpenAI's own client.
"""

import asyncio
import contextlib
import copy
import json
import re
import threading
from typing import Any

import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openai_server import OpenAIServer
from scripted_agents import (
    ASK,
    CHAT,
    CHATS,
    LOOK,
    NAN,
    NEW,
    OLD,
    Client,
    Ran,
    Scripted,
    ask,
    called,
    looks,
    returning,
    run,
    setting,
    ticket,
)
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.endpoint import http_server as server_module
from actors.endpoint import runner
from actors.endpoint.chat_form import decode
from actors.endpoint.group_judge import SYSTEM, GroupJudge, question
from actors.endpoint.group_judge import parse as parse_scores
from actors.endpoint.outcome import AgentOutcome, load_agent, outcome_of
from actors.endpoint.request import ChatMessage, RequestRefused
from actors.endpoint.runner import AgentRunner, JudgementMissing
from actors.endpoint.shares import FIRST_CHARS, MARK, abridge, shares, shorten
from actors.endpoint.template import Template
from actors.endpoint.tools import ChatToolCall, assistant_text, canonical, parse
from actors.engines.engine import Generation, Request
from actors.engines.torch_engine import TorchEngine
from actors.envs.base import EnvironmentFailure
from actors.formats.chat import Chat
from actors.llm.endpoint_client import Endpoint
from actors.rollout.episode import EpisodeLate
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress, renewal
from evolver_async.config import ConfigError, LlmConfig
from evolver_async.config.load import load
from evolver_async.model.policy import token_logprobs
from evolver_async.model.tiny import make_tokenizer as make_tiny_tokenizer
from evolver_async.schema import FAILED_CALL, Role, Task, TurnFlag


@pytest.mark.parametrize("kind", ["text", "native"])
def test_a_tool_loop_is_one_sequence_of_what_the_model_saw_and_wrote(kind: str) -> None:
    chat = CHATS[kind]
    assert Template(chat).native == (kind == "native")
    # "<think>" letter by letter: whoever tokenises what was said again gets one token for it
    spelled = [token for letter in "<think>" for token in chat.tokens_of(letter)]
    assert chat.tokens_of("<think>") != spelled and chat.end_of_turn is not None
    first = [*spelled, *chat.tokens_of("  so\n" + called("left")), chat.end_of_turn]
    engine = Scripted(first, called("right"), "gold", chat=chat)
    ran = run(looks, engine, chat=chat)
    trajectory, contexts = ran.one, [request.tokens for request in engine.requests]
    (sequence,) = trajectory.sequences
    tokens = sequence.tokens.tolist()
    assert contexts[1][: len(contexts[0]) + len(first)] == contexts[0] + first
    for context in contexts:
        assert tokens[: len(context)] == context
    written_tokens = [first, [*chat.tokens_of(called("right")), chat.end_of_turn]]
    written_tokens.append([*chat.tokens_of("gold"), chat.end_of_turn])
    assert tokens == contexts[-1] + written_tokens[-1]
    for turn, (context, said) in enumerate(zip(contexts, written_tokens, strict=True)):
        place = slice(len(context), len(context) + len(said))
        assert tokens[place] == said
        assert (sequence.roles[place] == Role.ACTION).all()
        assert (sequence.turns[place] == turn).all()
        expected = [-0.25 - index for index in range(len(said))]
        assert sequence.logprobs[place].tolist() == expected
    assert (sequence.roles[: len(contexts[0])] == Role.PROMPT).all()
    assert (sequence.roles == Role.ACTION).sum() == sum(map(len, written_tokens))
    between = sequence.roles[len(contexts[0]) :] != Role.ACTION
    assert (sequence.roles[len(contexts[0]) :][between] == Role.OBSERVATION).all()
    assert [run.weights for run in sequence.versions] == [OLD, NEW] * 3
    assert (trajectory.reward, trajectory.success, trajectory.truncated) == (1.0, True, False)
    assert trajectory.turn_rewards.tolist() == [0.0, 0.0, 1.0]
    assert trajectory.turn_flags.tolist() == [TurnFlag.TOOL_CALL, TurnFlag.TOOL_CALL, 0]
    assert ran.counts["agent/merged"] == 2 and ran.counts["agent/sequences"] == 1
    assert len(set(engine.released)) == 1 and engine.requests[0].session in engine.released
    assert len({request.seed for request in engine.requests}) == 3
    assert {request.temperature for request in engine.requests} == {0.7}


@pytest.mark.parametrize("kind", ["text", "native"])
def test_the_model_is_told_of_tools_and_no_answer_of_one_can_end_its_place(kind: str) -> None:
    chat = CHATS[kind]
    engine = Scripted(called("left"), "gold", chat=chat)
    run(looks, engine, chat=chat)
    tokens = engine.requests[1].tokens
    told = chat.text_of(tokens)
    assert told.count('"look"') >= 2 and "be brief" in told and "look somewhere" in told
    assert told.count("</tool_response>") == 1 and "nothing left" in told
    # system, user, assistant, tool: the result's "<|im_end|>" is not the token
    assert sum(token == chat.end_of_turn for token in tokens) == 4


@pytest.mark.parametrize("kind", ["text", "native"])
def test_no_name_of_a_called_tool_spells_a_special_token(kind: str) -> None:
    chat = CHATS[kind]
    engine = Scripted("gold", chat=chat)
    function = {"name": "<|im_end|>", "arguments": "{}"}
    call = {"id": "call-1", "type": "function", "function": function}

    async def player(client: Client) -> float:
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        await ask(client, [*ASK, said, {"role": "user", "content": "and?"}])
        return 0.0

    run(player, engine, chat=chat)
    ends = sum(token == chat.end_of_turn for token in engine.requests[0].tokens)
    assert ends == 3, "one a message"


def test_the_context_is_what_the_template_makes_of_the_messages() -> None:
    """Where the model writes as the template does, merged tokens are the template's own."""
    chat = CHATS["native"]
    engine = Scripted("it is here", "gold", chat=chat)

    async def player(client: Client) -> float:
        said = await ask(client, ASK)
        more = {"role": "user", "content": "where?"}
        await ask(client, [*ASK, {"role": "assistant", "content": said.content}, more])
        return 0.0

    run(player, engine, chat=chat)
    messages = [*ASK, {"role": "assistant", "content": "it is here"}]
    messages.append({"role": "user", "content": "where?"})
    assert engine.requests[1].tokens == chat.tokens_of(chat.render(messages, []))


def test_calls_side_by_side_share_what_was_said_and_train_every_token_once() -> None:
    engine = Scripted("one", "two", "three", "four")

    async def player(client: Client) -> float:
        said = await ask(client, ASK)
        before = [*ASK, {"role": "assistant", "content": said.content}]
        more = [[*before, {"role": "user", "content": name}] for name in ("a", "b")]
        answers = await asyncio.gather(*(ask(client, messages) for messages in more))
        last = [*more[1], {"role": "assistant", "content": answers[1].content}]
        await ask(client, [*last, {"role": "user", "content": "c"}])
        return 0.5

    trajectory = run(player, engine).one
    assert len(trajectory.sequences) == 2
    spans = [s.tokens[s.turns == turn].tolist() for s in trajectory.sequences for turn in range(4)]
    trained = [
        [*CHAT.tokens_of(word), CHAT.end_of_turn] for word in ("one", "two", "three", "four")
    ]
    assert sorted(filter(None, spans)) == sorted(trained)
    root = engine.requests[0].tokens + trained[0]
    for sequence in trajectory.sequences:
        assert sequence.tokens[: len(root)].tolist() == root
    assert len({request.session for request in engine.requests}) == 2
    assert trajectory.turn_rewards.tolist() == [0.0, 0.0, 0.0, 0.5]


def test_the_learner_finds_the_log_probs_that_were_recorded() -> None:
    """A real engine, three turns and a branch: one forward over each whole sequence agrees."""
    tokenizer = make_tiny_tokenizer(512)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    spread = {"max_position_embeddings": 512, "initializer_range": 0.1}
    config = Qwen3Config(vocab_size=len(tokenizer), **shape, **heads, **spread)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    engine = TorchEngine(
        copy.deepcopy(model),
        tokenizer,
        weights=NEW,
        slots=4,
        max_length=512,
        prefill_tokens=256,
        in_flight="keep",
    )

    async def player(client: Client) -> float:
        messages: list[Any] = [*ASK]
        for word in ("left", "right"):
            said = await ask(client, messages)
            messages += [{"role": "assistant", "content": said.content}]
            messages += [{"role": "user", "content": word}]
        await asyncio.gather(ask(client, messages), ask(client, messages))
        return 1.0

    trajectory = run(player, engine, chat=Chat(tokenizer), max_tokens=8, max_length=512).one
    assert len(trajectory.sequences) == 2 and trajectory.action_tokens > 8
    for sequence in trajectory.sequences:
        tokens = torch.tensor(sequence.tokens.tolist())[None]
        with torch.no_grad():
            found, _ = token_logprobs(model, tokens, torch.ones_like(tokens), 0.7)
        written_here = torch.from_numpy(sequence.roles[1:] == Role.ACTION)
        recorded = torch.from_numpy(sequence.logprobs[1:])[written_here]
        assert (found[0, 1:][written_here] - recorded).abs().max() <= 1e-4


def test_a_changed_past_begins_a_sequence_of_its_own() -> None:
    engine = Scripted("one", "two")

    async def player(client: Client) -> float:
        await ask(client, ASK)
        changed = [*ASK, {"role": "assistant", "content": "another"}]
        await ask(client, [*changed, {"role": "user", "content": "go on"}])
        return 0.0

    trajectory = run(player, engine).one
    assert len(trajectory.sequences) == 2
    assert [int((s.roles == Role.ACTION).sum()) for s in trajectory.sequences] == [4, 4]


def test_a_stream_says_the_same_as_a_whole_answer() -> None:
    engine = Scripted(called("left"), "so\nbe it")
    heard: list[Any] = []

    async def player(client: Client) -> float:
        options: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [LOOK], "stream": True}
        options["stream_options"] = {"include_usage": True}
        for _ in range(2):
            stream = await client.chat.completions.create(**options)
            heard.append([part async for part in stream])
        return 0.0

    run(player, engine)
    call = heard[0][0].choices[0].delta.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("look", {"where": "left"})
    assert [part.choices[0].finish_reason for part in heard[0][:-1]] == [None, "tool_calls"]
    assert heard[1][0].choices[0].delta.content == "so\nbe it"
    context, said = engine.requests[1].tokens, CHAT.tokens_of("so\nbe it")
    usage = heard[1][-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(context), len(said) + 1)


def test_a_stop_string_is_recorded_and_not_shown() -> None:
    engine = Scripted(CHAT.tokens_of("a;b;"))
    heard: list[str] = []

    async def player(client: Client) -> float:
        heard.append((await ask(client, ASK, stop=";", max_tokens=5)).content)
        return 0.0

    (sequence,) = run(player, engine).one.sequences
    assert heard == ["a"]
    assert engine.requests[0].stop_strings == (";",) and engine.requests[0].max_tokens == 5
    actions = sequence.tokens[sequence.roles == Role.ACTION].tolist()
    assert actions == CHAT.tokens_of("a;b;")


def test_a_call_that_cannot_be_read_is_text_for_the_agent_and_costs_the_penalty() -> None:
    engine = Scripted("<tool_call>{look left}</tool_call>", "gold")
    heard: list[Any] = []

    async def player(client: Client) -> float:
        heard.append(await ask(client, ASK, tools=[LOOK]))
        await ask(client, [*ASK, heard[0], {"role": "user", "content": "again"}], tools=[LOOK])
        return 1.0

    ran = run(player, engine)
    trajectory = ran.one
    assert heard[0].tool_calls is None and "look left" in heard[0].content
    assert trajectory.turn_flags.tolist() == [TurnFlag.FORMAT_ERROR | FAILED_CALL, 0]
    assert trajectory.turn_rewards.tolist() == [-0.5, 1.0] and trajectory.reward == 0.5
    assert ran.counts["agent/unreadable_calls"] == 1


def test_limits_end_an_episode_and_are_told_to_the_agent() -> None:
    codes: list[str] = []

    async def player(client: Client) -> float:
        for _ in range(2):
            await ask(client, ASK)
        try:
            await ask(client, ASK)
        except openai.BadRequestError as error:
            codes.append(str(error.code))
            raise
        return 1.0

    ran = run(player, Scripted("a", "b"), max_turns=2, truncated_reward=-0.25)
    assert codes == ["max_turns"]
    trajectory = ran.one
    assert (trajectory.truncated, trajectory.terminated, trajectory.success) == (True, False, False)
    assert trajectory.reward == -0.25 and ran.counts["agent/limited"] == 1

    length = len(CHAT.tokens_of(CHAT.render(ASK, [])))
    ran = run(returning(1.0), Scripted("abc"), max_length=length)
    assert isinstance(ran.error, EnvironmentFailure)  # there is nothing to learn from
    assert "leaves no room" in str(ran.error)
    engine = Scripted("abc")
    (sequence,) = run(returning(1.0), engine, max_length=length + 2).one.sequences
    assert len(sequence) == length + 2 and engine.requests[0].max_tokens == 2


def test_what_an_agent_raises_is_counted_and_costs_nobody_else_anything() -> None:
    played = iter(range(5))

    async def player(client: Client) -> float:
        number = next(played)
        await ask(client, ASK)
        if number == 1:
            raise KeyError("no such tool")
        if number == 2:
            raise SystemExit(3)
        if number == 3:
            raise asyncio.CancelledError
        return 1.0

    ran = run(player, Scripted(*"abcde"), members=5)
    assert isinstance(ran.error, EnvironmentFailure)
    assert "tests:agent, task t, member" in str(ran.error)
    assert len(ran.finished) == 2
    assert ran.counts["agent/exceptions"] == 3 and ran.counts["agent/episodes"] == 2


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "NoneType"),
        (float("nan"), "nan"),
        ("1", "str"),
        (AgentOutcome("1", True), "reward of the AgentOutcome"),  # type: ignore[arg-type]
        (AgentOutcome(1.0, "yes"), "success of the AgentOutcome"),  # type: ignore[arg-type]
        (1e7, "safety.max_reward"),
    ],
)
def test_no_reward_is_never_a_silent_zero(returned: Any, said: str) -> None:
    ran = run(returning(returned), Scripted("a"), max_reward=1e6)
    assert isinstance(ran.error, EnvironmentFailure) and said in str(ran.error)
    assert ran.finished == [] and ran.counts["agent/no_reward"] == 1


def test_an_agent_that_asks_nothing_has_nothing_to_learn_from() -> None:
    async def player(client: Client) -> float:
        return 1.0

    ran = run(player, Scripted())
    assert isinstance(ran.error, EnvironmentFailure) and ran.counts["agent/no_calls"] == 1


def test_a_deadline_ends_an_agent_as_truncated() -> None:
    async def sleeper(client: Client) -> float:
        await ask(client, ASK)
        await asyncio.sleep(60)
        return 1.0

    limits = {"episode_timeout_s": 0.5, "step_timeout_s": 0.1}
    ran = run(sleeper, Scripted("a"), truncated_reward=-0.5, **limits)
    assert ran.error is None and ran.counts["agent/late"] == ran.counts["agent/limited"] == 1
    assert ran.one.truncated and ran.one.overlong and ran.one.reward == -0.5

    async def caller(client: Client) -> float:
        with pytest.raises(openai.APIStatusError):
            while True:
                await ask(client, ASK)
                await asyncio.sleep(0.1)
        return 0.25

    ran = run(caller, Scripted(*["a"] * 200), max_turns=200, **limits | {"step_timeout_s": 30.0})
    assert ran.error is None and ran.counts["agent/late"] == 0
    assert ran.one.truncated and ran.one.overlong and ran.one.reward == 0.25, "its own verdict"


def test_an_agent_that_never_calls_or_a_policy_that_never_answers_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(client: Client) -> float:
        await asyncio.sleep(60)
        return 1.0

    limits = {"episode_timeout_s": 0.5, "step_timeout_s": 0.1}
    ran = run(silent, Scripted("a"), **limits)
    assert isinstance(ran.error, EnvironmentFailure) and ran.counts["agent/late"] == 1

    monkeypatch.setattr(runner, "HUNG_S", 2.0)
    engine = Scripted("a")
    engine.hold.clear()
    ran = run(returning(1.0), engine, **limits)
    assert isinstance(ran.error, EpisodeLate)
    assert engine.cancelled == 1 and engine.released


def test_an_agent_moves_between_its_calls_and_while_the_engine_does() -> None:
    engine, progress = Scripted("a"), TicketProgress()
    engine.hold.clear()

    def told() -> int:
        work = int(agents.worked_s())
        return renewal({5: progress}, work, None, None, progress.clock, 0).progress[5]

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
        async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
            call = asyncio.create_task(ask(client, ASK))
            while not engine.requests:
                await asyncio.sleep(0.01)
            worked_s = agents.worked_s()
            await asyncio.sleep(0.1)
            assert agents.worked_s() == worked_s, "an engine that hangs is no work"
            engine.hold.set()
            await call
        before = told()
        while told() == before:
            await asyncio.sleep(0.05)
        return 1.0

    agents, finished = AgentRunner(agent, "tests:agent", engine, CHAT), list[Finished]()

    async def all_of_it() -> None:
        await agents.run(ticket(), setting(), progress, finished.append)
        await agents.close()

    asyncio.run(all_of_it())
    assert len(finished) == 1


def test_a_ticket_that_waited_for_agents_tells_no_less_when_agents_play_it() -> None:
    """The learner waits for an evaluation only while it tells more than ever before."""
    progresses = {group: TicketProgress(queued=True) for group in (5, 6)}
    told = list[int]()

    def tell() -> int:
        work = 100 + int(agents.worked_s())
        return renewal(progresses, work, None, None, progresses[6].clock, 0).progress[6]

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
        while progresses[6].queued and tell() < 101:
            await asyncio.sleep(0.05)
        told.append(tell())
        async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await ask(client, ASK)
        return 1.0

    agents = AgentRunner(agent, "tests:agent", Scripted("a", "b"), CHAT)

    async def all_of_it() -> None:
        for group in (5, 6):
            progresses[group].queued = False
            await agents.run(ticket(), setting(), progresses[group], lambda _: None)
            del progresses[group]
        await agents.close()

    asyncio.run(all_of_it())
    assert 101 <= told[0] <= told[1]


def test_blocking_calls_of_agents_do_not_wait_for_each_other() -> None:
    calls = 33  # asyncio alone makes 32 at once at most
    together = threading.Barrier(calls)

    async def player(client: Client) -> float:
        await ask(client, ASK)
        await asyncio.gather(*(asyncio.to_thread(together.wait, 15) for _ in range(calls)))
        return 1.0

    assert run(player, Scripted("a")).one.success


def test_a_call_begins_the_time_without_progress_anew() -> None:
    progress, still = TicketProgress(), list[float]()

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
        now = asyncio.get_running_loop().time
        began = now()
        async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for _ in range(2):
                await asyncio.sleep(0.3)
                await ask(client, ASK)
        text, seconds = progress.slowest()
        assert text.startswith("member 0: agent tests:agent for")
        still.extend((seconds, now() - began))
        return 1.0

    async def all_of_it() -> None:
        agents = AgentRunner(agent, "tests:agent", Scripted("a", "b"), CHAT)
        await agents.run(ticket(), setting(), progress, lambda _: None)
        await agents.close()

    asyncio.run(all_of_it())
    assert still[0] < still[1] - 0.5


def test_whoever_hangs_up_ends_the_generation_and_leaves_no_trace() -> None:
    engine = Scripted("a", "b")

    async def player(client: Client) -> float:
        engine.hold.clear()
        asking = asyncio.create_task(ask(client, ASK))
        while not engine.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not engine.cancelled:
            await asyncio.sleep(0.01)
        engine.hold.set()
        await ask(client, ASK)
        return 1.0

    trajectory = run(player, engine).one
    (sequence,) = trajectory.sequences
    assert CHAT.text_of(sequence.tokens[sequence.roles == Role.ACTION].tolist()) == "a"


def test_a_call_that_outlives_its_episode_is_ended() -> None:
    engine = Scripted("a")
    heard: list[BaseException | None] = []

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
        client = Client(base_url=base_url, api_key=api_key, max_retries=0)
        await ask(client, ASK)
        engine.hold.clear()
        call = asyncio.create_task(ask(client, ASK))
        call.add_done_callback(lambda done: heard.append(done.exception()))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        return 1.0

    async def all_of_it() -> None:
        agents = AgentRunner(agent, "tests:agent", engine, CHAT)
        finished: list[Finished] = []
        await agents.run(ticket(), setting(), TicketProgress(), finished.append)
        async with asyncio.timeout(5):
            while not heard:
                await asyncio.sleep(0.01)
        assert [len(one.trajectory.turn_rewards) for one in finished] == [1]
        await agents.close()

    asyncio.run(all_of_it())
    assert isinstance(heard[0], openai.NotFoundError) and engine.cancelled == 1


def test_what_the_engine_raises_is_no_fault_of_the_agent() -> None:
    class Broken(Scripted):
        async def generate(self, request: Request) -> Generation:
            raise RuntimeError("the engine has ended")

    ran = run(returning(1.0), Broken())
    assert isinstance(ran.error, RuntimeError) and ran.counts["agent/exceptions"] == 0


def test_a_url_is_of_one_episode_on_this_host_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 10_000)
    urls: list[str] = []

    async def raw(url: str, said: bytes, *, ends: bool = False) -> bytes:
        host, port = url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        if ends:
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(65536), 5)
        writer.close()
        return answer

    async def player(client: Client) -> float:
        url = str(client.base_url)
        urls.append(url)
        episode = url.split("/")[3]
        assert url.startswith("http://127.0.0.1:") and len(client.api_key) >= 32
        for other in (url.replace(episode, "x" * 24), *urls[:-1]):
            stranger = Client(base_url=other, api_key=client.api_key, max_retries=0)
            with pytest.raises(openai.NotFoundError):
                await ask(stranger, ASK)
            await stranger.close()
        assert (await raw(url, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400")
        keyed = f"host: x\r\nauthorization: bearer {client.api_key}\r\ncontent-length: "
        head = f"POST /{episode}/v1/chat/completions HTTP/1.1\r\n{keyed}".encode()
        assert (await raw(url, head + b"5\r\n\r\n{nope")).startswith(b"HTTP/1.1 400")
        long = head + b"20000\r\n\r\n" + b"[" * 20000
        assert (await raw(url, long)).startswith(b"HTTP/1.1 413")
        deep = head + b"9000\r\n\r\n" + b"[" * 9000
        assert (await raw(url, deep)).startswith(b"HTTP/1.1 400")
        early = head + b"2\r\n\r\n{}" + b"x" * (1 << 17)
        assert len(await raw(url, early)) < 1000
        waits = head + b"2\r\nexpect: 100-continue\r\n\r\n"
        assert (await raw(url, waits)).startswith(b"HTTP/1.1 100")
        partial = head + b"500\r\n\r\n" + json.dumps({"messages": ASK}).encode()
        assert (await raw(url, partial, ends=True)) == b""
        assert [model.id async for model in client.models.list()] == ["policy"]
        await ask(client, ASK)
        return 1.0

    async def both() -> None:
        """One server, one episode after the other."""
        used = setting()
        engine = Scripted("a", "b")

        async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
            async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return await player(client)

        agents = AgentRunner(agent, "tests:agent", engine, CHAT)
        finished: list[Finished] = []
        for _ in range(2):
            await agents.run(ticket(), used, TicketProgress(), finished.append)
        await agents.close()
        assert len(finished) == len(engine.requests) == 2 and urls[0] != urls[1]

    asyncio.run(both())


def test_calls_without_a_key_take_no_memory_and_are_no_failures_of_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of other users of the host. Whoever holds all places for strangers keeps no agent out."""
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 3)
    read: list[tuple[int, int]] = []
    inner = server_module._read

    async def noted(receive: Any, limit_bytes: int) -> bytes:
        got = 0

        async def counted() -> Any:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            return message

        try:
            return await inner(counted, limit_bytes)
        finally:
            read.append((got, limit_bytes))

    monkeypatch.setattr(server_module, "_read", noted)

    async def player(client: Client) -> float:
        host, port = str(client.base_url).split("/")[2].split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        for reader, _ in held[:2]:  # the oldest ones
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
        _, writer = held[-1]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
        writer.write(head + b"x" * 9_000_000)
        while not read:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 404")
        async with Client(
            base_url=f"http://{host}:{port}/x/v1", api_key="x", max_retries=0
        ) as other:
            with pytest.raises(openai.NotFoundError):
                await ask(other, ASK)
        for _ in range(2):
            await ask(client, ASK)
        for _, writer in held:
            writer.close()
        return 1.0

    ran = run(player, Scripted("a", "b"))
    assert ran.one.reward == 1.0
    assert read[0][0] <= 3 * server_module.STRANGER_BYTES
    assert (ran.counts["agent/requests"], ran.counts["agent/refused"]) == (2, 0)


def test_who_says_nothing_is_hung_up_on_and_who_waits_for_an_answer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that never closes its connections leaves none behind."""
    monkeypatch.setattr(server_module, "IDLE_S", 0.2)
    engine = Scripted("a")

    async def player(client: Client) -> float:
        host, port = str(client.base_url).split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /half")
        engine.hold.clear()
        call = asyncio.create_task(ask(client, ASK))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await asyncio.sleep(0.4)
        engine.hold.set()
        assert (await call).content == "a"
        return 1.0

    assert run(player, engine).one.reward == 1.0


def test_a_head_of_a_request_that_does_not_end_is_hung_up_on() -> None:
    async def player(client: Client) -> float:
        host, port = str(client.base_url).split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 23:
                writer.write(b"x" * (1 << 14))
                sent += 1 << 14
                await writer.drain()
            assert await reader.read() == b""
        writer.close()
        assert (await ask(client, ASK)).content == "a"
        return 1.0

    assert run(player, Scripted("a")).one.reward == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"n": 0}, "n: "),
        ({"n": 1000}, "n: "),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [LOOK]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [LOOK]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "hear"}, "tools": [LOOK]}, "tool_choice"),
        ({"parallel_tool_calls": 0.5}, "parallel_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "assistant"),
        ({"top_p": 0.9}, "top_p: 0.9 is not supported.*distribution"),
        ({"top_k": 20}, "top_k: 20"),
        ({"min_p": 0.05}, "min_p: 0.05"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5"),
        ({"presence_penalty": -1}, "presence_penalty: -1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: 1.1"),
        ({"min_tokens": 5}, "min_tokens: this option is not supported"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "wizard"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages: the role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": "\ud800"}, "stop"),  # it would end the engine
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": NAN}}]}, "tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        decode(json.dumps({"messages": ASK} | change).encode())


@pytest.mark.parametrize("top_k", [0, -1])
def test_what_changes_no_distribution_is_taken_and_the_temperature_is_the_run_s(top_k: int) -> None:
    engine = Scripted("a")

    async def player(client: Client) -> float:
        neutral = {"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "temperature": 0.1}
        neutral |= {"parallel_tool_calls": True, "seed": 5, "user": "u", "metadata": {"a": "b"}}
        more = {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0, "bad_words": None}
        await ask(client, ASK, **neutral, extra_body=more)
        with pytest.raises(openai.BadRequestError, match=r"top_p: 0\.9 is not supported"):
            await ask(client, ASK, top_p=0.9)
        return 1.0

    assert run(player, engine).one.reward == 1.0
    assert [request.temperature for request in engine.requests] == [0.7]


def test_the_same_message_is_equal_whoever_wrote_it_down() -> None:
    def message(**parts: Any) -> ChatMessage:
        body = {"messages": [{"role": "assistant", **parts}, *ASK]}
        return decode(json.dumps(body).encode()).messages[0]

    def call(arguments: str, name: str) -> list[dict[str, Any]]:
        return [{"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}]

    ours = message(content=None, tool_calls=call('{"a": 1, "b": [2]}', "x"), refusal=None)
    assert ours == message(content="", tool_calls=call('{"b":[2],"a":1}', "y"))
    assert ours != message(content="", tool_calls=call('{"b":[3],"a":1}', "y"))
    assert message(content="\ud800 a").content == "? a"


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.tuples(st.text("fgh_", min_size=1), st.dictionaries(st.text("ab"), PLAIN))))
def test_calls_that_are_written_are_read_back(listed: list[tuple[str, dict[str, Any]]]) -> None:
    calls = tuple(ChatToolCall(name, canonical(arguments)) for name, arguments in listed)
    assert parse(assistant_text("so", calls)) == ("so", calls, True)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        "[" * 100_000,
    ],
)
def test_a_call_that_is_none_is_not_guessed(body: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"{called('left')}<tool_call>{body}"):
        assert parse(text) == (text, (), False)


def test_a_return_value_is_an_outcome() -> None:
    assert outcome_of(1) == AgentOutcome(1.0, True)
    assert outcome_of(0.75) == AgentOutcome(0.75, False)
    assert outcome_of(AgentOutcome(0.2, True)) == AgentOutcome(0.2, True)
    for computed in (np.float32(1), np.int64(1), AgentOutcome(np.float32(1), np.True_)):  # type: ignore[arg-type]
        outcome = outcome_of(computed)
        assert outcome == AgentOutcome(1.0, True) and [*map(type, outcome[:2])] == [float, bool]


def test_an_agents_numbers_and_the_limits_it_met_are_facts_of_its_episode() -> None:
    async def player(client: Client) -> AgentOutcome:
        await ask(client, ASK)
        await ask(client, ASK, max_tokens=2)
        return AgentOutcome(1.0, True, {"calls": np.int64(2)})  # type: ignore[dict-item]

    trajectory = run(player, Scripted("yes", "this is cut")).one
    assert trajectory.turn_flags.tolist() == [0, TurnFlag.CUT]
    assert trajectory.metrics == {"calls": 2.0} and trajectory.overlong
    with pytest.raises(ValueError, match="metrics of the AgentOutcome"):
        outcome_of(AgentOutcome(1.0, True, {"": 1.0}))


def conversation(*said: str) -> tuple[ChatMessage, ...]:
    roles = ("user", "assistant")
    return tuple(ChatMessage(roles[index % 2], text) for index, text in enumerate(said))


def test_the_judge_reads_the_common_beginning_once_and_texts_stay_in_their_place() -> None:
    members = [
        [conversation("the task", "the plan", "go on", "an ending\nAttempt 2 goes on with:")],
        [conversation("the task", "the plan", "stop", "another"), conversation("aside", "noise")],
    ]
    asked, cut = question(members, 9999)
    assert not cut
    assert asked.count("the task") == 1 and asked.count("the plan") == 2
    assert [line for line in asked.splitlines() if line.startswith("Attempt ")] == [
        "Attempt 1 goes on with:",
        "Attempt 2 goes on with:",
        "Attempt 2 also has a conversation:",
    ]
    assert asked.index("go on") < asked.index("stop") < asked.index("noise")


@pytest.mark.parametrize("members", [1, 2])
def test_every_attempt_keeps_its_own_turns(members: int) -> None:
    """Also one that is scored alone, as in an evaluation, and attempts that are equal."""
    attempt = conversation("the task", "the plan", "go on", "the end")
    asked, _ = question([[attempt]] * members, 9999)
    beginning, *attempts = re.split(r"\nAttempt \d goes on with:\n", asked)
    assert "the task" in beginning and "the plan" not in beginning and len(attempts) == members
    assert all("the plan" in attempt and "the end" in attempt for attempt in attempts)


def test_the_judge_sees_the_task_and_every_ending_of_a_large_group() -> None:
    def attempt(number: int) -> tuple[ChatMessage, ...]:
        middle = ["think " * 100, "result " * 100] * 24
        ending = "reasoning " * 40 + f"FINAL ANSWER {number}"
        return conversation("the task " * 50 + "END OF TASK", *middle, ending)

    asked, cut = question([[attempt(number)] for number in range(16)], 24_000)
    assert asked.count("FINAL ANSWER") == 16 and asked.count("END OF TASK") == 1
    assert asked.count("reasoning " * 40) == 16, "endings have room first"
    assert cut > 0 and len(asked) < 30_000
    for part in asked.split("goes on with:")[1:]:
        assert "assistant: think think" in part and 'think think "' in part
        assert "messages cut]" in part and "characters cut]" in part


def test_many_messages_that_fit_are_all_shown() -> None:
    asked, cut = question([[conversation("task", *["on"] * 99)]], 2000)
    assert not cut and asked.count(": on") == 99 and "messages cut" not in asked


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=20), st.integers(0, 20_000)
)
def test_shares_of_a_question_against_their_definition(
    texts: list[tuple[int, bool]], room: int
) -> None:
    lengths = [length for length, _ in texts]
    first = [index for index, (_, served) in enumerate(texts) if served]
    given = shares(lengths, first, room)
    assert sum(given) <= room
    assert all(0 <= share <= length for share, length in zip(given, lengths, strict=True))
    least = min(FIRST_CHARS, room // max(1, len(first)))
    assert all(given[index] >= min(lengths[index], least) for index in first)
    if sum(lengths) > room:
        assert room - sum(given) < len(lengths), "the room is used"
    else:
        assert given == lengths
    poor = [share for share, length in zip(given, lengths, strict=True) if share < length]
    rich = [share for index, share in enumerate(given) if index not in first]
    assert not poor or all(share <= max(poor) for share in rich)


@given(st.lists(st.text("abc", min_size=1), min_size=1), st.integers(0, 9))
def test_messages_are_cut_in_the_middle_and_counted(texts: list[str], most: int) -> None:
    kept = abridge(texts, most)
    if len(texts) <= most:
        assert kept == texts
        return
    (mark,) = [index for index, text in enumerate(kept) if text.startswith("[")]
    head, tail = kept[:mark], kept[mark + 1 :]
    assert len(head) + len(tail) == max(1, most)
    assert head == texts[:mark] and tail == texts[-len(tail) :]
    assert kept[mark] == f"[{len(texts) - len(head) - len(tail)} messages cut]"


@given(st.text("abc ", max_size=300), st.integers(0, 320))
def test_a_shortened_text_keeps_its_ends_and_says_how_much_is_cut(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
        return
    head, tail = short.split(" … [")[0], short.split("] … ")[-1]
    assert len(short) <= max(limit, len(MARK.format(len(text))))
    assert MARK.format(len(text) - len(head) - len(tail)) in short
    assert text.startswith(head) and text.endswith(tail) and 0 <= len(head) - len(tail) <= 1


def test_the_judge_is_told_the_order_of_its_scores() -> None:
    assert "for each attempt, in the order shown, a number" in SYSTEM


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[1]",
        '{"scores": [1]}',
        '{"scores": [1, 2]}',
        '{"scores": [1, -0.1]}',
        '{"scores": [1, "0"]}',
        '{"scores": [1, null]}',
    ],
)
def test_scores_that_are_none_are_not_read(answer: str) -> None:
    with pytest.raises(ValueError):
        parse_scores(answer, 2)
    assert parse_scores('```json\n{"scores": [1, 0.5]}\n```', 2) == [1.0, 0.5]


def judged(server: OpenAIServer) -> Ran:
    """Four members that say how good they are."""
    said = iter(["good 1", "good 2", "good 3", "good 4"])
    ran = Ran()

    async def player(client: Client) -> None:
        await ask(client, ASK)

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> None:
        async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await player(client)

    async def all_of_it() -> None:
        judge = GroupJudge(
            Endpoint(LlmConfig(url=server.url, model="m", retries=0), "judge"), 1, 10.0, 9999
        )
        agents = AgentRunner(agent, "tests:agent", Scripted(*said), CHAT, judge)
        try:
            await agents.run(ticket(4), setting(), TicketProgress(), ran.finished.append)
        except JudgementMissing as error:
            ran.error = error
        ran.counts = agents.counters()
        await agents.close()

    asyncio.run(all_of_it())
    return ran


def test_a_judge_pays_each_member_for_what_it_said_in_whatever_order_it_is_shown() -> None:
    def by_words(body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        places = sorted((text.index(f"good {n}"), n) for n in range(1, 5))
        return json.dumps({"scores": [n / 4 for _, n in places]})

    with OpenAIServer(by_words) as server:
        ran = judged(server)
    assert ran.error is None and len(ran.finished) == 4
    for one in ran.finished:
        number = int(one.transcript.turns[-1].text.split()[-1])
        assert one.trajectory.reward == number / 4
        assert one.trajectory.success == (number == 4)
    assert ran.counts["agent/judged"] == 1 and ran.counts["agent/judge_calls"] == 1


def test_without_a_good_judgment_nobody_is_paid_anything() -> None:
    with OpenAIServer("all of them are fine", '{"scores": [1, 1]}') as server:
        ran = judged(server)
    assert isinstance(ran.error, JudgementMissing) and ran.finished == []
    assert "judge.llm" in str(ran.error), "`evaluate` shows nothing else"
    assert ran.counts["agent/unjudged"] == 1 and ran.counts["agent/unreadable_judgments"] == 2


def sync(base_url: str, api_key: str, task: Task, seed: int) -> float:
    return 0.0


async def lacking(base_url: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    "path",
    [
        "nowhere",
        "no_such_module_x:agent",
        f"{__name__}:nobody",
        f"{__name__}:sync",
        f"{__name__}:lacking",
    ],
)
def test_an_agent_that_cannot_be_is_named_before_anything_starts(path: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent: "):
        load_agent(path)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["rollout.agent=a:b", "launch.kind=serial"], "rollout.agent: "),
        (["rollout.agent=a:b", "rollout.format=tool_call"], "rollout.format: "),
        (["rollout.agent=a:b", "rollout.context=single"], "rollout.context: "),
        (["rollout.agent=a:b", "experience.kind=contrast"], "experience.kind: must be none"),
        (["rollout.agent=a:b", "questioning.kind=goals"], "questioning.kind: must be none"),
        (["rollout.agent=a:b", "judge.kind=rule"], "judge.kind: "),
        (["rollout.agent_reward=judged"], "rollout.agent_reward: "),
        (["rollout.agent_reward=guessed"], "rollout.agent_reward: "),
        (["rollout.agent=a:b", "rollout.agent_reward=judged"], "judge.llm.url: "),
        (["rollout.agent=a:b", "stages.0.override.rollout.agent=c:d"], "stages[0].override"),
    ],
)
def test_what_an_agent_rules_out_is_named(arguments: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["stages.0.steps=10", *arguments])
    assert str(caught.value).startswith(key)
