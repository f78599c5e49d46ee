"""Detection of stop strings in sampled tokens."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from transformers import PreTrainedTokenizerBase

UNDECODED = "\ufffd"  # decoded part of a multi-byte character
REMEMBERED = 256  # tuples of stop strings whose tokens are kept: agents choose their own


class StopStrings:
    """Detector that decodes only after a token that can complete a stop string.

    `completers(strings)`: the tokens whose text can contain the end of one of the strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.completers = lru_cache(REMEMBERED)(self._find_completers)

    def found(self, tokens: Sequence[int], strings: tuple[str, ...]) -> bool:
        """Return True if a string ends within the last of the sampled tokens."""
        # Every token has at least one byte, so the string has at most as many tokens as bytes.
        reach = max(len(string.encode()) for string in strings) + 1
        text = self._tokenizer.decode(list(tokens[-reach:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    def _find_completers(self, strings: tuple[str, ...]) -> frozenset[int]:
        if not strings:
            return frozenset()
        beginnings = {one for string in strings for one in _beginnings(string)}
        if "" in beginnings:
            return self._all
        texts, tokens = self._vocabulary
        found = set[int]()
        for whole in (UNDECODED, *strings):
            found.update([place for place, text in enumerate(texts) if whole in text])
        for beginning in beginnings:
            place = bisect_left(texts, beginning)
            while place < len(texts) and texts[place].startswith(beginning):
                found.add(place)
                place += 1
        return frozenset(tokens[place] for place in found)

    @cached_property
    def _all(self) -> frozenset[int]:
        """All tokens: each can follow the dropped space that ends a string. One set takes MBs."""
        return frozenset(range(len(self._tokenizer)))

    @cached_property
    def _vocabulary(self) -> tuple[list[str], list[int]]:
        """Texts of all tokens in alphabetical order, and their tokens."""
        ids = [[token] for token in range(len(self._tokenizer))]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=False)
        tokens = sorted(range(len(texts)), key=texts.__getitem__)
        return [texts[token] for token in tokens], tokens


def _beginnings(string: str) -> Iterator[str]:
    """Yield how the text of a token can begin that ends the string and contains not all of it."""
    for start in range(len(string)):
        if start:
            yield string[start:]
        if string[start] == " ":  # some decoders drop the space before the first word
            yield string[start + 1 :]
