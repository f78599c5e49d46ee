"""Episodes whose tools, calls and results are written as a family's chat template writes them."""

import json
from typing import Any

import pytest
from families import ARGUMENTS, QUESTION, RESULT, TABLE, TOOL, Family, family_tokenizer
from rollouts import FakeEngine, corridor, roll_out, setting

from actors.formats.chat import TODAY, Chat
from actors.formats.native import Native
from actors.formats.tool_calls import InvalidCall, called, canonical
from actors.formats.turns import turn_format
from actors.rollout.conversation import system_message
from evolver_async.env import Info, Step
from evolver_async.schema import FAILED_CALL, Role, Task, TurnFlag

CALLING = {name: family for name, family in TABLE.items() if family.syntax}


class Lookout:
    """Looks where it is told; the answer is right if it is `up`."""

    instructions = str(QUESTION[0]["content"])
    isolation = "loop"

    def tools(self) -> list[dict[str, Any]]:
        return [TOOL["function"]]

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return str(QUESTION[1]["content"])

    def step(self, action: str) -> Step:
        call = called(action)
        if call.name == "look":
            assert call.arguments == ARGUMENTS
            return Step(RESULT, 0.0, False, False, Info())
        right = call.arguments["text"] == "up"
        return Step("", float(right), True, False, Info(success=right))

    def close(self) -> None: ...


def native(chat: Chat, **changes: Any) -> Any:
    return turn_format("native", think=False, actions_per_turn=1, chat=chat, **changes)


class Library:
    """The conversation as the library renders it."""

    def __init__(self, name: str) -> None:
        self.family: Family = CALLING[name]
        self.tokenizer = family_tokenizer(name)
        self.messages = [dict(message) for message in QUESTION]

    def tokens(self, opens: bool = True) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            self.messages,
            tools=[TOOL],
            add_generation_prompt=opens,
            tokenize=False,
            strftime_now=TODAY.strftime,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def calls(self, chat: Chat) -> list[int]:
        """Return the tokens of a turn that calls, up to the one that ends it."""
        arguments = json.dumps(ARGUMENTS) if self.family.as_text else ARGUMENTS
        number = "functions.look:0" if self.family.syntax == "kimi" else "000000000"
        call: dict[str, Any] = {"type": "function", "id": number}
        call["function"] = {"name": "look", "arguments": arguments}
        opened = len(self.tokens())
        thought = {self.family.thought: "I look."} if self.family.thought else {}
        said = {"role": "assistant", "content": ""} | thought | {"tool_calls": [call]}
        self.messages.append(said)
        turn = self.tokens(opens=False)[opened:]
        ends = [place for place, token in enumerate(turn) if token in chat.stop_tokens]
        end = self.tokenizer.convert_tokens_to_ids("<|observation|>")  # of GLM, which closes none
        return turn[: ends[0] + 1] if ends else [*turn, end]

    def hears(self, text: str) -> None:
        call = self.messages[-1]["tool_calls"][0]
        named = {"name": "look", "tool_call_id": call["id"]}
        self.messages.append({"role": "tool", "content": text} | named)


@pytest.mark.parametrize("name", CALLING)
def test_an_episode_is_what_the_library_makes_of_the_whole_conversation(name: str) -> None:
    library = Library(name)
    chat = Chat(library.tokenizer)
    style = native(chat, extract="<answer>")
    how = setting(chat=chat, format=style, max_length=1 << 16)
    system = system_message(how, Lookout())  # pyright: ignore[reportArgumentType]
    library.messages[0]["content"] = system
    assert "<tools>" not in system
    begun = library.tokens()
    answer = chat.tokens_of(style.render_actions([canonical("answer", {"text": "up"})]))
    engine = FakeEngine({"0/0/0": [library.calls(chat), answer]})
    library.hears(chat.plain(RESULT))
    (found,) = roll_out(corridor(env=Lookout), how, engine)
    assert found.success and found.terminated
    assert (found.turn_flags & TurnFlag.TOOL_CALL).tolist() == [TurnFlag.TOOL_CALL, 0]
    first, second = (request.tokens for request in engine.requests)
    assert first == begun and second == library.tokens()
    (sequence,) = found.sequences
    assert second == sequence.tokens[: len(second)].tolist()
    assert {*sequence.roles.tolist()} == {Role.PROMPT, Role.ACTION, Role.OBSERVATION}


@pytest.mark.parametrize("name", CALLING)
def test_a_demonstration_is_read_as_it_was_written(name: str) -> None:
    style = native(Chat(family_tokenizer(name)), extract="<answer>").listed([TOOL["function"]])
    for action in (canonical("look", ARGUMENTS), canonical("answer", {"text": "up"})):
        (read,) = style.parse(style.render_actions([action]))
        assert called(read) == called(action)


def test_what_cannot_be_read_is_told_and_counted() -> None:
    chat = Chat(family_tokenizer("qwen2_5"))
    style = native(chat).listed([TOOL["function"]])
    unclosed = '<tool_call>\n{"name": "look", "arguments": {}'
    (complaint,) = style.parse(unclosed)
    assert isinstance(complaint, InvalidCall)
    assert complaint.complaint in style.shown([complaint.complaint], False, "")
    assert style.parse(" \n") is None
    twice = style.render_actions([canonical("look", ARGUMENTS)]) * 2
    first, second = style.parse(twice)
    assert called(first).arguments == ARGUMENTS
    assert isinstance(second, InvalidCall)
    told = style.shown(["a door", second.complaint], False, "")
    assert told.index("a door") < told.index(second.complaint)
    engine = FakeEngine({"0/0/0": [chat.tokens_of(unclosed), chat.tokens_of("up")]})
    how = setting(chat=chat, format=native(chat), max_length=1 << 16)
    (found,) = roll_out(corridor(env=Lookout), how, engine)
    assert found.turn_flags[0] == TurnFlag.FORMAT_ERROR | FAILED_CALL and found.success


class Trap(Lookout):
    """Ends with the first look."""

    def step(self, action: str) -> Step:
        return Step("", 0.0, True, False, Info())


def test_an_episode_that_ends_before_the_last_call_of_a_turn_is_whole() -> None:
    chat = Chat(family_tokenizer("qwen2_5"))
    style = turn_format("native", think=False, actions_per_turn=2, chat=chat)
    both = style.render_actions([canonical("look", ARGUMENTS)] * 2)
    how = setting(chat=chat, format=style, max_length=1 << 16)
    engine = FakeEngine({"0/0/0": [chat.tokens_of(both)]})
    (found,) = roll_out(corridor(env=Trap), how, engine)
    assert found.terminated and len(engine.requests) == 1


def test_a_template_without_tools_is_refused() -> None:
    chat = Chat(family_tokenizer("gemma2"))
    assert Native(chat).syntax is None
    with pytest.raises(ValueError, match=r"rollout\.format"):
        native(chat)
