"""Tokens that can complete a stop string, against their definition."""

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.engines.decoding.stops import UNDECODED, StopStrings


class Vocabulary:
    """A tokenizer of these texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return [self.texts[token] for (token,) in ids]


def can_complete(text: str, string: str) -> bool:
    return UNDECODED in text or any(
        string in form or any(form.startswith(string[i:]) for i in range(1, len(string)))
        for form in (text, " " + text)
    )


pieces = st.text(st.sampled_from(f"ab <{UNDECODED}"), max_size=5)


@given(st.lists(pieces, max_size=20), st.lists(pieces.filter(bool), max_size=3))
def test_completers_are_all_tokens_that_can_end_a_string(
    texts: list[str], strings: list[str]
) -> None:
    stops = StopStrings(Vocabulary(texts))  # type: ignore[arg-type]
    expected = {
        token
        for token, text in enumerate(texts)
        if any(can_complete(text, string) for string in strings)
    }
    assert stops.completers(tuple(strings)) == expected


def test_strings_that_all_tokens_can_end_share_one_set() -> None:
    stops = StopStrings(Vocabulary(["a", "b"]))  # type: ignore[arg-type]
    assert stops.completers(("Observation 1: ",)) is stops.completers(("Observation 2: ",))


def test_a_new_string_costs_little_with_a_large_vocabulary() -> None:
    """Agents number their stop strings, and the engine's loop waits for each new one."""
    stops = StopStrings(Vocabulary([f"t{token} abc" for token in range(150_000)]))  # type: ignore[arg-type]
    stops.completers(("\nObservation 0:",))
    began = time.thread_time()
    stops.completers(("\nObservation 1:",))
    assert time.thread_time() - began < 0.15
