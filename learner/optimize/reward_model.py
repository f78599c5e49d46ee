"""Reward model of a run: a number for each conversation, which pairs of them have trained.

It is a sequence classifier of transformers with one label: a decoder and a linear head, whose
output behind the last token is the reward. Passes and updates are in `reward_passes` and `updates`.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from evolver_async.config import Config
from evolver_async.model import layers, policy, row_checks
from evolver_async.model.policy import ModelError
from evolver_async.model.precision import stored_dtype
from evolver_async.model.rows.borders import Borders
from evolver_async.model.tokenizer import same_tokenizer
from learner.data.packing import Layout
from learner.optimize.adamw import make_adamw
from learner.ranks.mesh import whole_tensor

HEAD = "score.weight"


class RewardModel:
    """Sequence classifier, which `ranks` may have sharded, and the optimizer that moves it.

    layout: that of rows which its decoder can take.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layout: Layout,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.module = module
        self.layout: Layout = layout
        self.optimizer = make_adamw(
            module.parameters(), betas=betas, eps=eps, weight_decay=weight_decay
        )

    def __call__(
        self,
        tokens_BT: torch.Tensor,
        borders: Borders | None,
        read_K: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the scores behind all tokens, float32[B, T], or behind those read, float32[K]."""
        assert isinstance(self.module, PreTrainedModel)
        decoder = self.module.base_model
        hidden = policy.decode(decoder, tokens_BT, borders, read_K)
        weight_1D = self.module.get_submodule("score").weight
        assert isinstance(weight_1D, torch.Tensor)
        return (hidden.float() @ weight_1D.float().T).squeeze(-1)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return its weights by stable name, gathered from all ranks, which call this together."""
        tensors = policy.state_tensors(self.module)
        return {name: whole_tensor(tensor).cpu() for name, tensor in tensors.items()}


def source_of(config: Config) -> str:
    """Return the directory with the shape, and the first weights, of the run's reward model."""
    return config.reward_model.path or config.policy.path


def check(config: Config) -> None:
    """Raise ModelError, naming the key, if no reward model can be made of the directory."""
    source = source_of(config)
    key = "reward_model.path" if config.reward_model.path else "policy.path"
    try:
        shape = AutoConfig.from_pretrained(source, local_files_only=True, num_labels=1)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(shape)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{key}: {source} makes no reward model: {error}") from error
    if HEAD not in model.state_dict() or model.base_model is model:
        raise ModelError(f"{key}: {type(model).__name__} has no decoder with a linear head `score`")
    row_checks.check_context(model, config.learner.context_parallel)
    family = AutoConfig.from_pretrained(config.policy.path, local_files_only=True).model_type
    if config.learner.context_parallel > 1 and shape.model_type != family:
        why = f"the reward model is of another family, {shape.model_type}, and its rows are padded"
        raise ModelError(f"learner.context_parallel: must be 1, as {why}")
    if not same_tokenizer(source, config.policy.path):
        raise ModelError(f"{key}: {source} has another tokenizer than the policy")


def load(config: Config, device: str, *, sharded: bool = False) -> PreTrainedModel:
    """Load the model of `source_of`; a head that it lacks begins with rewards of 0."""
    dtype = config.policy.decided_dtype
    report = logging.getLogger("transformers.modeling_utils")  # of a head that is missing
    report.addFilter(_silence)
    with torch.random.fork_rng(devices=[]):  # a head is drawn before it is cleared
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source_of(config),
            num_labels=1,
            dtype=getattr(torch, dtype if sharded else stored_dtype(dtype, device)),
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    report.removeFilter(_silence)
    if HEAD in found["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
    torch.nn.Module.to(model, device).eval()
    if config.learner.compile:
        layers.compile_layers(model)
    if config.learner.gradient_checkpointing:
        layers.checkpoint_layers(model, offload=config.learner.offload_activations)
    return model


def _silence(record: logging.LogRecord) -> bool:
    return False


def write(config: Config, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write whole weights as a directory for `AutoModelForSequenceClassification`, which is there
    completely or not at all."""
    model = load(config, "cpu")
    policy.load_state(model, tensors)
    if model.config.pad_token_id is None:  # transformers refuses batches without one
        tokenizer = policy.load_tokenizer(config.policy.path)
        known = tokenizer.pad_token_id, tokenizer.eos_token_id
        model.config.pad_token_id = next((one for one in known if one is not None), None)
    part = directory.with_name(f".{directory.name}")
    shutil.rmtree(part, ignore_errors=True)  # of a write that was cut off
    part.mkdir(parents=True)
    policy.export(model, part, config.policy.path)
    shutil.rmtree(directory, ignore_errors=True)  # of the same stage before a resume
    part.rename(directory)
