"""Conversations in tokens: equal to the template's rendering, and append-only."""

import json
import re
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
from chatml import TEMPLATE, make_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from actors.engines.engine import Generation
from actors.formats.chat import USER, Chat, Stream
from evolver_async.model.tiny import make_tokenizer as make_tiny_tokenizer
from evolver_async.model.tokenizer import GENERATION, ModelError, load_tokenizer, tokenizer_hash
from evolver_async.schema import Role, WeightId

TOKENIZER = make_tokenizer()
CHAT = Chat(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)


def rendered(messages: list[tuple[str, str]], prefix: str) -> list[int]:
    conversation = [{"role": role, "content": content} for role, content in messages]
    text = TOKENIZER.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return TOKENIZER.encode(text + prefix, add_special_tokens=False)


@given(texts, texts, st.lists(st.tuples(texts, texts), max_size=3), st.booleans())
def test_deltas_add_up_to_the_whole_template(
    system: str, user: str, turns: list[tuple[str, str]], ended: bool
) -> None:
    """Whether the end-of-turn token was sampled or came from the template, it stands there once."""
    messages = [("system", system)] * bool(system) + [("user", user)]
    tokens = CHAT.first(system, user, "<answer>")
    for answer, observation in turns:
        tokens += CHAT.tokens_of(answer + "</answer>") + [END] * ended
        tokens += CHAT.next(observation, "<answer>", tokens[-1])
        messages += [("assistant", f"<answer>{answer}</answer>"), ("user", observation)]
    assert tokens == rendered(messages, "<answer>")


def test_end_of_turn_and_eos_stop_a_turn() -> None:
    assert CHAT.end_of_turn == END
    assert CHAT.stop_tokens == {END, TOKENIZER.eos_token_id}


LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    " {{ message['content'] }} <|endoftext|>"
    "{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"
)


def test_the_token_that_ends_a_turn_comes_once_behind_a_blank_too() -> None:
    tokenizer = make_tokenizer(LLAMA_2)
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    assert chat.end_of_turn == end and chat.turn("left", ("stop",))[-1] == end
    ended, cut = [*chat.tokens_of("left"), end], chat.tokens_of("left")
    for turn, between in ((ended, ""), (cut, " <|endoftext|>")):
        tokens = turn + chat.next("saw", "", turn[-1])
        assert tokenizer.decode(tokens) == f"{tokenizer.decode(turn)}{between}[INST] saw [/INST]"


