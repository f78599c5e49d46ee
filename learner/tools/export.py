"""Export of a run's checkpoint as a Hugging Face directory.

The actors' part, which knows the turn format, writes the chat template, generation settings and
README.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from evolver_async.checkpoint import history, shards
from evolver_async.config.load import stage_config
from evolver_async.launch.registry import resolve
from evolver_async.launch.run_directory import config_of
from evolver_async.model import lora, policy
from evolver_async.model.precision import stored_dtype
from evolver_async.weights.lora_receiver import whole


def export(run_dir: Path, out: Path, step: int | str | None = None) -> str:
    """Write config, weights, tokenizer and instructions to `out`; return a line about it.

    Adapters are merged into the weights and also written to `out`/adapter in the format of the
    `peft` library.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: directory is not empty; choose another one")
    config = config_of(run_dir)
    settings = config.policy
    chosen, manifest = history.choose(
        run_dir / "checkpoints", config.run.name or run_dir.name, step
    )
    dtype = stored_dtype(settings.decided_dtype, config.learner.device)
    model = policy.load_model(settings.path, dtype=dtype, device="cpu")
    tensors = shards.read(chosen, "model")
    state = whole(tensors, settings, dtype)
    _refuse_non_finite(chosen, state)
    policy.load_state(model, state)
    policy.export(model, out, settings.path)
    resolve("manual")(stage_config(config, len(config.stages) - 1), out)
    line = f"wrote {out}: the policy after step {manifest.step} of {run_dir}"
    if not settings.lora.rank:
        return line
    lora.save_peft(
        out / "adapter",
        tensors,
        name=run_dir.name,
        rank=settings.lora.rank,
        alpha=settings.lora.alpha,
        base=settings.path,
    )
    return f"{line}; its adapters alone, named {run_dir.name}, are in {out / 'adapter'}"


def _refuse_non_finite(checkpoint: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, naming the tensor, for weights of which nothing could sample."""
    for name, tensor in sorted(state.items()):
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise ValueError(
                f"{checkpoint}: {name} has {bad:,} values of {tensor.numel():,} that are no finite"
                " numbers; --step N exports another checkpoint"
            )
