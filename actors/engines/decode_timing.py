"""Time of a decoding step of the torch engine with a model.

`learner/tools/timing.py` times the passes of the learner.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.decoding.forward import SlotModel
from actors.engines.decoding.kv_slots import Slots
from evolver_async.config import Config
from evolver_async.model.precision import stopwatch


@torch.inference_mode()
def decode_times(config: Config, model: PreTrainedModel) -> tuple[int, float]:
    """Return the rows of an actor's decoding step, and the seconds of such a step."""
    rows = min(config.engine.slots, config.actors.groups * config.rollout.group_size)
    slots = Slots(rows, 2, model.dtype, model.device, keep=False)
    forward, all_S, ones_S = SlotModel(model, slots.max_length), np.arange(rows), np.ones(rows, int)
    for slot in range(rows):
        slots.assign(slot, np.array([slot % model.config.vocab_size], np.int32))
    seconds = 0.0
    for token in (None, 0):  # the first step makes the caches
        if token is not None:
            slots.append(all_S, [token] * rows)
        with stopwatch() as passed_s:
            inputs, last = slots.batch(all_S, ones_S)
            hidden_ND = forward(slots, inputs).flatten(0, 1)
            forward.head(hidden_ND if last is None else hidden_ND[last])
            slots.write(all_S, ones_S, all_S, all_S)
        seconds = passed_s()
    return rows, seconds