HARMONY = (  # <|im_end|> closes a message, <|endoftext|> the model's turn
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{{ '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_end_of_a_message_within_a_turn_does_not_end_it() -> None:
    """As with gpt-oss, whose turn is a message with its thought, and one with its answer."""
    tokenizer = make_tokenizer(HARMONY)
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    assert chat.end_of_turn == end and chat.stop_tokens == {end}
    follows = "<|im_start|>user\nsaw<|im_end|><|im_start|>assistant\n"
    assert tokenizer.decode(chat.next("saw", "", end)) == follows
    cut = chat.tokens_of("</answer>")[-1]
    assert tokenizer.decode(chat.next("saw", "", cut)) == f"<|im_end|>{follows}"


def test_a_turn_that_another_token_has_ended_is_not_ended_again(tmp_path: Path) -> None:
    """As with Llama 3, whose calls of a tool end with another token than its answers."""
    make_tokenizer().save_pretrained(tmp_path)
    call = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": [END, call]}))
    chat = Chat(load_tokenizer(tmp_path))
    assert chat.next("saw", "", call) == chat.next("saw", "", END)
    assert chat.next("saw", "", None)[0] == END


HEADED = (  # roles are special tokens, which nothing closes but the end of the conversation
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{{ '<|endoftext|>' if loop.last and message['role'] == 'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SHARED = HEADED.replace("%}<|", "%}<|im_start|><|")


@pytest.mark.parametrize("template", [HEADED, SHARED])
def test_the_head_of_a_message_stays_behind_a_turn_that_has_ended(template: str) -> None:
    tokenizer = make_tokenizer(template)
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": roles})
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    assert chat.end_of_turn == end
    assert tokenizer.decode(chat.next("saw", "", end)) == f"{chat.between}saw{chat.opening}"


def test_the_head_of_a_turn_that_a_template_always_opens_does_not_end_one() -> None:
    """As with old templates, which do not know `add_generation_prompt`."""
    tokenizer = make_tokenizer(
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
        "<|assistant|>"
    )
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": roles})
    assert Chat(tokenizer).end_of_turn == tokenizer.convert_tokens_to_ids("<|user|>")


@pytest.mark.parametrize(
    "condition", ["not add_generation_prompt", "messages[-1]['role'] == 'assistant'"]
)
def test_a_template_that_ends_with_no_message_of_the_assistant_is_taken(condition: str) -> None:
    refusal = f"{{% if {condition} %}}{{{{ raise_exception('no turn') }}}}{{% endif %}}"
    assert Chat(make_tokenizer(refusal + TEMPLATE)).end_of_turn == END


def test_an_ordinary_token_that_ends_a_turn_comes_once(tmp_path: Path) -> None:
    said = "{{ message['role'] }}: {{ message['content'] }}"
    plain = f"{{% for message in messages %}}{said}\n{{% endfor %}}"
    make_tokenizer(plain).save_pretrained(tmp_path)
    newline = TOKENIZER.encode("\n")[0]
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": [newline]}))
    chat = Chat(load_tokenizer(tmp_path))
    assert TOKENIZER.decode(chat.next("saw", "", newline)) == "user: saw\n"


def test_a_token_that_heads_the_next_message_comes_once_and_is_no_other(tmp_path: Path) -> None:
    """As with GLM, where the head of a user's or of a tool's message ends a turn."""
    heads = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
    make_tokenizer(heads).save_pretrained(tmp_path)
    user, tool = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": [user, tool]}))
    chat = Chat(load_tokenizer(tmp_path))
    assert chat.stop_tokens > {user, tool}
    shown = chat.tokens_of("shown")
    for last in (user, tool):
        for head in (user, tool):
            assert chat.behind(last, [head, *shown]) == [head, *shown][last == head :]


def test_a_model_can_name_more_tokens_that_end_a_turn(tmp_path: Path) -> None:
    """As Llama 3 does: its tokenizer names one of three."""
    make_tokenizer().save_pretrained(tmp_path)
    before = tokenizer_hash(tmp_path)
    more = TOKENIZER.convert_tokens_to_ids("a")
    for ends in (more, [END, more], None):
        (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": ends, "top_p": 0.9}))
        chat = Chat(load_tokenizer(tmp_path))
        named = {more} if ends else set[int]()
        assert chat.stop_tokens == CHAT.stop_tokens | named
        assert chat.text_of([*CHAT.tokens_of("left"), more]) == "left" + "a" * (not ends)
        assert (tokenizer_hash(tmp_path) == before) == (ends is None)
    (tmp_path / GENERATION).write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id: .*</s>"):
        Chat(load_tokenizer(tmp_path))


def test_text_of_sampled_tokens_keeps_tags_and_drops_the_stop_token() -> None:
    tokens = CHAT.tokens_of(" left</answer>")
    assert CHAT.text_of(tokens) == CHAT.text_of([*tokens, END]) == " left</answer>"
    assert CHAT.text_of([END]) == CHAT.text_of([]) == ""


def test_template_that_drops_a_message_is_refused() -> None:
    with pytest.raises(ValueError, match="chat template"):
        Chat(make_tokenizer("{{ messages[0]['content'] }}"))


def test_stream_records_roles_turns_and_versions() -> None:
    old, new = WeightId(lineage=1, step=4), WeightId(lineage=1, step=5)
    stream = Stream()
    stream.read([1, 2], Role.PROMPT)
    stream.write(Generation(tokens=[3, 4], logprobs=[-0.5, -1.0], weights=[old, new]), 0)
    stream.read([5], Role.OBSERVATION)
    stream.write(Generation(tokens=[6], logprobs=[-2.0], weights=[new]), 1)
    sequence = stream.sequence()
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequence.roles.tolist() == [0, 0, 2, 2, 3, 2]
    assert sequence.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, -1, 0, -2]
    assert [(run.weights, run.tokens) for run in sequence.versions] == [(old, 1), (new, 2)]


hostile = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<", "|im_end|>", "a", " "])
    | st.sampled_from(["<experience>", "</experience>", "<answer>", "\n", "é"]),
    max_size=12,
).map("".join)
SPECIAL = set(TOKENIZER.all_special_ids) | {
    token for token, added in TOKENIZER.added_tokens_decoder.items() if added.special
}


@given(hostile, hostile)
def test_what_an_environment_says_holds_no_special_token(first: str, later: str) -> None:
    """Whatever it spells: there are those of the template, and no more."""
    for said, harmless in (
        (CHAT.first("s", first, ""), CHAT.first("s", "", "")),
        (CHAT.next(later, "", None), CHAT.next("", "", None)),
    ):
        assert [t for t in said if t in SPECIAL] == [t for t in harmless if t in SPECIAL]


@given(hostile)
def test_experience_stays_between_its_markers(text: str) -> None:
    tokens = CHAT.experience(text)
    assert not SPECIAL & set(tokens)
    shown = TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)
    assert shown.startswith("<experience>\n") and shown.endswith("\n</experience>\n")
    assert shown.count("<experience") == shown.count("</experience") == 1


@given(hostile)
def test_only_experience_stands_between_its_markers(text: str) -> None:
    """What looks like it in a task or an observation would be trained, and never stripped."""
    for said in (CHAT.first(text, text, ""), CHAT.next(text, "", None)):
        shown = TOKENIZER.decode(said, clean_up_tokenization_spaces=False)
        assert not re.search("</?experience", shown)


@given(texts, texts)
@example(USER, "")
def test_the_users_message_begins_where_it_is_said(system: str, user: str) -> None:
    place = CHAT.place_of_user(system, user)
    tokens = CHAT.first(system, user, "<answer>")
    before = TOKENIZER.decode(tokens[:place], clean_up_tokenization_spaces=False)
    described = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    assert before == f"{described}<|im_start|>user\n"


DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + TEMPLATE
)
THINKING = """
{%- set last = messages | map(attribute='role') | list | length - 1 %}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'assistant' and loop.index0 < last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # as Qwen3's: earlier thoughts are left out
TRIMMED = (  # as Llama 3's: every message is trimmed
    "<|endoftext|>{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n"
    "{{ message['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
NO_SYSTEM = (  # as Gemma's: no system role, and turns must alternate
    "<|endoftext|>{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<|im_start|>{{ role }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
TEMPLATES = [TEMPLATE, DEFAULT, THINKING, TRIMMED, NO_SYSTEM]
SHOTS = (("user", " 1 + 1? "), ("assistant", "<think>two</think>\n2"))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("before", [(), SHOTS])
def test_the_first_prompt_is_the_templates_rendering_of_the_messages(
    template: str, system: str, before: tuple[tuple[str, str], ...]
) -> None:
    """Token for token; without a system message the template's own default acts."""
    tokenizer = make_tokenizer(template)
    said = [*before, ("user", "2 + 3 < 6 || no?")]
    if system and template == NO_SYSTEM:
        said[0] = ("user", f"{system}\n\n{said[0][1]}")
    elif system:
        said.insert(0, ("system", system))
    messages = [{"role": role, "content": text} for role, text in said]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    chat = Chat(tokenizer)
    assert chat.first(system, "2 + 3 < 6 || no?", "", before) == expected
    place = chat.place_of_user(system, "2 + 3 < 6 || no?", before)
    assert tokenizer.decode(expected[place:]).startswith("2 + 3 < 6 || no?")


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_first_message_is_read_back_without_a_system_message(template: str) -> None:
    chat = Chat(make_tokenizer(template))
    assert chat.last_message(chat.first("", "what now?", "<answer>"), "<answer>") == "what now?"


@pytest.mark.parametrize("tiny", [False, True])
def test_what_the_user_said_is_read_back(tiny: bool) -> None:
    chat = Chat(make_tiny_tokenizer(512)) if tiny else CHAT
    seen = "row 1 column 2\nleft ice"
    assert chat.last_message(chat.first("walk .", seen, "<answer>"), "<answer>") == seen
    assert chat.last_message(chat.next(seen, "<answer>", None), "<answer>") == seen


@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_follow_a_first_prompt_of_messages(template: str) -> None:
    """The end-of-turn token that the policy sampled is not written again."""
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer)
    tokens = [*chat.first("", "u0", "", SHOTS), *chat.tokens_of("a0"), END]
    tokens += chat.next("u1", "", END)
    head = "model" if template == NO_SYSTEM else "assistant"
    gap = "\n\n" if template == TRIMMED else "\n"
    line = "" if template == TRIMMED else "\n"
    assert tokenizer.decode(tokens).endswith(
        f"{head}{gap}a0<|im_end|>{line}<|im_start|>user{gap}u1<|im_end|>{line}<|im_start|>{head}{gap}"
    )


def test_a_template_that_writes_the_date_writes_the_same_on_every_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run goes on after midnight, and its seed gives the same prompts in every year."""
    chat = Chat(make_tokenizer("Today: {{ strftime_now('%d %b %Y') }}\n" + TEMPLATE))
    prompts, places = list[list[int]](), list[int]()
    for day in (1, 2):

        class Clock(datetime):
            today_is = datetime(2026, 11, day)

            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return cls.today_is

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        prompts.append(chat.first("be brief", f"map {day}", ""))
        places.append(chat.place_of_user("be brief", f"map {day}"))
    assert places[0] == places[1] and prompts[0][: places[0]] == prompts[1][: places[1]]


def test_a_template_that_counts_the_user_has_no_place_for_experience() -> None:
    counting = "{% for m in messages %}{{ m['content'] | length }}: {{ m['content'] }}|{% endfor %}"
    chat = Chat(make_tokenizer(counting))
    with pytest.raises(ValueError, match="depends on it"):
        chat.place_of_user("system", "user")


@given(st.text(max_size=400), st.integers(64, 120))
@example("a \U0001f600 b \u6f22\u5b57 <|im_end|> " * 20, 64)
def test_a_shortened_text_keeps_its_ends_and_its_limit(text: str, limit: int) -> None:
    found, cut = CHAT.shortened(text, limit)
    count = len(CHAT.tokens_of(CHAT.plain(text)))
    assert cut == (count > limit) and (cut or found == text)
    if cut:
        assert len(CHAT.tokens_of(CHAT.plain(found))) <= limit
        begin, _, rest = found.partition("\n[... ")
        note, _, end = rest.partition(" tokens left out ...]\n")
        left, _, whole = note.partition(" of ")
        assert int(whole) == count > int(left) > count - limit
        assert CHAT.plain(text).startswith(begin) and CHAT.plain(text).endswith(end) and end


def test_without_a_limit_every_text_is_whole() -> None:
    assert CHAT.shortened("long " * 999, 0) == ("long " * 999, False)
