"""The API forms, as the clients of frameworks speak them: what is forced, given, sampled, refused.

The bodies are those that the packages send (openai-agents 0.24, pydantic-ai 2.68, smolagents 1.26,
langchain-anthropic 1.7), shortened.
"""

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest
from families import family_tokenizer
from openai.types.responses import Response
from scripted_agents import ASK, CHAT, CHATS, LOOK, Client, Scripted, ask, called, run

from actors.endpoint import chat_form, messages_form, responses_form
from actors.endpoint.recorder import Recorder
from actors.endpoint.request import ChatMessage, RequestRefused
from actors.endpoint.template import Template
from actors.engines.engine import Generation
from actors.formats.chat import Chat
from evolver_async.schema import Role, TurnFlag

PARAMETERS = LOOK["function"]["parameters"]
FLAT = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}
NAMED = {"name": "look", "description": "look somewhere", "input_schema": PARAMETERS}
PATHS = ("chat/completions", "responses", "messages")
REST = ' {"where": "left"}}\n</tool_call>'  # of a call whose tool is given
ANY = '{"name": "look", "arguments":' + REST


async def post(client: Client, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"x-api-key": client.api_key}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as raw:
        return await raw.post(f"{client.base_url}{path}", json=body, timeout=20)


def sampled(trajectory: Any) -> list[str]:
    """The texts of the trained tokens, by turn."""
    found = {}
    for sequence in trajectory.sequences:
        for turn in sorted({*sequence.turns.tolist()} - {-1}):
            mine = (sequence.turns == turn) & (sequence.roles == Role.ACTION)
            found[turn] = CHAT.text_of(sequence.tokens[mine].tolist())
    return [found[turn] for turn in sorted(found)]


def assert_seen_is_trained(trajectory: Any, engine: Scripted) -> None:
    sequences = [sequence.tokens.tolist() for sequence in trajectory.sequences]
    for request in engine.requests:
        ahead = [tokens[: len(request.tokens)] for tokens in sequences]
        assert request.tokens in ahead


@pytest.mark.parametrize(
    ("choice", "rest", "given"),
    [
        ("required", ANY, "<tool_call>\n"),
        ({"type": "function", "function": {"name": "look"}}, REST, '"name": "look", "arguments":'),
    ],
)
def test_a_forced_call_is_given_as_far_as_it_is_forced_and_sampled_behind(
    choice: Any, rest: str, given: str
) -> None:
    engine = Scripted(CHAT.tokens_of(rest), "gold")

    async def player(client: Client) -> float:
        said = await ask(client, ASK, tools=[LOOK], tool_choice=choice)
        (call,) = said.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"where": "left"}')
        seen = {"role": "tool", "tool_call_id": call.id, "content": "nothing"}
        await ask(client, [*ASK, said.model_dump(exclude_none=True), seen], tools=[LOOK])
        return 1.0

    trajectory = run(player, engine).one
    assert CHAT.decoded(engine.requests[0].tokens).endswith(given)
    assert sampled(trajectory) == [rest, "gold"]
    assert len(trajectory.sequences) == 1 and trajectory.turn_flags[0] == TurnFlag.TOOL_CALL
    assert_seen_is_trained(trajectory, engine)
    forced = not isinstance(choice, str)
    assert engine.requests[0].stop_strings == (("</tool_call>",) if forced else ())


def test_one_call_at_most_ends_the_turn_and_the_template_closes_it() -> None:
    engine = Scripted(CHAT.tokens_of(called("left")), "gold")

    async def player(client: Client) -> float:
        options: dict[str, Any] = {"tools": [LOOK], "parallel_tool_calls": False}
        said = await ask(client, ASK, **options)
        assert len(said.tool_calls) == 1
        seen = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "nothing"}
        await ask(client, [*ASK, said.model_dump(exclude_none=True), seen], **options)
        await ask(client, ASK, parallel_tool_calls=False)
        return 1.0

    engine.said = iter([CHAT.tokens_of(called("left")), "gold", "text"])
    trajectory = run(player, engine).one
    first, second = engine.requests[:2]
    assert first.stop_strings == ("</tool_call>",) and engine.requests[2].stop_strings == ()
    behind = len(first.tokens) + len(CHAT.tokens_of(called("left")))
    assert second.tokens[behind] == CHAT.end_of_turn, "given, not sampled"
    assert_seen_is_trained(trajectory, engine)


