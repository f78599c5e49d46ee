"""Chat messages as first observation, and whole messages as actions: episodes of both."""

import asyncio
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from rollouts import (
    CHAT,
    TOKENIZER,
    Adviser,
    Corridor,
    FakeEngine,
    corridor,
    play,
    roll_out,
    say,
    setting,
    ticket,
)
from stripping import stripped

from actors.envs.base import EnvironmentFailure, begun, make_env
from actors.envs.return_checks import checked_opening
from actors.envs.row_prompts import Prompts
from actors.export_manual import beginning, template_of
from actors.formats.turns import WholeMessage
from actors.questioning.action_replay import replay
from actors.rollout.conversation import first_prompt, system_message
from actors.ticket_progress import TicketProgress
from evolver_async.env import Info, Step
from evolver_async.schema import Role, Task, Ticket, TurnFlag

END = "<|im_end|>"
PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3 < 4 || not?"},
]


def whole(extract: str = "") -> WholeMessage:
    return WholeMessage(think=False, actions_per_turn=1, extract=extract)


def asked(prompt: list[dict[str, Any]], members: int = 1) -> Ticket:
    one = ticket({}, members, env="prompts")
    return msgspec.structs.replace(one, task=msgspec.structs.replace(one.task, prompt=prompt))


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    return TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


class Few(Corridor):
    """A corridor that opens with messages."""

    def reset(self, task: Task, dynamics_seed: int) -> Any:
        return [*PROMPT[:-1], {"role": "user", "content": super().reset(task, dynamics_seed)}]


def test_a_prompt_is_answered_by_one_whole_message() -> None:
    engine = FakeEngine({"0/0/0": say(f"yes, 3 < 4 || so{END}")})
    how = setting(format=whole(), recorded=True, wording="plain")
    (finished,) = play(asked(PROMPT), how, engine)
    trajectory = finished.trajectory
    assert [request.tokens for request in engine.requests] == [rendered(PROMPT)]
    assert engine.requests[0].stop_strings == ()
    assert (trajectory.terminated, trajectory.success, trajectory.reward) == (True, False, 0.0)
    assert trajectory.turn_flags.tolist() == [0]
    assert finished.ending == finished.transcript.turns[0].action == "yes, 3 < 4 || so"
    assert finished.query == "1 + 1?\n3 < 4 || not?", "the user's messages"
    (sequence,) = trajectory.sequences
    assert np.flatnonzero(sequence.roles == Role.ACTION)[0] == len(rendered(PROMPT))


@pytest.mark.parametrize(("said", "action"), [(f"it is 7{END}", "7"), (f"who knows?{END}", None)])
def test_a_prompt_has_one_turn_readable_or_not(said: str, action: str | None) -> None:
    how = setting(format=whole("last_number"), recorded=True, truncated_reward=-5.0)
    (finished,) = play(asked(PROMPT), how, FakeEngine({"0/0/0": say(said, "again")}))
    trajectory = finished.trajectory
    unread = action is None
    assert trajectory.turn_flags.tolist() == [TurnFlag.FORMAT_ERROR * unread]
    assert trajectory.reward == pytest.approx(-0.1 * unread)
    assert trajectory.terminated and not trajectory.truncated
    assert finished.transcript.turns[0].action == (action or "")


def test_without_instructions_there_is_no_system_message() -> None:
    env = Prompts()
    for how in (setting(format=whole()), setting(format=whole(), wording="plain")):
        assert system_message(how, env) == ""
        seen = checked_opening("2 + 2?")
        assert first_prompt(how, env, seen) == rendered([{"role": "user", "content": "2 + 2?"}])
    told = setting(format=whole(), system_prompt="Only numbers.")
    assert system_message(told, env) == "Only numbers."
    lake = make_env("frozen_lake", {})
    assert system_message(setting(format=whole()), lake) == lake.instructions


def test_a_runs_system_prompt_stands_in_front_of_the_rows_own() -> None:
    how = setting(format=whole(), system_prompt="Think.")
    both = [{"role": "system", "content": "Think.\n\nBe brief."}, *PROMPT[1:]]
    assert first_prompt(how, Prompts(), checked_opening(PROMPT)) == rendered(both)


def test_special_tokens_in_messages_are_written_as_text() -> None:
    hostile = [{"role": one["role"], "content": f"{one['content']}{END}"} for one in PROMPT]
    engine = FakeEngine({"0/0/0": say(END)})
    play(asked(hostile), setting(format=whole()), engine)
    end = TOKENIZER.convert_tokens_to_ids(END)
    (request,) = engine.requests
    assert request.tokens.count(end) == rendered(PROMPT).count(end)


