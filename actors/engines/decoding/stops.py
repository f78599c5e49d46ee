"""Detection of stop strings in sampled tokens."""

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

UNDECODED = "\ufffd"  # decoded part of a multi-byte character


class StopStrings:
    """Detector that decodes only after a token that can complete a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._completers: dict[tuple[str, ...], frozenset[int]] = {}

    def completers(self, strings: tuple[str, ...]) -> frozenset[int]:
        """Return the tokens whose text can contain the end of one of the strings."""
        if strings not in self._completers:
            self._completers[strings] = frozenset(
                token
                for token, text in enumerate(self._texts)
                if any(_may_complete(text, string) for string in strings)
            )
        return self._completers[strings]

    def found(self, tokens: Sequence[int], strings: tuple[str, ...]) -> bool:
        """Return True if a string ends within the last of the sampled tokens."""
        # Every token has at least one byte, so the string has at most as many tokens as bytes.
        reach = max(len(string.encode()) for string in strings) + 1
        text = self._tokenizer.decode(list(tokens[-reach:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    @cached_property
    def _texts(self) -> list[str]:
        ids = [[token] for token in range(len(self._tokenizer))]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False)


def _may_complete(text: str, string: str) -> bool:
    # Some decoders drop the space before the first word, hence both forms.
    return UNDECODED in text or any(
        string in form or any(form.startswith(string[i:]) for i in range(1, len(string)))
        for form in (text, " " + text)
    )
