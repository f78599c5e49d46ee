"""Further arguments of vLLM's engine, `engine.options`: which of them a recipe may give.

Nothing here imports vLLM: the names are read from its source, so that a start is refused at once.
vLLM itself checks their values.
"""

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from evolver_async.config import EngineConfig

ARGUMENTS = "EngineArgs"  # vLLM's class, with a field for each argument
OURS = {  # arguments that follow from other keys; "" from none
    "model": "policy.path",
    "tokenizer": "policy.path",
    "dtype": "policy.dtype",
    "max_model_len": "policy.max_length",
    "enable_lora": "policy.lora.rank",
    "max_lora_rank": "policy.lora.rank",
    "lora_target_modules": "policy.lora.targets",
    "max_loras": "policy.lora.rank",
    "max_cpu_loras": "policy.lora.rank",
    "max_num_seqs": "engine.slots",
    "max_num_batched_tokens": "engine.prefill_tokens",
    "tensor_parallel_size": "engine.tensor_parallel",
    "gpu_memory_utilization": "engine.memory",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "num_gpu_blocks_override": "engine.kv_cache_bytes",
    "enforce_eager": "engine.eager",
    **dict.fromkeys(
        (
            *("block_size", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode"),
            *("stream_interval", "weight_transfer_config", "worker_extension_cls"),
            *("disable_log_stats", "generation_config", "override_generation_config"),
            *("structured_outputs_config", "reasoning_parser"),
        ),
        "",
    ),
}
ANOTHER_MODEL = "the learner trains the model as policy.path has it"
ONE_ENGINE = "an actor has one engine, whose workers adopt weights together"
REFUSED = {
    **dict.fromkeys(
        (
            *("load_format", "model_loader_extra_config", "model_weights", "hf_config_path"),
            *("config_format", "hf_overrides", "model_class_overrides", "revision", "runner"),
            *("convert", "disable_sliding_window", "skip_tokenizer_init", "lora_dtype"),
        ),
        ANOTHER_MODEL,
    ),
    **dict.fromkeys(
        (
            *("pipeline_parallel_size", "data_parallel_size", "data_parallel_rank", "nnodes"),
            *("data_parallel_size_local", "data_parallel_backend", "distributed_executor_backend"),
            *("worker_cls", "scheduler_cls", "enable_elastic_ep", "enable_sleep_mode"),
        ),
        ONE_ENGINE,
    ),
}
OTHER_NUMBERS = "its log-probs are not those of the learner's model"
INEXACT = {  # accepted with engine.inexact
    **dict.fromkeys(
        (
            *("quantization", "quantization_config", "kv_cache_dtype", "kv_sharing_fast_prefill"),
            *("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        ),
        OTHER_NUMBERS,
    ),
    "logits_processors": "tokens come from another distribution than the learner's",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "tokens no longer follow from their seed",
    ),
}


def problems(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield key and problem of each option that vLLM does not have, or that cannot be given."""
    known = known_options()
    for name in engine.options:
        key = f"engine.options.{name}"
        if name in OURS:
            yield key, f"cannot be given: {OURS[name] or 'evolver_async'} sets it"
        elif name in REFUSED:
            yield key, f"cannot be given: {REFUSED[name]}"
        elif name in INEXACT and not engine.inexact:
            yield key, f"{INEXACT[name]}: engine.inexact=true accepts that"
        elif known and name not in known:
            near = get_close_matches(name, known, 1)
            yield key, f"vllm has no such argument{f'; did you mean {near[0]}?' if near else ''}"


@cache
def known_options() -> frozenset[str]:
    """Return the names of the arguments of the installed vLLM; none if they cannot be read."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    try:
        tree = ast.parse(
            Path(found.origin).with_name("engine").joinpath("arg_utils.py").read_text()
        )
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(
        field.target.id
        for one in tree.body
        if isinstance(one, ast.ClassDef) and one.name.endswith(ARGUMENTS)
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
