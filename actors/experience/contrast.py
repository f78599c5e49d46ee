"""Experience from the contrast between failed and successful episodes, without a language model.

All members of a group start in the same state with the same task. An item is made for each state at
which a failed episode left the path of the successful ones. If no member succeeded, successes of
groups with similar tasks take their place.
"""

from collections import Counter
from collections.abc import Sequence

from actors.experience.embed import words_of
from actors.experience.pool import Item
from actors.experience.successes import SolvedGroup
from actors.experience.templates import contrast
from actors.llm.quoting import MAX_CHARS
from evolver_async.wire.transcripts import Transcript, Turn

MAX_ITEMS = 8  # per group
SUPPORT = 2  # tasks in which a principle holds, at least
AGREEMENT = 0.75  # share of the tasks with its state in which it holds, at least


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
    return [
        Item(query, text, 1.0, state=state, teacher=teachers.get(state, ""))
        for state, text in _divergences(episodes, good, max_chars)
    ]


def principles(
    episodes: Sequence[Transcript], solved: Sequence[SolvedGroup], max_chars: int = MAX_CHARS
) -> list[Item]:
    """Make items as `contrast_items` does, but of good actions that hold in several tasks.

    `solved`: solved groups with different tasks, the own one included if it is solved. An action is
    good in a state if at least `SUPPORT` of them left it by this action, and `AGREEMENT` of all
    that left it. The item is found by the words that these tasks share.
    """
    left: dict[str, list[tuple[str, SolvedGroup]]] = {}
    for group in solved:
        for state, actions in departures(group.episodes).items():
            left.setdefault(state, []).append((_most(actions), group))
    good: dict[str, Counter[str]] = {}
    agreed: dict[str, list[SolvedGroup]] = {}
    for state, found in left.items():
        best = _most(Counter(action for action, _ in found))
        groups = [group for action, group in found if action == best]
        if len(groups) >= max(SUPPORT, AGREEMENT * len(found)):
            good[state], agreed[state] = Counter([best]), groups
    return [
        Item(
            _shared_words([group.query for group in agreed[state]]),
            text,
            1.0,
            state=state,
            teacher="\n".join(sorted({group.source for group in agreed[state]})),
        )
        for state, text in _divergences(episodes, good, max_chars)
    ]


def _divergences(
    episodes: Sequence[Transcript], good: dict[str, Counter[str]], max_chars: int
) -> list[tuple[str, str]]:
    """Return the states at which most failures diverge, each with a text of what to do there.

    A failure diverges at its last state that has a good action.
    """
    bad: dict[str, Counter[str]] = {}
    for episode in episodes:
        if episode.success:
            continue
        shared = [turn for turn in _readable(episode) if turn.state in good]
        if shared and shared[-1].action not in good[shared[-1].state]:
            bad.setdefault(shared[-1].state, Counter())[shared[-1].action] += 1
    worst = sorted(bad, key=lambda state: (-bad[state].total(), state))[:MAX_ITEMS]
    texts = ((one, contrast(one, _most(good[one]), _most(bad[one]), max_chars)) for one in worst)
    return [(state, text) for state, text in texts if text]


def _shared_words(queries: list[str]) -> str:
    """Return the words of the first task that all others have too, in its order."""
    first, *others = map(words_of, queries)
    return " ".join(word for word in first if all(word in words for words in others))


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
