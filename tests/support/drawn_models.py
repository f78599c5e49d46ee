"""Small models whose weights are the same with every version of every library."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, Qwen3ForCausalLM

from evolver_async.model.tiny import make_tiny

STD = 0.3


def drawn_policy(directory: Path, seed: int) -> Path:
    """Write a causal language model."""
    make_tiny(
        directory,
        seed=0,
        hidden_size=16,
        layers=1,
        heads=2,
        intermediate_size=32,
        max_length=64,
    )
    _fill(Qwen3ForCausalLM.from_pretrained(directory), directory, seed)
    return directory


def drawn_classifier(directory: Path, seed: int) -> Path:
    """Write a sequence classifier with one label."""
    drawn_policy(directory, seed)
    made = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    _fill(made, directory, seed)
    return directory


@torch.no_grad()
def _fill(model: PreTrainedModel, directory: Path, seed: int) -> None:
    """Draw all matrices; vectors, which scale what a norm leaves, stay 1."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    for _, weight in sorted(model.named_parameters()):
        if weight.ndim > 1:
            weight.copy_(torch.from_numpy(STD * rng.standard_normal(weight.shape)))
    model.save_pretrained(directory)
