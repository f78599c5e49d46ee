"""Experience from the contrast between failed and successful episodes, without a language model.

All members of a group start in the same state with the same task. An item is made for each state at
which a failed episode left the path of the successful ones. If no member succeeded, successes of
groups with similar tasks take their place.
"""

from collections import Counter
from collections.abc import Sequence

from actors.experience.pool import Item
from actors.experience.successes import SolvedGroup
from actors.experience.templates import contrast
from actors.llm.quoting import MAX_CHARS
from evolver_async.wire.transcripts import Transcript, Turn

MAX_ITEMS = 8  # per group


def contrast_items(
    query: str,
    episodes: Sequence[Transcript],
    solved: Sequence[SolvedGroup] = (),
    max_chars: int = MAX_CHARS,
) -> list[Item]:
    """Make one item for each state from which failures diverge, with a good and a bad action.

    The good action is the most frequent one of `departures`. A failure diverges at its last state
    that a successful member visited too. `solved`: groups with similar tasks, nearest first; in a
    group that failed throughout, the nearest one that visited a state tells the good action.
    Actions that do not fit into guidance of `max_chars` make no item.
    """
    good = departures([episode for episode in episodes if episode.success])
    teachers: dict[str, str] = {}
    for group in solved if not good else ():
        for state, actions in departures(group.episodes).items():
            if state not in good:
                good[state], teachers[state] = actions, group.source
    bad: dict[str, Counter[str]] = {}
    for episode in episodes:
        if episode.success:
            continue
        shared = [turn for turn in _readable(episode) if turn.state in good]
        if shared and shared[-1].action not in good[shared[-1].state]:
            bad.setdefault(shared[-1].state, Counter())[shared[-1].action] += 1
    worst = sorted(bad, key=lambda state: (-bad[state].total(), state))
    items = []
    for state in worst[:MAX_ITEMS]:
        if text := contrast(state, _most(good[state]), _most(bad[state]), max_chars):
            items.append(Item(query, text, 1.0, state=state, teacher=teachers.get(state, "")))
    return items


def departures(successes: Sequence[Transcript]) -> dict[str, Counter[str]]:
    """Count by state the actions with which successful episodes left it for the last time.

    Earlier ones only led back to it.
    """
    found: dict[str, Counter[str]] = {}
    for episode in successes:
        for state, action in {turn.state: turn.action for turn in _readable(episode)}.items():
            found.setdefault(state, Counter())[action] += 1
    return found


def _readable(episode: Transcript) -> list[Turn]:
    """Return the turns whose actions could be parsed."""
    return [turn for turn in episode.turns if turn.action]


def _most(actions: Counter[str]) -> str:
    """Return the most frequent action; of equally frequent ones the alphabetically first."""
    return min(actions, key=lambda action: (-actions[action], action))
