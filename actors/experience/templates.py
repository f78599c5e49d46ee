"""Wording of experience that is made without a language model.

Every word is a token of the tiny preset's tokenizer, whose policy learns from demonstrations to
read them.
"""

CONTRAST = "{state} {good} not {bad}"


def contrast(state: str, good: str, bad: str) -> str:
    """Write which action to take in a state, and which action failed there."""
    return CONTRAST.format(state=state, good=good, bad=bad)