def test_a_forced_call_closes_the_thought_that_a_template_opens() -> None:
    opened = CHATS["native"].template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert opened != CHATS["native"].template
    tokenizer = CHATS["native"]._tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, opened
    try:
        chat = type(CHAT)(tokenizer)
        engine = Scripted(chat.tokens_of(ANY), chat=chat)

        async def player(client: Client) -> float:
            said = await ask(client, ASK, tools=[LOOK], tool_choice="required")
            return float(said.tool_calls[0].function.name == "look")

        assert run(player, engine, chat=chat).one.reward == 1.0
    finally:
        tokenizer.chat_template = before
    assert chat.decoded(engine.requests[0].tokens).endswith("<think>\n\n</think>\n\n<tool_call>\n")


def test_the_beginning_of_an_answer_is_given_and_its_rest_sampled() -> None:
    engine = Scripted("1, 2", "yes")

    async def player(client: Client) -> float:
        begun = {"role": "assistant", "content": "Numbers: "}
        assert (await ask(client, [*ASK, begun])).content == "1, 2"
        both = [{"role": "assistant", "content": "Numbers: 1, 2"}]
        await ask(client, [*ASK, *both, {"role": "user", "content": "sure?"}])
        return 1.0

    trajectory = run(player, engine).one
    assert CHAT.decoded(engine.requests[0].tokens).endswith("assistant\nNumbers: ")
    assert len(trajectory.sequences) == 1 and sampled(trajectory) == ["1, 2", "yes"]


def test_several_choices_are_answers_of_one_prompt_each_trained_once() -> None:
    engine = Scripted("one", "two", "three", "four", "five")

    async def player(client: Client) -> float:
        found = await client.chat.completions.create(model="m", messages=ASK, n=2)  # type: ignore[arg-type]
        assert [choice.index for choice in found.choices] == [0, 1]
        texts = [choice.message.content for choice in found.choices]
        more = {"role": "user", "content": "go on"}
        await ask(client, [*ASK, {"role": "assistant", "content": texts[1]}, more])
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, ASK, n=3)
        assert refused.value.code == "max_turns"
        engine.hold.clear()
        fourth = asyncio.create_task(ask(client, ASK))
        while len(engine.requests) < 4:
            await asyncio.sleep(0.001)
        beyond = asyncio.create_task(ask(client, ASK, n=2))
        while not beyond.done() and len(engine.requests) < 5:
            await asyncio.sleep(0.001)
        engine.hold.set()
        with pytest.raises(openai.BadRequestError):
            await beyond
        await fourth
        return 0.5

    trajectory = run(player, engine, max_turns=5).one
    assert sampled(trajectory) == ["one", "two", "three", "four"], "none of both choices"
    assert len(trajectory.sequences) == 3
    assert engine.requests[0].tokens == engine.requests[1].tokens
    assert engine.requests[0].seed != engine.requests[1].seed
    assert_seen_is_trained(trajectory, engine)


def test_log_probs_are_those_that_are_recorded() -> None:
    engine = Scripted("ab", "ab")
    heard: list[float] = []

    async def player(client: Client) -> float:
        options: dict[str, Any] = {"model": "m", "messages": ASK, "logprobs": True}
        found = await client.chat.completions.create(**options)
        logprobs: Any = found.choices[0].logprobs
        assert [one.token for one in logprobs.content][:2] == ["a", "b"]
        heard.extend(one.logprob for one in logprobs.content)
        said = await client.responses.create(
            model="m", input="find it", include=["message.output_text.logprobs"]
        )
        text: Any = said.output[0].content[0]  # type: ignore[union-attr]
        assert [one.logprob for one in text.logprobs] == heard
        return 1.0

    (sequence,) = run(player, engine).one.sequences[:1]
    assert sequence.logprobs[sequence.roles == Role.ACTION].tolist() == heard


