"""View of the newest saved evaluation: episodes, each with its prompt's end and its reply. Pure."""

from rich.text import Text

from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, title, wrapped
from evolver_async.terminal import plain

NONE = (
    "no replies of an evaluation are kept; to play one and keep them: evolver-async eval {run}"
    " --save {run}/evaluations/FILE.jsonl"
)
SHOWN = 200  # episodes
PROMPT_CHARS, PROMPT_LINES, REPLY_LINES = 120, 2, 6  # of the prompt's end; of one episode


def evaluated(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the episodes, those without success first: they are what one looks for."""
    if not snapshot.replies:
        return wrapped(snapshot.unread or NONE.format(run=plain(snapshot.name)), width, DIM, most=6)
    found = snapshot.replies
    won = sum(one.success for one in found)
    head = f"{snapshot.replies_of}: {found[0].evaluated}, {won} of {len(found)} episodes succeed"
    lines = [title(plain(head), width)]
    for one in sorted(found, key=lambda one: one.success)[:SHOWN]:
        where = f"{one.set_name}: {one.task}" if one.set_name else one.task
        sample = f", sample {one.sample}" if one.sample else ""
        result, style = ("success", "green") if one.success else ("no success", "yellow")
        facts = f"{where}{sample}: {result}, reward {one.reward:g}, turns {one.turns}"
        lines += wrapped(plain(facts), width, style)
        lines += wrapped(f"… {plain(one.prompt[-PROMPT_CHARS:])}", width, DIM, most=PROMPT_LINES)
        lines += wrapped(plain(one.reply), width, most=REPLY_LINES)
    if len(found) > SHOWN:
        lines.append(Text(f"and {len(found) - SHOWN} more, in the file and in the report", DIM))
    return lines
