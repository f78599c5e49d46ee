"""What each turn sees: all, a window or the present; tools told between turns or inside one."""

import asyncio
import itertools
import re
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from abacus import ANSWER, CODE, QUESTION
from abacus_runs import abacus, styled
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import (
    CHAT,
    RIGHT,
    TOKENIZER,
    Adviser,
    FakeEngine,
    corridor,
    play,
    roll_out,
    say,
    setting,
    ticket,
)
from stripping import stripped

from actors.checks import prompt_checks
from actors.checks.config import check
from actors.envs.return_checks import checked_tools
from actors.formats.tool_calls import canonical
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.scripted.demonstrations import demonstrate_group
from actors.ticket_progress import TicketProgress
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Role, Sampling, TurnFlag

CALL = '<tool_call>{"name": "python", "arguments": {"code": "3 + 4"}}</tool_call>'
LISTED = re.compile(r'^\{"name": "(\w+)"', re.MULTILINE)
FORMAT, CALLED = TurnFlag.FORMAT_ERROR, TurnFlag.TOOL_CALL
TOOL = CALLED | TurnFlag.TOOL_ERROR


def prompt(system: str, *said: str, prefix: str = "<answer>") -> list[int]:
    """The template's rendering of a conversation in which the user spoke first and last."""
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": "system", "content": system}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return CHAT.tokens_of(f"{CHAT.render(messages, [])}{prefix}")


SYSTEM = "walk reply with <answer> action</answer>"
SAID = "<answer> right</answer>"


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_window_is_the_first_prompt_and_the_last_turns(end: str) -> None:
    engine = FakeEngine({"0/0/0": say(*[RIGHT + end] * 5)})
    roll_out(corridor(length=5), setting(context="window", window=2), engine)
    assert [request.tokens for request in engine.requests] == [
        prompt(SYSTEM, "at 0"),
        prompt(SYSTEM, "at 0", SAID, "at 1"),
        prompt(SYSTEM, "at 0", SAID, "at 1", SAID, "at 2"),
        prompt(SYSTEM, "at 0\n...\nat 1", SAID, "at 2", SAID, "at 3"),
        prompt(SYSTEM, "at 0\n...\nat 2", SAID, "at 3", SAID, "at 4"),
    ]


@given(window=st.integers(1, 6), turns=st.integers(1, 8), ended=st.booleans())
@settings(max_examples=examples(25))
def test_windows_of_every_size_hold_what_they_say(window: int, turns: int, ended: bool) -> None:
    """Against the template's rendering of the messages, turn by turn."""
    said = RIGHT + "<|im_end|>" * ended
    engine = FakeEngine({"0/0/0": say(*[said] * turns)})
    roll_out(corridor(length=turns), setting(context="window", window=window), engine)
    for turn, request in enumerate(engine.requests):
        oldest = max(0, turn - window)
        first = "at 0" if oldest == 0 else f"at 0\n...\nat {oldest}"
        later = [part for n in range(oldest + 1, turn + 1) for part in (SAID, f"at {n}")]
        assert request.tokens == prompt(SYSTEM, first, *later)


def test_single_shows_the_task_and_what_is_now() -> None:
    asked = corridor(length=3)
    asked = msgspec.structs.replace(asked, task=msgspec.structs.replace(asked.task, query="out!"))
    engine = FakeEngine({"0/0/0": say(RIGHT, "what?", RIGHT, RIGHT)})
    roll_out(asked, setting(context="single"), engine)
    shown = ("at 0", "at 1", "invalid answer\nat 1", "at 2")
    assert [request.tokens for request in engine.requests] == [
        prompt(SYSTEM, f"out!\n{seen}") for seen in shown
    ]


@pytest.mark.parametrize(("context", "contexts"), [("full", 1), ("window", 3), ("single", 5)])
def test_every_turn_is_trained_once_in_the_context_it_was_sampled_in(
    context: str, contexts: int
) -> None:
    said = say(*[RIGHT] * 5)
    engine = FakeEngine({"0/0/0": said})
    (trajectory,) = roll_out(corridor(length=5), setting(context=context, window=2), engine)
    assert trajectory.success and len(trajectory.sequences) == contexts
    seen: dict[int, list[int]] = {}
    for sequence in trajectory.sequences:
        action = sequence.roles == Role.ACTION
        assert (sequence.turns[~action] == -1).all()
        first = int(action.argmax())
        assert (sequence.roles[:first] == Role.PROMPT).all()
        assert Role.PROMPT not in sequence.roles[first:]
        for turn in np.unique(sequence.turns[action]):
            assert turn not in seen
            where = np.flatnonzero(sequence.turns == turn)
            seen[int(turn)] = sequence.tokens[: where[0]].tolist()
            assert sequence.tokens[where].tolist() == said[turn]
    assert [seen[turn] for turn in range(5)] == [request.tokens for request in engine.requests]
    assert trajectory.action_tokens == sum(map(len, said))