def test_keys_that_change_no_sampling_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    keys = {"verbosity": "low", "reasoning_effort": "high", "store": True, "service_tier": "auto"}
    keys |= {"user": "u", "metadata": {"a": "b"}, "prediction": {"type": "content", "content": ""}}

    async def player(client: Client) -> float:
        for _ in range(2):
            await ask(client, ASK, extra_body=keys)
        return 1.0

    with caplog.at_level(logging.INFO, "actors.endpoint.http_server"):
        assert run(player, Scripted("a", "b")).one.reward == 1.0
    told = [record.getMessage() for record in caplog.records if "no sampling" in record.message]
    assert len(told) == len(keys) and all(any(key in text for text in told) for key in keys)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "input_file"])
def test_what_is_no_text_is_refused_by_its_kind(path: str, kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind}]}
    body = json.dumps({"messages": [message]} if path != "responses" else {"input": [message]})
    decode: Any = {
        "chat/completions": chat_form.decode,
        "responses": lambda one: responses_form.decode(one, {}.get),
        "messages": messages_form.decode,
    }[path]
    with pytest.raises(RequestRefused, match=kind):
        decode(body.encode())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input": [{"type": "reasoning"}]}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ({"input": [{"role": "wizard", "content": ""}]}, "wizard"),
        ({"input": [3]}, "input"),
        ({"input": []}, "empty"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": "a", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "top_p": 0.5}, "top_p"),
        ({"input": "a", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "a", "unheard_of": 1}, "unheard_of"),
    ],
)
def test_the_responses_api_refuses_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        responses_form.decode(json.dumps(change).encode(), {}.get)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "wizard", "content": ""}]}, "wizard"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "content"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [NAMED]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_k": 5}, "top_k"),
        ({"container": "c"}, "container"),
    ],
)
def test_the_messages_api_refuses_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        messages_form.decode(json.dumps({"messages": ASK} | change).encode())


