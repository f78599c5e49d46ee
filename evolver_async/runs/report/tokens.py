"""Tokens of trajectories as compact lists, with one table of their texts."""

from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from evolver_async.schema import Array, Role, Sequence

UNKNOWN = "\ufffd"  # decoders write it for a part of a character
MILLI = 1000  # log-probs are kept in thousandths


class TokenTable:
    """Texts of the tokens that occur, and the versions that sampled them, each once.

    Without a tokenizer the text of a token is its number.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.pieces: list[str] = []
        self.versions: dict[str, int] = {}
        self._places = np.full(1 << 10, -1, np.int64)  # of a token's text in `pieces`, by id
        self._partial = np.zeros(1 << 10, bool)  # tokens that end or begin within a character

    def encode(self, sequence: Sequence) -> dict[str, Any]:
        """Return a sequence as plain lists.

        t: places of the tokens' texts in `pieces`; o: texts of single tokens that differ from them;
        r: runs of (role, turn, tokens); p: log-probs of the ACTION tokens in thousandths;
        v: runs of (place of the version, tokens) over the ACTION tokens.
        """
        self._learn(sequence.tokens)
        roles, turns = sequence.roles, sequence.turns
        changes = (roles[1:] != roles[:-1]) | (turns[1:] != turns[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        lengths = [end - start for start, end in pairwise((*starts, len(roles)))]
        runs = zip(roles[starts].tolist(), turns[starts].tolist(), lengths, strict=True)
        logprobs = sequence.logprobs[roles == Role.ACTION]
        encoded = {
            "t": self._places[sequence.tokens].tolist(),
            "r": list(runs),
            "p": np.rint(logprobs * MILLI).astype(np.int32).tolist(),
            "v": [[self.version(str(run.weights)), run.tokens] for run in sequence.versions],
        }
        if self._partial[sequence.tokens].any():
            encoded["o"] = self._joined(sequence.tokens)
        return encoded

    def text(self, encoded: dict[str, Any], start: int, end: int) -> str:
        """Return the text of the tokens `start` to `end` of an encoded sequence."""
        places, others = encoded["t"], encoded.get("o", {})
        return "".join(others.get(i, self.pieces[places[i]]) for i in range(start, end))

    def version(self, name: str) -> int:
        """Return the place of a version among `versions`, which grow with new ones."""
        return self.versions.setdefault(name, len(self.versions))

    def _learn(self, tokens: Array) -> None:
        """Add the tokens that are new."""
        most = int(tokens.max())
        if most >= len(self._places):
            more = 2 * most + 1 - len(self._places)
            self._places = np.concatenate([self._places, np.full(more, -1, np.int64)])
            self._partial = np.concatenate([self._partial, np.zeros(more, bool)])
        new = tokens[self._places[tokens] < 0]
        for token in np.unique(new).tolist() if len(new) else ():
            text = self._text([token])
            self._places[token] = len(self.pieces)
            self._partial[token] = UNKNOWN in text
            self.pieces.append(text)

    def _joined(self, tokens: Array) -> dict[int, str]:
        """Decode runs of partial tokens together: the first one gets the text, the others none."""
        texts = {}
        partial = self._partial[tokens]
        start = 0
        for index in range(1, len(tokens) + 1):
            if index < len(tokens) and partial[index] and partial[index - 1]:
                continue
            if partial[start]:
                texts |= dict.fromkeys(range(start, index), "")
                texts[start] = self._text(tokens[start:index].tolist())
            start = index
        return texts

    def _text(self, tokens: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"[{token}]" for token in tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        written = self.tokenizer.id_to_token(tokens[0]) or ""
        # decoders drop the blank with which a text begins
        return f" {text}" if written.startswith("▁") and not text.startswith(" ") else text