def test_at_the_limit_a_window_drops_turns_and_other_contexts_end() -> None:
    lengths = {}
    for context in ("full", "window", "single"):
        engine = FakeEngine({"0/0/0": say(*[RIGHT] * 10)})
        how = setting(context=context, window=9, max_length=250)
        (trajectory,) = roll_out(corridor(length=50), how, engine)
        assert all(len(request.tokens) + 24 <= 250 for request in engine.requests)
        assert all(len(sequence) <= 250 for sequence in trajectory.sequences)
        assert trajectory.truncated
        lengths[context] = len(engine.requests)
    assert lengths["full"] < 9 and lengths["window"] == lengths["single"] == 10
    longest = max(len(request.tokens) for request in engine.requests)
    engine = FakeEngine({"0/0/0": say(*[RIGHT] * 10)})
    tight = setting(context="window", window=9, max_length=longest + 24)
    roll_out(corridor(length=50), tight, engine)
    assert len(engine.requests) == 1, "first and present observation do not fit together"


def test_a_turn_that_leaves_no_room_beside_it_is_left_out_of_its_window() -> None:
    """A window of no turns shows none: the first prompt, and what is to be seen now."""
    engine = FakeEngine({"0/0/0": say(RIGHT, "why " * 40, RIGHT)})
    bare = prompt(SYSTEM, "at 0\n...\ninvalid answer\nat 1")
    longest = max(len(bare), len(prompt(SYSTEM, "at 0", SAID, "at 1")))
    tight = setting(context="window", window=2, max_length=longest + 24)
    (trajectory,) = roll_out(corridor(length=2), tight, engine)
    assert trajectory.success
    assert [request.tokens for request in engine.requests][2:] == [bare]


@pytest.mark.parametrize("context", ["window", "single"])
def test_experience_is_in_every_context_and_stripped_from_each(context: str) -> None:
    both = msgspec.structs.replace(corridor(members=2, length=4), guided=[1])
    engine = FakeEngine({f"0/{member}/0": say(*[RIGHT] * 4) for member in (0, 1)})
    done = play(both, setting(context=context, window=1), engine, Adviser())
    plain, guided = [finished.trajectory for finished in done]
    assert len(plain.sequences) == len(guided.sequences) > 2
    for bare, shown in zip(plain.sequences, guided.sequences, strict=True):
        assert shown.guided and not bare.guided
        assert stripped(shown).tokens.tolist() == bare.tokens.tolist()
        experience = shown.tokens[shown.roles == Role.EXPERIENCE].tolist()
        assert experience == CHAT.experience("go right <|im_end|>")


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
@pytest.mark.parametrize("context", ["full", "window", "single"])
def test_a_turn_is_guided_by_what_it_observes_and_stripped_like_a_bare_one(
    context: str, end: str
) -> None:
    both = msgspec.structs.replace(corridor(members=2, length=4), guided=[1])
    engine = FakeEngine({f"0/{member}/0": say(*[RIGHT + end] * 4) for member in (0, 1)})
    adviser = Adviser("go from {state}")
    done = play(both, setting(context=context, window=1, stepwise=True), engine, adviser)
    plain, guided = [finished.trajectory for finished in done]
    assert adviser.states == ["at 0", "at 1", "at 2", "at 3"]
    assert adviser.asked == ["at 0", *(f"at 0\nat {turn}" for turn in (1, 2, 3))]
    for bare, shown in zip(plain.sequences, guided.sequences, strict=True):
        assert stripped(shown).tokens.tolist() == bare.tokens.tolist()
    requests = [one.tokens for one in engine.requests if one.session == "0/1/0"]
    for turn, request in enumerate(requests):
        newest = TOKENIZER.decode(request).rpartition("<|im_start|>user\n")[2]
        assert newest.startswith(f"<experience>\ngo from at {turn}\n</experience>\n")
    assert guided.experience_ids == [7, 9]


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_withheld_experience_is_recorded_and_not_seen(stepwise: bool) -> None:
    both = msgspec.structs.replace(corridor(members=2, length=3), guided=[1])
    engine = FakeEngine({f"0/{member}/0": say(*[RIGHT] * 3) for member in (0, 1)})
    how = setting(stepwise=stepwise, withholds=True)
    done = play(both, how, engine, Adviser("go from {state}"))
    plain, guided = [finished.trajectory for finished in done]
    seen = {one.session: one.tokens for one in engine.requests}
    assert seen["0/1/0"] == seen["0/0/0"]
    (shown,), (bare,) = guided.sequences, plain.sequences
    assert shown.guided and stripped(shown).tokens.tolist() == bare.tokens.tolist()
    assert guided.experience_ids == [], "they were of no use"


