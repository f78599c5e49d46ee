"""Export of a run's checkpoint as a Hugging Face directory.

The actors' part, which knows the turn format, writes the chat template, generation settings and
README.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from evolver_async.checkpoint import history, shards
from evolver_async.config.load import stage_config
from evolver_async.launch import run_directory
from evolver_async.launch.registry import resolve
from evolver_async.launch.run_directory import config_of
from evolver_async.model import lora, policy
from evolver_async.model.precision import stored_dtype
from evolver_async.weights.lora_receiver import whole
from learner.optimize import reward_model


def export(run_dir: Path, out: Path, step: int | str | None = None, examples: bool = False) -> str:
    """Write config, weights, tokenizer and instructions to `out`; return a line about it.

    `examples`: the instructions may show a row of the files that the run trained on.

    Adapters are merged into the weights and also written to `out`/adapter in the format of the
    `peft` library.
    """
    _refuse_full(out)
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
    resolve("manual")(stage_config(config, len(config.stages) - 1), out, examples)
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


def export_reward_model(run_dir: Path, out: Path, step: int | str | None = None) -> str:
    """Write a reward model to `out`, for `AutoModelForSequenceClassification`; return a line.

    It is the one that the newest stage of kind reward_model left, or that of a checkpoint. Raises
    ValueError if there is none.
    """
    _refuse_full(out)
    config = config_of(run_dir)
    done = [run_directory.reward_model_of(run_dir, n) for n in range(len(config.stages))]
    done = [directory for directory in done if directory.exists()]
    if step is None and done:
        shutil.copytree(done[-1], out, dirs_exist_ok=True)
        return f"wrote {out}: the reward model of {done[-1]}"
    name = config.run.name or run_dir.name
    chosen, manifest = history.choose(run_dir / "checkpoints", name, step)
    if not shards.exists(chosen, "reward_model"):
        raise ValueError(f"{chosen}: holds no reward model; those of stages: {run_dir}")
    tensors = shards.read(chosen, "reward_model")
    _refuse_non_finite(chosen, tensors)
    reward_model.write(config, tensors, out)
    return f"wrote {out}: the reward model after step {manifest.step} of {run_dir}"


def _refuse_full(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: directory is not empty; choose another one")


def _refuse_non_finite(checkpoint: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, naming the tensor, for weights of which nothing could sample."""
    for name, tensor in sorted(state.items()):
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise ValueError(
                f"{checkpoint}: {name} has {bad:,} values of {tensor.numel():,} that are no finite"
                " numbers; --step N exports another checkpoint"
            )
