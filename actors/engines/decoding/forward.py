"""Forward pass of a Hugging Face model over KV slots, fused if the architecture allows it."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engines.decoding.fused import FusedDecoder
from actors.engines.decoding.kv_slots import Slots
from evolver_async.model.cpu.products import forget
from evolver_async.model.policy import split_model


class SlotModel:
    """A model that reads and writes KV slots of at most `max_length` tokens."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._model = model
        self._decoder, self._head = split_model(model)
        self._fused = FusedDecoder(model, max_length) if FusedDecoder.fits(model) else None

    def __call__(self, slots: Slots, inputs: dict[str, Tensor]) -> Tensor:
        """Run the inputs of `Slots.batch`; return the hidden states [B, Q, D].

        The next call may overwrite them.
        """
        if self._fused is not None:
            return self._fused(**inputs, slots=slots)
        return self._decoder(**inputs, past_key_values=slots, use_cache=True).last_hidden_state

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Project hidden states to logits [N, V]."""
        return self._head(hidden_ND) if self._fused is None else self._fused.head(hidden_ND)

    def renew(self) -> None:
        """Note that the model has other weights."""
        for weight in self._model.parameters():
            forget(weight)
        if self._fused is not None:
            self._fused.renew()

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """Compute the log-prob of each token but the first in a slot of its own."""
        slots = Slots(1, len(tokens), self._model.dtype, self._model.device, keep=False)
        slots.assign(0, np.asarray(tokens, np.int32))
        inputs, _ = slots.batch(np.zeros(1, np.int64), slots.total)
        logits_QV = self.head(self(slots, inputs)[0, :-1]).float()
        targets_Q1 = torch.tensor(tokens[1:], device=logits_QV.device)[:, None]
        return logits_QV.log_softmax(-1).gather(1, targets_Q1)[:, 0].tolist()
