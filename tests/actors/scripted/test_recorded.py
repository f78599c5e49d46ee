"""Tokens of recorded conversations, against what the library makes of the same messages."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from families import TABLE, TOOL, family_tokenizer

from actors.formats.chat import TODAY, Chat
from actors.scripted.recorded import ConversationRenderer, RowLeftOut
from evolver_async.buffer.tasks.examples import examples_of
from evolver_async.config import Config, DataConfig, PolicyConfig
from evolver_async.model.tokenizer import vocabulary_hash
from evolver_async.schema import Role

CALLING = [name for name, family in TABLE.items() if family.syntax]
WORDS = ["a", "door", "up", "<b>", "{x}", "<|im_end|>", "é", "\n", "look"]


def renderer_of(chat: Chat, **data: Any) -> ConversationRenderer:
    config = Config(policy=PolicyConfig(max_length=1 << 20), data=DataConfig(**data))
    return ConversationRenderer(chat, config)


def drawn(rng: random.Random, name: str) -> list[dict[str, Any]]:
    """Draw a conversation in OpenAI's form: questions, calls with results, answers, thoughts."""
    family = TABLE[name]

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))).strip() or "x"

    def thought() -> dict[str, str]:
        thinks = family.thought not in ("", "content") and rng.random() < 0.5
        return {family.thought: "I look."} if thinks else {}

    said = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        said.append({"role": "user", "content": text()})
        for _ in range(rng.randint(0, 2)):
            given = {"where": text(), "steps": rng.randint(0, 9)}
            arguments = json.dumps(given) if family.as_text else given
            number = sum("tool_calls" in one for one in said)  # as models of each family count
            id = f"functions.look:{number}" if ":" in family.id else f"{number:09d}"
            call = {"id": id, "type": "function"}
            call |= {"function": {"name": "look", "arguments": arguments}}
            said.append({"role": "assistant", "content": "", **thought(), "tool_calls": [call]})
            named = {"tool_call_id": id, "name": "look"}
            said.append({"role": "tool", "content": text(), **named})
        said.append({"role": "assistant", "content": text(), **thought()})
    return said


@pytest.mark.parametrize("name", CALLING)
def test_a_turn_is_what_the_policy_would_have_seen_and_written(name: str) -> None:
    rng, tokenizer = random.Random(name), family_tokenizer(name)
    chat = Chat(tokenizer)
    renderer = renderer_of(chat)
    for _ in range(150):
        said = drawn(rng, name)
        (example,) = examples_of({"messages": said, "tools": [TOOL]}, "sft", {})
        sequences = renderer.sequences(example)

        def library(messages: list[dict[str, Any]], opens: bool) -> list[int]:
            text = tokenizer.apply_chat_template(
                chat.plain_value(messages),
                tools=[TOOL],
                add_generation_prompt=opens,
                tokenize=False,
                strftime_now=TODAY.strftime,
            )
            return tokenizer.encode(text, add_special_tokens=False)

        places = [i for i, one in enumerate(said) if one["role"] == "assistant"]
        for turn, place in enumerate(places):
            (sequence,) = [one for one in sequences if turn in one.turns]
            begin, *_, last = (sequence.turns == turn).nonzero()[0].tolist()
            before = library(said[:place], opens=True)
            assert sequence.tokens[:begin].tolist() == before
            after = library(said[: place + 1], opens=False)
            shown = before
            if after[: len(before)] != before:  # harmony's drops a thought before its answer
                asked = {"role": "user", "content": ""}
                shown = library([asked], opens=True)
                after = library([asked, said[place]], opens=False)
            after = after[len(shown) :]
            ends = [i for i, token in enumerate(after) if token in chat.stop_tokens]
            written = sequence.tokens[begin : last + 1].tolist()
            assert written[: len(after)] == after[: ends[0] + 1 if ends else None]
            assert written[-1] in chat.stop_tokens
            assert (sequence.roles[begin : last + 1] == Role.ACTION).all()
        actions = sum(one.action_tokens for one in sequences)
        assert actions == sum(int((one.turns >= 0).sum()) for one in sequences)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"token_ids": [10**6, 1]}, "beyond the vocabulary"),
        ({"prompt_token_ids": [1] * 70}, "too long"),
        ({"tokenizer": "another"}, "another tokenizer"),
        ({"reward": 1e7}, "reward too large"),
        ({"logprobs": [-1, 1]}, "not readable"),
    ],
)
def test_a_trajectory_of_another_policy_is_left_out_by_its_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tokenizer = family_tokenizer(CALLING[0])
    tokenizer.save_pretrained(tmp_path)
    policy = PolicyConfig(path=str(tmp_path), max_length=64)
    renderer = ConversationRenderer(Chat(tokenizer), Config(policy=policy))
    row = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -1], "reward": 0.5}
    if not reason:
        (member,) = renderer.members(row | {"tokenizer": renderer.fingerprint}, "rl")
        assert (member.policy, member.reward, member.turn_rewards) == ("logged", 0.5, [0.5])
        tokenizer.chat_template = "{{ messages }}"  # as an export or a fork may write its files
        tokenizer.save_pretrained(tmp_path / "other")
        assert vocabulary_hash(tmp_path / "other") == renderer.fingerprint
        return
    with pytest.raises(RowLeftOut) as left_out:
        renderer.members(row | change, "rl")
    assert left_out.value.reason == reason