def test_tools_are_listed_called_and_answered_in_messages() -> None:
    engine = FakeEngine({"0/0/0": say(CALL, f"<answer>{ANSWER}</answer>")})
    (finished,) = play(abacus(), styled("tool_call", recorded=True), engine, Adviser())
    trajectory = finished.trajectory
    assert trajectory.success and trajectory.terminated and trajectory.reward == 1.0
    assert trajectory.turn_flags.tolist() == [CALLED, 0]
    first, second = (TOKENIZER.decode(request.tokens) for request in engine.requests)
    assert '<tools>\n{"name": "python", ' in first and f"user\n{QUESTION}" in first
    told = "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    assert second == f"{first}{CALL}<|im_end|>\n{told}<|im_start|>assistant\n"
    assert [turn.action for turn in finished.transcript.turns] == [
        canonical("python", {"code": CODE}),
        canonical("answer", {"text": ANSWER}),
    ]
    assert finished.transcript.turns[1].observation == "7" and finished.ending == "right"


def test_what_goes_wrong_with_a_call_is_told_flagged_and_counted() -> None:
    unknown = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    failing = '<tool_call>{"name": "fail"}</tool_call>'
    said = ["hm", "<tool_call>{</tool_call>", unknown, failing, CALL]
    engine = FakeEngine({"0/0/0": say(*said)})
    (trajectory,) = roll_out(abacus(), styled("tool_call", max_turns=5), engine)
    assert trajectory.turn_flags.tolist() == [FORMAT, FORMAT | TOOL, TOOL, TOOL, CALLED]
    assert trajectory.turn_rewards.tolist() == pytest.approx([-0.1, -0.1, 0, 0, 0])
    text = TOKENIZER.decode(engine.requests[-1].tokens)
    for told in (
        "neither a tool call nor an answer",
        "<tool_response>\nerror: this is no call as JSON",
        "<tool_response>\nerror: no tool 'fly' (known: fail, python)",
        "<tool_response>\nerror: KeyError",
    ):
        assert told in text
    engine = FakeEngine({"0/0/0": say(*said)})
    (short,) = roll_out(abacus(), styled("tool_call", format_errors=2), engine)
    assert len(short.turn_rewards) == 2, "a call that is no JSON is a format error as well"


def test_parallel_calls_are_answered_in_order_in_one_message() -> None:
    broken = "<tool_call>[]</tool_call>"
    engine = FakeEngine({"0/0/0": say(f"{CALL}{broken}{CALL}<|im_end|>", "<answer>7</answer>")})
    (trajectory,) = roll_out(abacus(), styled("tool_call", actions_per_turn=3), engine)
    told = str(TOKENIZER.decode(engine.requests[1].tokens)).rpartition("user\n")[2]
    first, error, last = told.split("</tool_response>")[:3]
    assert first == "<tool_response>\n7\n" and last == "\n<tool_response>\n7\n"
    assert "error: this is no call" in error
    assert trajectory.turn_flags.tolist() == [FORMAT | TOOL, 0] and trajectory.success


def test_code_is_run_where_it_stands() -> None:
    said = say(f"so <code>{CODE}</code>", "<code>x</code>", f"<answer>\\boxed{{{ANSWER}}}</answer>")
    engine = FakeEngine({"0/0/0": said})
    (trajectory,) = roll_out(abacus(), styled("interleaved"), engine)
    (sequence,) = trajectory.sequences
    outputs = say(
        *(f"\n<interpreter>\n{out}\n</interpreter>\n" for out in ("7", "error: ValueError"))
    )
    start = len(engine.requests[0].tokens)
    expected = said[0] + outputs[0] + said[1] + outputs[1] + said[2]
    assert sequence.tokens[start:].tolist() == expected
    action = sequence.roles == Role.ACTION
    assert action[start:].tolist() == [
        part in said for part in (said[0], outputs[0], said[1], outputs[1], said[2]) for _ in part
    ]
    assert (sequence.roles[start:][~action[start:]] == Role.OBSERVATION).all()
    assert trajectory.turn_flags.tolist() == [CALLED, TOOL, 0] and trajectory.success


def test_a_message_that_ends_without_an_answer_ends_its_episode() -> None:
    script = say(f"<code>{CODE}</code>", "that is it<|im_end|>", "never said")
    how = styled("interleaved", truncated_reward=-1.0)
    (trajectory,) = roll_out(abacus(), how, FakeEngine({"0/0/0": script}))
    assert (trajectory.truncated, trajectory.terminated) == (True, False)
    assert trajectory.turn_flags.tolist() == [CALLED, FORMAT]
    assert trajectory.reward == pytest.approx(-1.1)
    script = say("cut short", "<answer>\\boxed{7}</answer>")
    (trajectory,) = roll_out(abacus(), how, FakeEngine({"0/0/0": script}))
    assert trajectory.success and trajectory.turn_flags.tolist() == [FORMAT, 0]
    assert trajectory.reward == pytest.approx(0.9), "an answer was given after all"


