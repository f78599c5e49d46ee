"""Grammars of constrained decoding: the tokens that may come next, by xgrammar.

The actor masks all others before it samples. The learner walks a grammar over the sampled tokens
and derives the same masks: log-probs on both sides are those of the masked distribution.
"""

import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from evolver_async.schema import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_BYTES = 256 << 20  # of compiled grammars
CALL_MARKS = ("<tool_call>", "</tool_call>")  # written as text, though some tokenizers' are special
_CONTROLS = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_SOURCE = re.compile(r"\A\[[\d:]+\] \S+: ")  # time and file before xgrammar's messages


class GrammarError(ValueError):
    """A grammar that cannot be compiled or obeyed; the message says why."""


def installed() -> bool:
    """Return True if the extra `grammar` is installed."""
    return find_spec("xgrammar") is not None


class Grammars:
    """Compiler of grammars for one tokenizer and a model with `vocabulary` logits.

    No grammar allows special tokens, but for those that end a turn, nor control characters but for
    the newline: xgrammar has them in strings of a limited length, which are then no JSON.
    GrammarError without the extra `grammar`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
        if not installed():
            raise GrammarError("xgrammar is not installed: pip install 'evolver-async[grammar]'")
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._compilers: dict[frozenset[int], tuple[Any, Array]] = {}  # by the stop tokens

    def state(self, text: str, stops: Collection[int]) -> "GrammarState":
        """Return the grammar before its first token. `text`: a structural tag as JSON; `stops`: the
        tokens that end a turn. GrammarError if it cannot be compiled."""
        import xgrammar

        if not stops:
            raise GrammarError("the tokenizer has no token that ends a turn")
        compiler, text_W = self._compiler(frozenset(stops))
        try:
            compiled = compiler.compile_structural_tag(text)
        except RuntimeError as error:  # the library's only kind, for a schema as for a regex
            raise GrammarError(_SOURCE.sub("", str(error)).strip()) from None
        return GrammarState(xgrammar.GrammarMatcher(compiled), text_W)

    def _compiler(self, stops: frozenset[int]) -> tuple[Any, Array]:
        """Return a compiler and the bits of all tokens that text can consist of."""
        if stops not in self._compilers:
            import xgrammar

            found = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=sorted(stops)
            )
            pieces = [""] * self._vocabulary
            for piece, token in self._tokenizer.get_vocab().items():
                if token < self._vocabulary:
                    pieces[token] = piece
            for token, piece in enumerate(found.decoded_vocab):
                if _CONTROLS.search(piece):
                    pieces[token] = ""
            for token, added in self._tokenizer.added_tokens_decoder.items():
                if added.special and added.content not in CALL_MARKS and token < self._vocabulary:
                    pieces[token] = ""
            info = xgrammar.TokenizerInfo(
                pieces,
                found.vocab_type,
                vocab_size=self._vocabulary,
                stop_token_ids=sorted(stops),
                add_prefix_space=found.add_prefix_space,
            )
            # One thread: a grammar is compiled in milliseconds, and cores are for the model.
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
            text_V = np.ones(self._vocabulary, bool)
            text_V[info.special_token_ids] = False
            text_V[sorted(stops)] = True
            self._compilers[stops] = compiler, np.packbits(text_V, bitorder="little")
        return self._compilers[stops]


class GrammarState:
    """Place in a grammar behind some tokens.

    Where it permits any text nothing is masked, special tokens included: these do not move it.
    """

    def __init__(self, matcher: Any, text_W: Array) -> None:
        self._matcher = matcher
        self._text_W = text_W
        self._free = False

    @property
    def ended(self) -> bool:
        """Return True behind the end of the turn."""
        return self._matcher.is_terminated()

    def allowed(self) -> Array | None:
        """Return the tokens that may come next: uint8[ceil(V / 8)], one bit each, the lowest
        first; None if all may."""
        words = np.full((1, -(-len(self._text_W) // 4)), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words)
        mask_W = words.view(np.uint8)[0, : len(self._text_W)] & self._text_W
        self._free = bool((mask_W == self._text_W).all())
        return None if self._free else mask_W

    def accept(self, token: int) -> None:
        """Move behind a token. GrammarError if the last `allowed` excludes it."""
        if not self._matcher.accept_token(token) and not self._free:
            raise GrammarError(f"token {token} cannot come next")
