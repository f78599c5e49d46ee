"""Check that the engine can run the model of a run and samples what the learner trains."""

import asyncio

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from actors.engines.decoding.kv_slots import check_attention
from actors.engines.engine import Request
from actors.engines.torch_engine import TorchEngine
from evolver_async.config import Config, ConfigError
from evolver_async.model.policy import token_logprobs
from evolver_async.schema import WeightId

PROMPTS = (5, 3)  # tokens, of two sessions in one forward
SAMPLED = 3  # tokens of each
LARGEST = {"float32": 1e-2, "bfloat16": 3.0}  # difference of log-probs; routers of experts can flip


def check(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError, naming `engine.kind`, unless the engine runs the model as it is.

    The torch engine needs attention to the whole context over keys and values of one shape, with a
    mask that is added. vLLM tries its model itself; where the directory has more than the text that
    is trained, it would refuse every update.
    """
    if config.engine.kind != "torch":
        whole = AutoConfig.from_pretrained(config.policy.path, local_files_only=True)
        if whole.get_text_config() is not whole:
            name = f"{whole.model_type} of policy.path with more than its text"
            raise ConfigError(f"engine.kind: vllm loads {name}, and other names of weights")
        return
    refused = f"engine.kind: torch cannot run {type(model).__name__} of policy.path: "
    try:
        check_attention(model.config, config.policy.max_length)
    except ValueError as error:
        raise ConfigError(f"{refused}{error}") from error
    try:
        difference = asyncio.run(_difference(model, tokenizer))
    except Exception as error:  # of any kind, by code of transformers that was not made for it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(refused + reason) from error
    if not difference <= LARGEST[config.policy.decided_dtype]:
        other = f"its log-probs differ by {difference:.2g} from those that are trained"
        raise ConfigError(refused + other)


async def _difference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the largest difference between the engine's log-probs and the model's own."""
    engine = TorchEngine(
        model,
        tokenizer,
        weights=WeightId(lineage=0, step=0),
        slots=len(PROMPTS),
        max_length=max(PROMPTS) + SAMPLED,
        prefill_tokens=sum(PROMPTS),
        in_flight="keep",
    )
    requests = [
        Request(
            tokens=[token % model.config.vocab_size for token in range(length)],
            max_tokens=SAMPLED,
            temperature=1.0,
            session=str(length),
            seed=length,
        )
        for length in PROMPTS
    ]
    try:
        outs = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    differences = list[float]()
    for request, out in zip(requests, outs, strict=True):
        tokens_1T = torch.tensor([request.tokens + out.tokens])
        with torch.no_grad():
            own_1T, _ = token_logprobs(model, tokens_1T, torch.ones_like(tokens_1T))
        sampled = own_1T[0, len(request.tokens) :] - torch.tensor(out.logprobs)
        differences.append(float(sampled.abs().max()))
    return max(differences)
