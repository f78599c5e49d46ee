"""Experience from the contrast between a group's episodes, without a language model.

All members start in the same state with the same task. An item is made for each state at which a
failed episode left the path of the successful ones.
"""

from collections import Counter
from collections.abc import Sequence

from actors.experience.pool import Item
from actors.experience.templates import contrast
from evolver_async.protocol.transcripts import Transcript, Turn

MAX_ITEMS = 8  # per group


def contrast_items(query: str, episodes: Sequence[Transcript]) -> list[Item]:
    """Make one item for each state from which failures diverge, with a good and a bad action.

    The good action is the most frequent one with which successful members left the state for the
    last time, as earlier ones only led back to it. A failure diverges at its last state that a
    successful member visited too.
    """
    successes = [episode for episode in episodes if episode.success]
    paths = [{turn.state: turn.action for turn in _readable(episode)} for episode in successes]
    good: dict[str, Counter[str]] = {}
    for path in paths:
        for state, action in path.items():
            good.setdefault(state, Counter())[action] += 1
    bad: dict[str, Counter[str]] = {}
    for episode in episodes:
        if episode.success:
            continue
        shared = [turn for turn in _readable(episode) if turn.state in good]
        if shared and shared[-1].action not in good[shared[-1].state]:
            bad.setdefault(shared[-1].state, Counter())[shared[-1].action] += 1
    worst = sorted(bad, key=lambda state: (-bad[state].total(), state))
    return [
        Item(query, contrast(state, _most(good[state]), _most(bad[state])), 1.0, state)
        for state in worst[:MAX_ITEMS]
    ]


def _readable(episode: Transcript) -> list[Turn]:
    """Return the turns whose actions could be parsed."""
    return [turn for turn in episode.turns if turn.action]


def _most(actions: Counter[str]) -> str:
    """Return the most frequent action; of equally frequent ones the alphabetically first."""
    return min(actions, key=lambda action: (-actions[action], action))