def test_one_conversation_is_the_same_request_in_every_form() -> None:
    """Two calls in one turn, with their results: the recorder compares messages, not bodies."""
    call = {"name": "look", "arguments": '{"where": "left"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            *ASK,
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"id": one, "type": "function", "function": call} for one in "ab"],
            },
            *({"role": "tool", "tool_call_id": one, "content": f"saw {one}"} for one in "ab"),
        ],
        "tools": [LOOK],
        "tool_choice": "required",
    }
    text = {"annotations": [], "text": "so", "type": "output_text", "logprobs": []}
    said = {"id": "msg_1", "content": [text], "role": "assistant", "type": "message"}
    items = [{"type": "function_call", "call_id": one, "id": f"fc_{one}", **call} for one in "ab"]
    seen = [{"type": "function_call_output", "call_id": one} for one in "ab"]
    outputs = [one | {"output": f"saw {name}"} for one, name in zip(seen, "ab", strict=True)]
    responses = {
        "model": "policy",
        "include": [],
        "input": [*ASK, said | {"status": "completed"}, *items, *outputs],
        "instructions": "be brief",
        "tool_choice": "required",
        "tools": [FLAT | {"description": "look somewhere"}],
    }
    where = {"where": "left"}
    uses = [{"type": "tool_use", "id": one, "name": "look", "input": where} for one in "ab"]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": one} for one in "ab"]
    results[0] |= {"content": [{"text": "saw a", "type": "text"}], "is_error": False}
    results[1] |= {"content": "saw b"}
    messages = {
        "max_tokens": 4096,
        "messages": [
            {"role": "user", "content": [{"text": "find it", "type": "text"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, *uses]},
            {"role": "user", "content": results},
        ],
        "system": [{"text": "be brief", "type": "text", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "any"},
        "tools": [NAMED],
    }
    first = chat_form.decode(json.dumps(chat).encode())
    second = responses_form.decode(json.dumps(responses).encode(), {}.get)
    third = messages_form.decode(json.dumps(messages).encode())
    for other in (second, third):
        assert other.messages == first.messages and other.tools_text == first.tools_text
        assert (other.calling, other.forced, other.single) == (True, "", False)
    assert second.instructed == 1


@pytest.mark.parametrize("stream", [False, True])
def test_responses_loop_over_their_tools(stream: bool) -> None:
    """As the Agents SDK does: items of the answer go back with the outputs of the tools."""
    engine = Scripted(called("left"), "so " + called("right") + called("up"), "gold")

    async def create(client: Client, **options: Any) -> Response:
        options |= {"model": "policy", "instructions": "be brief", "tools": [FLAT]}
        if not stream:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as events:
            kinds = [event.type async for event in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            return await events.get_final_response()

    async def player(client: Client) -> float:
        items: list[Any] = [*ASK]
        for calls in (1, 2):
            answer = await create(client, input=items)
            Response.model_validate_json(answer.model_dump_json(), strict=True)
            asked = [item for item in answer.output if item.type == "function_call"]
            assert len(asked) == calls
            items += [item.model_dump(exclude_unset=True) for item in answer.output]
            for item in asked:
                seen = {"type": "function_call_output", "call_id": item.call_id}
                items.append(seen | {"output": "nothing " + json.loads(item.arguments)["where"]})
        answer = await create(client, input=items)
        used: Any = answer.usage
        assert used.input_tokens == len(engine.requests[-1].tokens)
        return float(answer.output_text == "gold")

    ran = run(player, engine)
    assert ran.one.reward == 1.0 and len(ran.one.sequences) == 1
    assert_seen_is_trained(ran.one, engine)
    assert "be brief" in CHAT.decoded(engine.requests[0].tokens)


def test_a_response_continues_an_earlier_one_under_new_instructions() -> None:
    engine = Scripted("one", "two", "three")

    async def player(client: Client) -> float:
        first = await client.responses.create(model="m", input="find it", instructions="a-a")
        second = await client.responses.create(
            model="m", input="go on", instructions="a-a", previous_response_id=first.id
        )
        await client.responses.create(
            model="m", input="go on", instructions="b-b", previous_response_id=second.id
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="a", previous_response_id="resp_none")
        assert refused.value.code == "previous_response_not_found"
        return 1.0

    trajectory = run(player, engine).one
    assert len(trajectory.sequences) == 2, "the instructions of the third differ"
    shown = CHAT.decoded(engine.requests[2].tokens)
    assert "b-b" in shown and "a-a" not in shown and shown.count("go on") == 2
    assert_seen_is_trained(trajectory, engine)


def test_an_answer_that_is_cut_is_incomplete() -> None:
    engine = Scripted("a long answer", "a long answer")

    async def player(client: Client) -> float:
        cut = await client.responses.create(model="m", input="find it", max_output_tokens=3)
        assert cut.status == "incomplete" and cut.output_text == "a l"
        answer = await post(client, "messages", {"messages": ASK, "max_tokens": 3})
        assert answer.json()["stop_reason"] == "max_tokens"
        return 1.0

    assert run(player, engine).one.turn_flags.tolist() == [TurnFlag.CUT, TurnFlag.CUT]


def events_of(text: str) -> list[dict[str, Any]]:
    """The values of a stream's events, each under the kind that it names."""
    found = []
    for part in text.strip().split("\n\n"):
        kind, data = part.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {value['type']}"
        found.append(value)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_messages_loop_over_their_tools(stream: bool) -> None:
    engine = Scripted(called("left"), "so " + called("right") + called("up"), "gold")

    async def create(client: Client, messages: list[Any]) -> tuple[list[Any], str]:
        body = {"model": "m", "max_tokens": 500, "system": "be brief", "tools": [NAMED]}
        answer = await post(client, "messages", body | {"messages": messages, "stream": stream})
        if not stream:
            value = answer.json()
            return value["content"], value["stop_reason"]
        assert answer.headers["content-type"] == "text/event-stream"
        begun, *between, ended, _ = events_of(answer.text)
        assert begun["message"]["content"] == []
        blocks = []
        for start, delta, _ in zip(*[iter(between)] * 3, strict=True):
            block, change = start["content_block"], delta["delta"]
            if change["type"] == "text_delta":
                block["text"] += change["text"]
            else:
                block["input"] = json.loads(change["partial_json"])
            blocks.append(block)
        return blocks, ended["delta"]["stop_reason"]

    async def player(client: Client) -> float:
        messages: list[Any] = [*ASK]
        for calls in (1, 2):
            blocks, reason = await create(client, messages)
            asked = [block for block in blocks if block["type"] == "tool_use"]
            assert reason == "tool_use" and len(asked) == calls
            results = [
                {"type": "tool_result", "tool_use_id": one["id"], "content": one["input"]["where"]}
                for one in asked
            ]
            messages += [{"role": "assistant", "content": blocks}]
            messages += [{"role": "user", "content": results}]
        blocks, reason = await create(client, messages)
        assert reason == "end_turn"
        return float(blocks == [{"type": "text", "text": "gold"}])

    ran = run(player, engine)
    assert ran.one.reward == 1.0 and len(ran.one.sequences) == 1
    assert_seen_is_trained(ran.one, engine)


def test_messages_name_the_stop_sequence_and_their_errors() -> None:
    engine = Scripted("a;b;")

    async def player(client: Client) -> float:
        answer = await post(client, "messages", {"messages": ASK, "stop_sequences": [";"]})
        value = answer.json()
        assert (value["stop_reason"], value["stop_sequence"]) == ("stop_sequence", ";")
        assert value["content"][0]["text"] == "a"
        refused = await post(client, "messages", {"messages": ASK, "top_p": 0.5})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert "top_p" in refused.json()["error"]["message"]
        return 1.0

    assert run(player, engine).one.reward == 1.0


def test_the_forms_share_one_episode() -> None:
    """A conversation that goes on in another form goes on in its sequence."""
    engine = Scripted("one", "two", "three")

    async def player(client: Client) -> float:
        items: list[Any] = [*ASK]
        for path, name in zip(PATHS, ("one", "two", "three"), strict=True):
            key = "input" if path == "responses" else "messages"
            answer = await post(client, path, {key: items, "model": "m"})
            assert answer.status_code == 200 and name in answer.text
            items += [{"role": "assistant", "content": name}, {"role": "user", "content": "more"}]
        return 1.0

    trajectory = run(player, engine).one
    assert len(trajectory.sequences) == 1 and sampled(trajectory) == ["one", "two", "three"]


def test_many_agents_at_once_over_all_forms() -> None:
    engine = Scripted(*["gold"] * 60)

    async def player(client: Client) -> float:
        bodies = ({"messages": ASK}, {"input": "find it"}, {"messages": ASK, "max_tokens": 99})
        answers = await asyncio.gather(
            *(post(client, path, body) for path, body in zip(PATHS, bodies, strict=True))
        )
        return float(all(answer.status_code == 200 for answer in answers))

    ran = run(player, engine, members=20)
    assert ran.error is None and all(one.trajectory.success for one in ran.finished)
    assert len(ran.finished) == 20


@pytest.mark.parametrize("family", ["llama3_1", "qwen3_5", "qwen3"])
def test_a_call_is_forced_in_json_in_tags_alone(family: str) -> None:
    chat = Chat(family_tokenizer(family))
    template = Template(chat)
    body = {"messages": ASK, "tools": [LOOK], "tool_choice": "required"}
    forced = chat_form.decode(json.dumps(body).encode())
    if family == "qwen3":
        assert template.given(forced, template.first(forced)).endswith("<tool_call>\n")
        return
    recorder = Recorder(template)
    with pytest.raises(RequestRefused, match="tool_choice"):
        recorder.begin(forced)
    first = recorder.begin(forced._replace(forced=None))
    recorder.finish(first, Generation(), ChatMessage("assistant", "a"), ())
    more = (*forced.messages, ChatMessage("assistant", "a"), ChatMessage("user", "b"))
    with pytest.raises(RequestRefused, match="tool_choice"):
        recorder.begin(forced._replace(messages=more))
    again = recorder.begin(forced._replace(messages=more, forced=None))
    assert again.merged, "the refused call holds nothing"
    recorder.abandon(again)
    bare = chat_form.decode(json.dumps({"messages": ASK}).encode())._replace(messages=more)
    assert not recorder.begin(bare).merged, "its prompt lists other tools"
