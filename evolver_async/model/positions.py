"""Longest context of a model by its configuration; no weights are read."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WITHIN = ("default", "llama3", "longrope", "su")  # rotations whose positions are all counted


def positions(directory: str | Path, engine: str) -> int | None:
    """Return the number of positions of the model in a directory, as `positions_of` does."""
    from transformers import AutoConfig  # imports torch

    return positions_of(AutoConfig.from_pretrained(directory, local_files_only=True), engine)


def positions_of(config: "PretrainedConfig", engine: str) -> int | None:
    """Return the longest context that engines of this kind take; None if only they know it.

    vLLM multiplies the positions of a stretched rotation, such as YaRN's, and refuses more itself.
    """
    if engine == "vllm" and not rotation_kinds(config) <= set(WITHIN):
        return None
    return getattr(config, "max_position_embeddings", None)


def rotation_kinds(config: "PretrainedConfig") -> set[str]:
    """Return the kinds of rotary position embeddings of the model's layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    rotations = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # or one a layer
    return {one.get("rope_type", "default") for one in rotations}
