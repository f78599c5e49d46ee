"""Structured output inside vLLM's processes, with the masks that the learner derives.

vLLM's own backend allows special tokens and control characters as text, and masks free text.
`vllm_weights.register` puts this one in its place.
"""

from typing import Any

import numpy as np
import torch
import vllm.v1.structured_output  # pyright: ignore[reportMissingImports]
from vllm.v1.structured_output.backend_types import (  # pyright: ignore[reportMissingImports]
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.backend_xgrammar import (  # pyright: ignore[reportMissingImports]
    XgrammarBackend,
)

from evolver_async.model.grammar import GrammarError, Grammars, GrammarState


def install() -> None:
    """Take the place of the backend `xgrammar`."""
    vllm.v1.structured_output.XgrammarBackend = MaskBackend


class MaskBackend(XgrammarBackend):
    """Compiler of structural tags; no other kind of grammar is requested."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grammars = Grammars(self.tokenizer, self.vocab_size)

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        return MaskGrammar(self._grammars.state(grammar_spec, stop_token_ids or set()))


class MaskGrammar(StructuredOutputGrammar):
    """Grammar of one request."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return False, which ends the request with an error, if a token is excluded."""
        try:
            for token in tokens:
                if not self._state.ended:
                    self._state.accept(token)
        except GrammarError:
            return False
        return True

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row_W = np.full(bitmask.shape[1], -1, np.int32)
        mask_W = self._state.allowed()
        if mask_W is not None and mask_W.any():  # else logits of -inf alone would be no numbers
            row_W[:] = 0
            row_W.view(np.uint8)[: len(mask_W)] = mask_W
        bitmask[batch_index] = torch.from_numpy(row_W)

    def is_terminated(self) -> bool:
        return self._state.ended

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError("speculative decoding has no grammars")

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError("speculative decoding has no grammars")

    def reset(self) -> None:
        raise NotImplementedError("a grammar is walked once")
