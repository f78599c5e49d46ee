"""Text of an actor's first finished episode, so that people see at once what the policy says."""

from dataclasses import dataclass

import numpy as np

from actors.rollout.episode_config import Setting
from evolver_async.metrics.first_reply import printable
from evolver_async.schema import Role, Ticket, Trajectory, TurnFlag
from evolver_async.wire.messages import REPLY_CHARS

SHOWN = ("rollout", "eval")  # kinds of tickets that the policy itself plays
PROMPT_ENDS, REPLY_ENDS = (200, 500), (500, 200)  # characters at the beginning and at the end
LINES = 12  # of each


@dataclass(eq=False)
class FirstReply:
    """Holder of the text until it is sent. `taken`: True once there was an episode."""

    text: str = ""
    taken: bool = False

    def take_in(self, ticket: Ticket, trajectory: Trajectory, setting: Setting) -> bool:
        """Return True for the first episode of the policy, whose text is to be sent."""
        if self.taken or ticket.kind not in SHOWN:
            return False
        self.taken = True
        self.text = first_turn(ticket, trajectory, setting)[:REPLY_CHARS]
        return True


def first_turn(ticket: Ticket, trajectory: Trajectory, setting: Setting) -> str:
    """Describe an episode and write its first prompt and reply, special tokens included."""
    sequence = trajectory.sequences[0]
    written = np.flatnonzero((sequence.roles == Role.ACTION) & (sequence.turns == 0)).tolist()
    start, end = (written[0], written[-1] + 1) if written else (len(sequence), len(sequence))
    flag = TurnFlag(int(trajectory.turn_flags[0]))
    most, turns = ticket.sampling.max_tokens, len(trajectory.turn_rewards)
    facts = [
        f"task {ticket.task.task_id}",
        "greedy" if ticket.sampling.temperature == 0 else "sampled",
        f"{end - start} of {most} tokens" + (", cut there" if TurnFlag.CUT in flag else ""),
        *(["cannot be read"] if TurnFlag.FORMAT_ERROR in flag else []),
        *([f"the first of {turns} turns"] if turns > 1 else []),
        f"reward {trajectory.reward:g}",
        "success" if trajectory.success else "no success",
    ]
    prompt, reply = (
        setting.chat.decoded(tokens.tolist())
        for tokens in (sequence.tokens[:start], sequence.tokens[start:end])
    )
    lines = [f"first reply ({', '.join(facts)})"]
    for name, text, bounds in (("prompt", prompt, PROMPT_ENDS), ("reply", reply, REPLY_ENDS)):
        for number, line in enumerate(_shortened(printable(text), *bounds)):
            lines.append(f"  {name if number == 0 else '':6} | {line}")
    return "\n".join(lines)


def _shortened(text: str, begin: int, end: int) -> list[str]:
    """Return the lines of a text, or of its beginning and its end."""
    if len(text) > begin + end:
        left_out = len(text) - begin - end
        text = f"{text[:begin]} [... {left_out} characters ...] {text[len(text) - end :]}"
    lines = text.split("\n")
    if len(lines) > LINES:
        half = LINES // 2
        lines = [*lines[:half], f"[... {len(lines) - 2 * half} lines ...]", *lines[-half:]]
    return lines
