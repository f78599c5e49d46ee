"""The text of the first reply: readable, bounded, harmless to a terminal, and made once."""

import re

from msgspec.structs import replace
from rollouts import LEFT, RIGHT, FakeEngine, corridor, roll_out, say, setting

from actors.reply_text import LINES, FirstReply, first_turn
from evolver_async.metrics.first_reply import keep, printable, read
from evolver_async.schema import Trajectory, TurnFlag
from evolver_async.wire.messages import REPLY_CHARS


def played(*turns: str) -> Trajectory:
    how = setting(max_turns=len(turns))
    (trajectory,) = roll_out(corridor(), how, FakeEngine({"0/0/0": say(*turns)}))
    return trajectory


def test_it_has_the_prompt_the_reply_with_special_tokens_and_what_became_of_it() -> None:
    trajectory = played(LEFT + "<|im_end|>", RIGHT)
    text = first_turn(corridor(), trajectory, setting())
    head, *lines = text.split("\n")
    assert "the first of 2 turns" in head and "no success" in head and "of 24 tokens" in head
    assert "cut" not in head
    prompt, reply = text.split("  reply  | ")
    assert "<|im_start|>" in prompt and "at 0" in prompt and "<answer>" in prompt
    assert reply == " left</answer><|im_end|>"
    assert all(re.match(r"  (prompt|reply |      ) \| ", line) for line in lines)
    trajectory.turn_flags[0] = TurnFlag.CUT | TurnFlag.FORMAT_ERROR
    head, *_ = first_turn(corridor(), trajectory, setting()).split("\n")
    assert "cut there" in head and "cannot be read" in head


def test_it_is_bounded_and_cannot_steer_a_terminal(tmp_path) -> None:
    trajectory = played("\x1b[2J\n" * 60 + "w" * 1500)
    text = first_turn(corridor(), trajectory, setting())
    assert "\x1b" not in text and "\\x1b[2J" in text
    assert len(text) < REPLY_CHARS and len(text.split("\n")) <= 2 * (LINES + 1) + 1
    assert "characters ...]" in text
    keep(tmp_path, "first \x1b[2J")
    keep(tmp_path, "second")
    assert read(tmp_path) == printable("first \x1b[2J") == "first \\x1b[2J"


def test_an_actor_tells_its_first_episode_alone_and_no_demonstration() -> None:
    first, ticket, trajectory = FirstReply(), corridor(), played(LEFT)
    assert not first.take_in(replace(ticket, kind="demo"), trajectory, setting())
    assert first.take_in(replace(ticket, kind="eval"), trajectory, setting()) and first.text
    assert not first.take_in(ticket, trajectory, setting())
