"""Ten families' chat templates against the library's tokens of whole conversations: thought, tool
call, its result, answer, second question."""

import json
from typing import Any

import pytest
from families import (
    ARGUMENTS,
    QUESTION,
    RESULT,
    TABLE,
    TOOL,
    family_tokenizer,
    metaspace_tokenizer,
)

from actors.endpoint.chat_form import decode
from actors.endpoint.recorder import Recorder
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.endpoint.template import Template
from actors.endpoint.tools import (
    ChatToolCall,
    ParsedTurn,
    assistant_text,
    instructions,
    tool_responses,
)
from actors.engines.engine import Generation
from actors.formats.chat import TODAY, Chat
from evolver_async.schema import Role, WeightId

WEIGHTS = WeightId(lineage=1, step=1)
CALLS = (ChatToolCall("look", json.dumps(ARGUMENTS, sort_keys=True)),)


class Talk:
    """A conversation of one family, held by the recorder and by the library."""

    def __init__(self, name: str) -> None:
        self.family, self.tokenizer = TABLE[name], family_tokenizer(name)
        self.chat = Chat(self.tokenizer)
        self.template = Template(self.chat)
        self.recorder = Recorder(self.template)
        self.client = [dict(message) for message in QUESTION]
        self.library = [dict(message) for message in QUESTION]
        if not self.template.native:  # no system role, no tools: both are text
            listed = instructions([TOOL])
            said = "\n\n".join([QUESTION[0]["content"], listed, QUESTION[1]["content"]])
            self.library = [{"role": "user", "content": said}]

    def whole(self, opens: bool = True) -> list[int]:
        """Return the library's tokens of the whole conversation."""
        text = self.tokenizer.apply_chat_template(
            self.library,
            tools=[TOOL] if self.template.native else None,
            add_generation_prompt=opens,
            tokenize=False,
            strftime_now=TODAY.strftime,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def writes(self, message: dict[str, Any]) -> tuple[list[int], ParsedTurn]:
        """Have the policy write `message` as the library does; return what it saw, and what was
        read of it."""
        pending = self.recorder.begin(self.request(self.client))
        seen, opened = pending.context, self.whole()
        self.library.append(message)
        written = self.whole(opens=False)
        if written[: len(opened)] != opened:  # harmony's drops the thought before its answer
            assert self.family.syntax == "harmony"
            answer = self.chat.decoded(written).rpartition(self.chat.opening[-18:])[2]
            opened, written = [], self.chat.tokens_of(answer)
        tokens = written[len(opened) :]
        ends = [place for place, token in enumerate(tokens) if token in self.chat.stop_tokens]
        tokens = tokens[: ends[0] + 1] if ends else [*tokens, self._end(message)]
        read, ids = self.template.parse(self.chat.text_of(tokens), [TOOL])
        said = [{"function": call._asdict()} for call in read.calls]
        self.client.append({"role": "assistant", "content": read.content, "tool_calls": said})
        count = len(tokens)
        generation = Generation(
            tokens=tokens, logprobs=[0.0] * count, weights=[WEIGHTS] * count, finish="stop"
        )
        answer = ChatMessage("assistant", read.content.strip(), read.calls)
        self.recorder.finish(pending, generation, answer, ids)
        return seen, read

    def _end(self, message: dict[str, Any]) -> int:
        """Return what ends a turn in a template that does not close one: the head of the next."""
        name = "<|observation|>" if "tool_calls" in message else "<|user|>"
        return self.tokenizer.convert_tokens_to_ids(name)

    def hears(self, role: str, text: str, call: dict[str, Any] | None = None) -> None:
        """Append a message that is not the policy's."""
        self.client.append({"role": role, "content": text})
        plain = self.chat.plain(text)
        if not self.template.native and role == "tool":
            role, plain = "user", tool_responses([plain])
        named = {"name": "look", "tool_call_id": call["id"]} if call and role == "tool" else {}
        self.library.append({"role": role, "content": plain} | named)

    def request(self, messages: list[dict[str, Any]]) -> ChatRequest:
        return decode(json.dumps({"messages": messages, "tools": [TOOL]}).encode())


@pytest.mark.parametrize("name", TABLE)
def test_every_context_is_what_the_library_makes_of_the_whole_conversation(name: str) -> None:
    talk, family = Talk(name), TABLE[name]
    syntax = talk.template.syntax
    assert (syntax.name if syntax else "") == family.syntax
    arguments = json.dumps(ARGUMENTS) if family.as_text else ARGUMENTS
    call = {"type": "function", "id": family.id}
    call |= {"function": {"name": "look", "arguments": arguments}}
    thought = {family.thought: "I look."} if family.thought else {}
    message = {"role": "assistant", "content": ""} | thought | {"tool_calls": [call]}
    if not syntax:
        message = {"role": "assistant", "content": assistant_text("I look.", CALLS)}

    first = talk.whole()
    seen, read = talk.writes(message)
    assert seen == first
    assert read.calls == CALLS and read.readable
    assert "tool_call" not in read.content

    talk.hears("tool", RESULT, call)
    second = talk.whole()
    seen, read = talk.writes({"role": "assistant", "content": "It is up."})
    assert seen == second
    assert not read.calls and read.content.endswith("It is up.")

    talk.hears("user", "And the key?")
    seen = talk.recorder.begin(talk.request(talk.client)).context
    text, whole = talk.chat.decoded(seen), talk.chat.decoded(talk.whole())
    for kept, becomes in family.rewrites:
        assert kept in text
        text = text.replace(kept, becomes)
    assert text == whole
    assert family.rewrites or seen == talk.whole()
    (sequence,) = talk.recorder.sequences()  # token-exact: the next context goes on with it
    assert seen[: len(sequence.tokens)] == sequence.tokens.tolist()
    assert {*sequence.roles.tolist()} == {Role.PROMPT, Role.ACTION, Role.OBSERVATION}


LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }}"
    " [/INST]{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def test_a_space_at_the_head_of_each_piece_is_not_added_to_a_conversation() -> None:
    tokenizer = metaspace_tokenizer(LLAMA_2, "first")
    assert tokenizer.decode(tokenizer.encode("a") + tokenizer.encode("b")) == "a b"
    chat = Chat(tokenizer)
    tokens = chat.first("", "Where?", "<answer>") + chat.tokens_of(" up") + chat.next("So?", "", 97)
    assert chat.decoded(tokens) == "<s>[INST] Where? [/INST]<answer> up </s><s>[INST] So? [/INST]"
    before, message = chat.message("So?")
    assert chat.decoded(before + message).startswith("</s><s>[INST] So?")
    assert before + message == chat.next("So?", "", None)[: len(before + message)]


