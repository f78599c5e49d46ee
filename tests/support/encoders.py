"""A small encoder for embedders."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from evolver_async.model.tiny import make_tokenizer


def write_encoder(path: Path) -> Path:
    """A directory as sentence-transformers leaves it, with random weights."""
    tokenizer = make_tokenizer(64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=64,
        )  # fmt: skip
        BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    return path
