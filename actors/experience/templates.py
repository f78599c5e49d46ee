"""The words of an experience that no language model wrote.

Every word is one of the tiny preset's tokenizer, which learns from demonstrations how to read them.
"""

CONTRAST = "{state} {good} not {bad}"


def contrast(state: str, good: str, bad: str) -> str:
    """What to do in a state, and what others did there before they failed."""
    return CONTRAST.format(state=state, good=good, bad=bad)
