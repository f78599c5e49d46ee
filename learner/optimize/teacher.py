"""Model of `teacher.path`: loading, its shards, and both tokenizers if they differ."""

from copy import deepcopy
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evolver_async.config import Config
from evolver_async.model import policy, precision, row_checks
from evolver_async.model.tokenizer import ModelError, same_tokens
from learner.data.aligned import UNKNOWN, Texts
from learner.data.packing import Layout
from learner.ranks.mesh import Ranks


class Teacher:
    """Frozen model of a directory, sharded over the ranks but for its head.

    The backward pass computes chunks of both heads again, where sharded weights are not gathered.
    `texts`: both tokenizers, None if they have the same tokens.
    """

    def __init__(self, config: Config, path: str, ranks: Ranks, layout: Layout) -> None:
        self.path = path
        whole = "cpu" if ranks.mesh is not None else str(ranks.device)
        model = load(config, path, whole, layout, sharded=ranks.mesh is not None)
        _, head = policy.split_model(model)
        self.head = head if ranks.mesh is None else deepcopy(head).to(ranks.device)
        self.model = ranks.shard(model, master=False, dtype=config.policy.decided_dtype)
        self.ranks, self.packed = ranks, layout != "padded"
        self.texts: Texts | None = None
        if not same_tokens(config.policy.path, path):
            self.texts = texts_of(*map(policy.load_tokenizer, (config.policy.path, path)))


def load(
    config: Config, path: str, device: str, layout: Layout, *, sharded: bool
) -> PreTrainedModel:
    """Load the model of a teacher. ModelError, which names the key, if it cannot be one."""
    try:
        dtype = config.policy.decided_dtype
        model = precision.load_policy(path, dtype=dtype, device=device, sharded=sharded)
        if layout != "padded":
            row_checks.check_packing(model)
            row_checks.check_context(model, config.learner.context_parallel)
        if layout == "tree" and row_checks.has_window(model):
            raise ModelError("with it learner.prefix_trees must be never: its layers have a window")
    except ModelError as error:
        raise ModelError(f"teacher.path: {error}") from error
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < config.policy.max_length:
        limit = f"less than policy.max_length ({config.policy.max_length})"
        raise ModelError(f"teacher.path: {path} has {positions} positions, {limit}")
    return model.requires_grad_(False)


def texts_of(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> Texts:
    """Make the functions by which rows of `ours` become those of `theirs`."""

    def ends(tokenizer: Any, tokens: list[int]) -> tuple[list[int], str]:
        stream, found, text = DecodeStream(skip_special_tokens=False), list[int](), ""
        for token in tokens:
            piece = stream.step(tokenizer.backend_tokenizer, token)
            text += piece or ""
            found.append(UNKNOWN if piece is None else len(text))
        return found, text

    def tokens_of(text: str) -> tuple[list[int], list[int]] | None:
        tokens = theirs.encode(text, add_special_tokens=False)
        found, read = ends(theirs, tokens)
        return (tokens, found) if read == text else None

    return Texts(partial(ends, ours), tokens_of, frozenset(ours.all_special_ids))
