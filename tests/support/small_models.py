"""Shapes of models small enough for every test."""

from evolver_async.model.tiny import make_tokenizer

TOKENIZER = make_tokenizer(128)


SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "intermediate_size": 48, "max_length": 128}


SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
