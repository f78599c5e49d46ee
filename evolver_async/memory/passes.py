"""Bytes that a model's passes take beside its weights, at their peak."""

from evolver_async.config import Config
from evolver_async.config.shape import DecoderShape
from evolver_async.memory.units import DTYPE_BYTES, FLOAT

LOGITS = {False: 1 << 25, True: 1 << 27}  # most of a chunk, and on a GPU: as in model.policy


def activation_bytes(config: Config, shape: DecoderShape) -> float:
    """Bytes that a pass over `learner.token_budget` tokens keeps for its backward pass."""
    size = DTYPE_BYTES[config.policy.decided_dtype]
    tokens = config.learner.token_budget or config.policy.max_length
    layer = shape.activations * tokens * size
    if config.learner.gradient_checkpointing:
        return tokens * shape.layers * shape.hidden * size + layer
    return shape.layers * layer


def logits_bytes(config: Config, shape: DecoderShape, gpu: bool) -> float:
    """Bytes of one chunk's logits, log-probs and their gradients, in float32, and of what sums the
    head's gradient of several chunks in float32 if the head has a short type."""
    tokens = config.learner.token_budget or config.policy.max_length
    chunk = min(config.learner.logprob_chunk, LOGITS[gpu] // shape.vocabulary, tokens)
    summed = 0
    if chunk < tokens and config.policy.decided_dtype != "float32" and not config.policy.lora.rank:
        # the sum, what is added to it, and that as it was computed
        summed = (
            (2 * FLOAT + DTYPE_BYTES[config.policy.decided_dtype]) * shape.vocabulary * shape.hidden
        )
    return 3 * FLOAT * chunk * shape.vocabulary + summed


def prefill_bytes(config: Config, shape: DecoderShape) -> float:
    """Bytes of an engine's widest moments: in a layer of a prefill its input and its MLP's factors;
    of all slots the logits, their scaled copy, the probabilities and what draws from them. Memory
    of the one is not given back for the other."""
    wide = 3 * shape.hidden + 3 * shape.inner + shape.queries
    layer = config.engine.prefill_tokens * wide * DTYPE_BYTES[config.policy.decided_dtype]
    return layer + 4 * FLOAT * config.engine.slots * shape.vocabulary
