"""Rewards by a sequence classifier in a directory, in a process of `workers.py`, which keeps it."""

from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.rewards.facts import Message


def score(
    directory: str, tokens: list[int] | None = None, messages: list[Message] | None = None
) -> float:
    """Return the reward of a conversation by a sequence classifier with one label.

    It is given as tokens, or as messages for the model's own chat template; without a template
    their texts are read as lines.
    """
    model, tokenizer = _loaded(directory)
    if tokens is None:
        tokens = _written(tokenizer, messages or [])
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


@lru_cache(maxsize=1)
def _loaded(directory: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    # A conversation can end with the token that pads others: then the one before it would be read.
    model.config.pad_token_id = None
    return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _written(tokenizer: Any, messages: list[Message]) -> list[int]:
    if tokenizer.chat_template:
        found = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        return [int(token) for token in found]
    text = "\n".join(str(message["content"]) for message in messages)
    return tokenizer(text)["input_ids"]