def test_windows_keep_the_messages_and_single_only_the_system() -> None:
    turns = [f"right{END}"] * 3
    for context, last in (
        ("full", [*PROMPT[:-1], ("at 0", "right", "at 1", "right", "at 2")]),
        ("window", [*PROMPT[:-1], ("at 0\n...\nat 1", "right", "at 2")]),
        ("single", [PROMPT[0], ("at 2",)]),
    ):
        engine = FakeEngine({"0/0/0": say(*turns)})
        how = setting(format=whole(), context=context, window=1)
        roll_out(corridor(env=Few), how, engine)
        *messages, said = last
        messages = [dict(one) for one in messages]
        messages[0]["content"] = f"walk\n\n{messages[0]['content']}"
        roles = ("user", "assistant") * 3
        messages += [{"role": r, "content": t} for r, t in zip(roles, said, strict=False)]
        assert engine.requests[-1].tokens == rendered(messages), context


def test_experience_stands_in_front_of_the_last_message() -> None:
    one = msgspec.structs.replace(asked(PROMPT, members=2), guided=[1])
    adviser = Adviser()
    engine = FakeEngine({f"0/{member}/0": say(END) for member in (0, 1)})
    bare, guided = [one.trajectory for one in play(one, setting(format=whole()), engine, adviser)]
    assert adviser.asked == ["1 + 1?\n3 < 4 || not?"]
    shown, plain = guided.sequences[0], bare.sequences[0]
    assert stripped(shown).tokens.tolist() == plain.tokens.tolist()
    behind = np.flatnonzero(shown.roles == Role.EXPERIENCE)[-1] + 1
    assert TOKENIZER.decode(shown.tokens[behind:]).startswith(PROMPT[-1]["content"])


def test_a_query_stands_in_front_of_the_last_message() -> None:
    one = asked(PROMPT)
    one = msgspec.structs.replace(one, task=msgspec.structs.replace(one.task, query="Now:"))
    engine = FakeEngine({"0/0/0": say(END)})
    play(one, setting(format=whole()), engine)
    last = {"role": "user", "content": f"Now:\n{PROMPT[-1]['content']}"}
    assert engine.requests[0].tokens == rendered([*PROMPT[:-1], last])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "must end with one from the user"),
        ([{"role": "assistant", "content": "a"}], "must end with one from the user"),
        ([{"role": "user"}], "message 0 must be a dict with role and content"),
        ([PROMPT[1], PROMPT[0], PROMPT[1]], "message 1 must be from user or assistant"),
        ([{"role": "tool", "content": "a"}], "message 0 must be from user or assistant"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of message 0 must be a text"),
    ],
)
def test_other_messages_are_a_failure_of_the_environment(messages: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(named)):
        checked_opening(messages)


def test_a_function_that_raises_in_extract_fails_its_episode() -> None:
    how = setting(format=whole(f"{__name__}:broken"))
    with pytest.raises(EnvironmentFailure, match="reading a turn"):
        play(asked(PROMPT), how, FakeEngine({"0/0/0": say(f"7{END}")}))


def broken(text: str) -> str | None:
    raise IndexError(text)


def test_prompts_name_their_task_and_need_a_prompt() -> None:
    env = Prompts()
    env.reset(asked(PROMPT).task, 0)
    same, other = Prompts(), Prompts()
    same.reset(asked([dict(one) for one in PROMPT]).task, 1)
    other.reset(asked(PROMPT[1:]).task, 0)
    assert env.content() == same.content() != other.content()
    with pytest.raises(ValueError, match=r"^tasks\.prompt: "):
        env.reset(ticket().task, 0)
    assert env.step("so") == Step("so", 0.0, True, False, Info())


def test_an_export_renders_messages_as_training_does() -> None:
    how = setting(format=whole())

    async def first() -> list[tuple[str, str]]:
        return await beginning(how, asked(PROMPT).task)

    shown = [{"role": role, "content": text} for role, text in asyncio.run(first())]
    assert shown == PROMPT
    exported = type(TOKENIZER)(
        tokenizer_object=TOKENIZER.backend_tokenizer,
        eos_token="<|endoftext|>",
        chat_template=template_of(CHAT, ""),
    )
    said = exported.apply_chat_template(shown, add_generation_prompt=True)["input_ids"]
    assert said == first_prompt(how, Prompts(), checked_opening(PROMPT))


def test_messages_are_replayed_as_what_the_user_says() -> None:
    one = asked(PROMPT)
    played = asyncio.run(replay(one, 0, one.task, ["so"], 0, 5.0, TicketProgress()))
    assert played.first == "1 + 1?\n3 < 4 || not?" and played.actions == ["so"]


def test_a_begun_task_has_its_query_in_the_last_message() -> None:
    task = msgspec.structs.replace(asked(PROMPT).task, query="Now:")

    async def opening() -> Any:
        async with begun(task) as (_, found):
            return found

    found = asyncio.run(opening())
    assert found.user == "Now:\n3 < 4 || not?" and found.system == "Be brief."
    assert found.before == (("user", "1 + 1?"), ("assistant", "2"))
