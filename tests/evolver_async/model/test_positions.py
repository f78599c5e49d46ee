"""The longest context of a model, against what the engines take."""

import pytest
from transformers import LlamaConfig, PretrainedConfig

from evolver_async.model.positions import positions_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
EACH = {
    "full_attention": YARN | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("config", "torch", "vllm"),
    [
        (LlamaConfig(max_position_embeddings=2048), 2048, 2048),
        (LlamaConfig(max_position_embeddings=2048, rope_parameters=YARN), 2048, None),
        (PretrainedConfig(max_position_embeddings=2048, rope_parameters=EACH), 2048, None),
        (PretrainedConfig(), None, None),
    ],
    ids=["plain", "stretched", "stretched in some layers", "without a number"],
)
def test_vllm_alone_takes_more_than_the_positions_of_a_stretched_rotation(
    config: PretrainedConfig, torch: int | None, vllm: int | None
) -> None:
    assert (positions_of(config, "torch"), positions_of(config, "vllm")) == (torch, vllm)
