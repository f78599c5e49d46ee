"""What the episodes of one group teach, found without a language model.

The members began at the same place with the same task. Where those that failed left the ways of
those that succeeded, there is something to know.
"""

from collections import Counter
from collections.abc import Sequence

from actors.experience.pool import Item
from actors.experience.templates import contrast
from evolver_async.protocol.transcripts import Transcript, Turn

MOST = 8  # items of one group


def diverged(query: str, episodes: Sequence[Transcript]) -> list[Item]:
    """One item for each state from which failures went wrong: what to do there, and what not.

    What to do is what most of the successful members did when they left the state for the last
    time: what they did there earlier only led them back. Where a failure went wrong is the last
    state of its way that a successful member had been in as well.
    """
    successes = [episode for episode in episodes if episode.success]
    ways = [{turn.state: turn.action for turn in _read(episode)} for episode in successes]
    good: dict[str, Counter[str]] = {}
    for way in ways:
        for state, action in way.items():
            good.setdefault(state, Counter())[action] += 1
    bad: dict[str, Counter[str]] = {}
    for episode in episodes:
        if episode.success:
            continue
        shared = [turn for turn in _read(episode) if turn.state in good]
        if shared and shared[-1].action not in good[shared[-1].state]:
            bad.setdefault(shared[-1].state, Counter())[shared[-1].action] += 1
    worst = sorted(bad, key=lambda state: (-bad[state].total(), state))
    return [
        Item(query, contrast(state, _most(good[state]), _most(bad[state])), 1.0, state)
        for state in worst[:MOST]
    ]


def _read(episode: Transcript) -> list[Turn]:
    """Its turns less those that could not be read."""
    return [turn for turn in episode.turns if turn.action]


def _most(actions: Counter[str]) -> str:
    """The most frequent, of equals the first in the alphabet."""
    return min(actions, key=lambda action: (-actions[action], action))
