"""Wording of experience that is made without a language model.

Every word is a token of the tiny preset's tokenizer, whose policy learns from demonstrations to
read them.
"""

from itertools import takewhile

from actors.experience.state_keys import readable
from actors.llm.quoting import MARK, MAX_CHARS, plain

CONTRAST = "{state} {good} not {bad}"


def contrast(state: str, good: str, bad: str, max_chars: int = MAX_CHARS) -> str:
    """Write which action to take in the state of this key, and which action failed there.

    The state is cut so that the actions fit into guidance of `max_chars`; "" if not even they do.
    """
    state = readable(state)
    text = CONTRAST.format(state=state, good=good, bad=bad)
    room = max_chars - len(MARK)
    if len(plain(text)) <= room:
        return text
    actions = plain(CONTRAST.format(state="", good=good, bad=bad))
    share = room - len(actions) - 1
    return f"{plain(state)[:share]} {actions}" if share > 0 else ""


def advice_of(text: str, state: str) -> str:
    """Return what a text of `contrast` says beside the state of this key."""
    whole = plain(text)
    pairs = zip(whole, plain(readable(state)), strict=False)
    shown = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return whole[sum(1 for _ in shown) :]