def test_a_tokenizer_whose_pieces_read_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        Chat(metaspace_tokenizer(LLAMA_2, "always"))


def test_switches_of_a_request_reach_the_template_in_every_turn() -> None:
    talk = Talk("qwen3_5")
    body: dict[str, Any] = {"messages": QUESTION}
    off = body | {"chat_template_kwargs": {"enable_thinking": False}}

    def context(body: dict[str, Any]) -> str:
        seen = Recorder(talk.template).begin(decode(json.dumps(body).encode())).context
        return talk.chat.decoded(seen)

    empty = "<think>\n\n</think>\n\n"
    assert context(body).endswith("<think>\n") and context(off).endswith(empty)
    talk.writes({"role": "assistant", "content": "Up."})
    talk.hears("user", "And the key?")
    off |= {"messages": talk.client, "tools": [TOOL]}
    seen = talk.recorder.begin(decode(json.dumps(off).encode()))
    assert seen.merged and talk.chat.decoded(seen.context).endswith(empty)
    for given in ({"tools": []}, {"add_generation_prompt": False}):
        with pytest.raises(RequestRefused, match="chat_template_kwargs"):
            context(body | {"chat_template_kwargs": given})
    with pytest.raises(RequestRefused, match="chat_template_kwargs"):
        decode(json.dumps(body | {"chat_template_kwargs": 1}).encode())


def test_switches_of_a_run_are_those_of_every_prompt() -> None:
    tokenizer = family_tokenizer("qwen3_5")
    quick = Chat(tokenizer, {"enable_thinking": False})
    assert quick.decoded(quick.first("", "Where?", "")).endswith("<think>\n\n</think>\n\n")
    assert quick.opening.endswith("</think>\n\n")
    with pytest.raises(ValueError, match=r"rollout\.template"):
        Chat(tokenizer, {"tools": []})