TOOLS = [("tool_call", 1), ("tool_call", 2), ("interleaved", 1)]


@pytest.mark.parametrize(("name", "count"), TOOLS)
def test_demonstrations_call_tools_and_end_their_turns(name: str, count: int) -> None:
    """An expert's turns are what the format reads, each ended by what ends it for a policy."""
    done: list[Finished] = []
    how = styled(name, actions_per_turn=count)
    one = msgspec.structs.replace(
        abacus(members=3), sampling=Sampling(temperature=1.0, max_tokens=100)
    )
    asyncio.run(demonstrate_group(one, how, 1.0, TicketProgress(), done.append))
    stops = [CHAT.tokens_of(text)[-1] for text in how.format.stop_strings]
    for finished in done:
        trajectory = finished.trajectory
        assert trajectory.success and {*trajectory.turn_flags.tolist()} <= {0, CALLED}
        for sequence in trajectory.sequences:
            for turn in range(len(trajectory.turn_rewards)):
                assert sequence.tokens[sequence.turns == turn][-1] in {*stops, CHAT.end_of_turn}


BANDIT = ["env.name=bandit", "stages=[{kind: rl, steps: 1}]"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.context=some"], r"^rollout\.context: must be one of full, window, single"),
        (["rollout.window=0"], r"^rollout\.window"),
        (["rollout.format=tool_call"], r"^rollout\.format: tool_call needs tools"),
        (["rollout.format=interleaved"], r"^rollout\.format: interleaved needs tools"),
        (["rollout.format=interleaved", "rollout.context=window"], r"^rollout\.context: window"),
        (["rollout.format=tool_call", "rollout.context=single"], r"^rollout\.context: single"),
        (["rollout.format=interleaved", "rollout.think=true"], r"^rollout\.think"),
    ],
)
def test_formats_and_contexts_that_cannot_be_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check(load(None, [*BANDIT, *overrides]))


def test_tools_make_a_format_possible() -> None:
    tooled = [*BANDIT, "env.name=abacus:Abacus"]
    for name in ("tool_call", "interleaved"):
        check(load(None, [*tooled, f"rollout.format={name}"]))
    check(load(None, [*tooled, "rollout.format=tool_call", "rollout.context=window"]))


@pytest.mark.parametrize("format", ["tool_call", "interleaved"])
def test_the_tools_of_a_task_decide_what_it_can_be_played_in(format: str) -> None:
    config = load(None, [*BANDIT, "env.name=abacus:Varied", f"rollout.format={format}"])
    check(config)
    first = partial(
        prompt_checks._check_first, config, setting_of(config, CHAT, "", 0), reflects=False
    )
    even, odd = (ticket({}, group_id=number, env="abacus:Varied").task for number in range(2))
    assert first(even) > 0
    if format == "tool_call":
        assert first(odd) > 0
    else:
        lacks = r"^rollout\.format: interleaved needs a tool python of abacus:Varied"
        with pytest.raises(ConfigError, match=lacks):
            first(odd)


@pytest.mark.parametrize(
    "isolation", ["loop", "thread", pytest.param("process", marks=pytest.mark.process)]
)
def test_tools_are_awaited_and_belong_to_the_task(isolation: str) -> None:
    how = styled("tool_call", isolation=isolation, max_turns=2, step_timeout_s=60.0)
    runner, shown = asyncio.Runner(), []  # the process belongs to its loop
    for number in range(2):
        asked = msgspec.structs.replace(abacus(), group_id=number)
        seeded = msgspec.structs.replace(asked.task, env="abacus:Varied", map_seed=number)
        engine = FakeEngine({f"{number}/0/0": say(CALL, f"<answer>{ANSWER}</answer>")})
        asked = msgspec.structs.replace(asked, task=seeded)
        (trajectory,) = roll_out(asked, how, engine, run=runner.run)
        assert trajectory.success and trajectory.turn_flags[0] == (TOOL if number else CALLED)
        shown.append([LISTED.findall(TOKENIZER.decode(one.tokens)) for one in engine.requests])
    assert shown == [[["python"]] * 2, [["fail"]] * 2]
    how.idle.processes.close()
    runner.close()


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("python", TypeError),
        (["python"], TypeError),
        ([{"description": "adds"}], ValueError),
        ([{"name": "add"}, {"name": "add"}], ValueError),
    ],
)
def test_tools_that_are_no_specs_are_named(tools: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^tool"):
        checked_tools(tools)
