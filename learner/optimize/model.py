"""Models of a learner: policy with its optimizer, KL reference, critic, reward model, teacher."""

from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evolver_async.checkpoint import shards
from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.shape import shape_of
from evolver_async.model import layers, lora, policy, precision, row_checks
from evolver_async.model.grammar import Grammars
from evolver_async.model.tokenizer import ModelError
from evolver_async.weights import probe
from evolver_async.weights.channel.weight_source import WeightSource, WholeTensors
from learner.data.packing import Layout, RowCost
from learner.optimize import reward_model
from learner.optimize.adamw import make_adamw
from learner.optimize.critic import Critic
from learner.optimize.reward_model import RewardModel
from learner.optimize.teacher import Teacher
from learner.optimize.tensors import load_optimizer, load_weights, save_tensors
from learner.ranks.gathered import GatheredWeights
from learner.ranks.mesh import Ranks, within


def load(config: Config, device: str, *, sharded: bool = False) -> PreTrainedModel:
    """Load the model of `policy.path`, with fresh adapters if `policy.lora` asks for them.

    ModelError for a broken directory, for a model that supports neither packed rows nor recomputed
    layers although they are configured, or for adapters that do not fit it.
    """
    return fit(config, _plain(config, device, sharded))


def _plain(config: Config, device: str, sharded: bool) -> PreTrainedModel:
    dtype = config.policy.decided_dtype
    return precision.load_policy(config.policy.path, dtype=dtype, device=device, sharded=sharded)


def fit(config: Config, model: PreTrainedModel) -> PreTrainedModel:
    """Make of a model that was read what `load` returns, in place. ModelError as there."""
    settings = config.policy
    layout_of(config, model)
    if config.learner.compile:
        layers.compile_layers(model)
    if config.learner.gradient_checkpointing:
        layers.checkpoint_layers(model, offload=config.learner.offload_activations)
    if settings.lora.rank:
        lora.inject(
            model,
            rank=settings.lora.rank,
            alpha=settings.lora.alpha,
            targets=settings.lora.targets,
            seed=config.run.seed,
        )
    return model


def layout_of(config: Config, model: PreTrainedModel) -> Layout:
    """Return the layout of rows; ModelError if `learner` asks for one that the model cannot have.

    The model may be elsewhere than on the device of the passes. `learner.prefix_trees` is `auto` by
    default: trees act on a CPU if the model permits them. On a GPU, where nothing was measured,
    they must be asked for.
    """
    trees = config.learner.prefix_trees
    if not config.learner.packing:
        if trees == "always":
            raise ModelError("learner.prefix_trees: must not be always without learner.packing")
        return "padded"
    row_checks.check_packing(model)
    row_checks.check_context(model, config.learner.context_parallel)
    gpu = precision.on_gpu(config.learner.device)
    if trees == "never" or (trees == "auto" and gpu):
        return "packed"
    try:
        row_checks.check_prefix_trees(model, gpu=gpu)
    except ModelError:
        if trees == "always":
            raise
        return "packed"
    return "tree"


class Models:
    """Policy and optimizer; if a stage asks for them, a frozen reference, a critic, a reward model,
    a teacher."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        if (shape := shape_of(config)) is not None:
            ranks.cost = RowCost.of(shape)
        model = load(config, self._loading, sharded=self._is_sharded)
        if config.learner.compile:
            layers.check_compiler(ranks.device)
        self.layout: Layout = layout_of(config, model)
        if self.layout == "tree" and ranks.device.type == "cuda":
            row_checks.check_tree_attention(model, ranks.device)
        self.model = self._sharded(model, master=True)
        self.optimizer = make_adamw(
            self.model.parameters(),
            betas=self._betas,
            eps=config.learner.eps,
            weight_decay=config.learner.weight_decay,
        )
        self.reference: torch.nn.Module | None = None
        self.critic: Critic | None = None
        self.reward_model: RewardModel | None = None
        self.teacher: Teacher | None = None
        self._probe_text: list[int] | None = None  # written when weights are first published
        # measured, by the model that trains, without and with a critic
        self.token_budgets: dict[tuple[str, bool], int] = {}

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of grammars for the policy's tokenizer."""
        assert isinstance(self.model, PreTrainedModel)
        return Grammars(self.tokenizer, self.model.config.vocab_size)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return policy.load_tokenizer(self.config.policy.path)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def begin_stage(self, stage: Config, index: int) -> None:
        """Carry out the beginning of a stage, once: reset the optimizers, make the reward model,
        renew the reference or free the memory of what no stage will need."""
        begun = self.config.stages[index]
        if begun.reset_optimizer:
            self.optimizer.state.clear()
            if self.critic is not None:
                self.critic.optimizer.state.clear()
            if self.reward_model is not None:
                self.reward_model.optimizer.state.clear()
        if begun.kind == "reward_model" and self.reward_model is None:
            self.reward_model = self._make_reward_model()
            self.token_budgets.clear()  # there is less memory from here on
        if all(later.kind != "reward_model" for later in self.config.stages[index:]):
            self.reward_model = None
        if self.reference is not None and not self._keeps_reference(index):
            self.reference = None
            self.token_budgets.clear()  # there is more memory from here on
        self.ensure_reference(stage, index)

    def ensure_reference(self, stage: Config, index: int) -> None:
        """Copy the present policy to the KL reference if a stage needs one and there is none.

        This happens after a resume, too, which may have switched the KL on.
        """
        if self.reference is None and self._needs_reference(stage, index):
            self.reference = self._load_reference()
            policy.load_state(self.reference, policy.state_tensors(self.model))
            self.token_budgets.clear()  # there is less memory from here on

    def ensure_teacher(self, stage: Config) -> None:
        """Load the teacher that a stage names, or free the memory of one that it does not."""
        path = stage.teacher.path
        if path == (self.teacher.path if self.teacher is not None else ""):
            return
        self.teacher = None
        if path:
            self.teacher = Teacher(self.config, path, self.ranks, self.layout)
        self.token_budgets.clear()

    def ensure_critic(self) -> Critic:
        """Return the critic; the first call makes it from the policy as it is then."""
        if self.critic is None:
            self.critic = self._make_critic()
            self.token_budgets.clear()  # there is less memory from here on
        return self.critic

    def published(self) -> WeightSource:
        """Return the weights to publish, as they are stored; on several ranks all must iterate it.

        Adapters are float32, as they are trained. A probe goes with them, by which actors see that
        they arrived.
        """
        settings = self.config.policy
        if self.ranks.mesh is None:
            source: WeightSource = WholeTensors(policy.state_tensors(self.model))
        else:
            dtype = "float32" if settings.lora.rank else settings.decided_dtype
            source = GatheredWeights(self.model, self.ranks, dtype)
        seed, packed = self.config.run.seed, self.config.learner.packing
        with torch.no_grad():
            if self._probe_text is None:
                self._probe_text = probe.write(
                    *(self.model, seed, settings.max_length),
                    packed=packed,
                    within=partial(within, self.model),
                )
            measure = partial(probe.measure, self.model, self._probe_text, packed=packed)
            return probe.ProbedWeights(source, within(self.model, measure))

    def save_tensors(self, directory: Path) -> None:
        """Write this rank's part of all tensors, if it is of the first copy."""
        if self.ranks.rank >= self.ranks.shards:
            return
        modules, optimizers = {"model": self.model}, {"optimizer": (self.model, self.optimizer)}
        if self.reference is not None:
            modules["reference"] = self.reference
        if self.critic is not None:
            modules["critic"] = self.critic.module
            optimizers["critic_optimizer"] = self.critic.module, self.critic.optimizer
        if (trained := self.reward_model) is not None:
            modules["reward_model"] = trained.module
            optimizers["reward_optimizer"] = trained.module, trained.optimizer
        save_tensors(directory, modules, optimizers, rank=self.ranks.rank, ranks=self.ranks.shards)

    def restore_tensors(self, directory: Path) -> None:
        """Replace all tensors by those of a checkpoint.

        CheckpointError if they belong to another model than that of `policy.path`.
        """
        try:
            self._restore(directory)
        except ModelError as error:
            model = f"policy.path: {self.config.policy.path} is another model"
            raise CheckpointError(f"{model} than that of {directory}: {error}") from error

    def _restore(self, directory: Path) -> None:
        self.optimizer.state.clear()
        self.reference = self.critic = self.reward_model = None
        load_weights(self.model, directory, "model")
        if shards.exists(directory, "reference"):
            self.reference = self._load_reference()
            load_weights(self.reference, directory, "reference")
        if shards.exists(directory, "critic"):
            self.critic = self._make_critic()
            load_weights(self.critic.module, directory, "critic")
            load_optimizer(self.critic.module, self.critic.optimizer, directory, "critic_optimizer")
        if shards.exists(directory, "reward_model"):
            self.reward_model = made = self._make_reward_model()
            load_weights(made.module, directory, "reward_model")
            load_optimizer(made.module, made.optimizer, directory, "reward_optimizer")
        load_optimizer(self.model, self.optimizer, directory, "optimizer")

    def _needs_reference(self, stage: Config, index: int) -> bool:
        kind = self.config.stages[index].kind
        return kind in ("dpo", "kto") or (kind == "rl" and stage.reads_reference)

    def _keeps_reference(self, index: int) -> bool:
        """Return True if the next stage that needs a reference, from this one on, renews none.

        `safety.rollback` of an rl stage can switch on a KL, too.
        """
        for later, begun in enumerate(self.config.stages[index:], index):
            rollbacks = (0, 1) if begun.kind == "rl" else (0,)
            ways = (stage_config(self.config, later, count) for count in rollbacks)
            if any(self._needs_reference(way, later) for way in ways):
                return not (begun.refresh_reference or begun.kind in ("dpo", "kto"))
        return False

    def _load_reference(self) -> torch.nn.Module:
        if self.config.policy.lora.rank:
            if self.ranks.mesh is None:
                return lora.twin(self.model)
            return self._sharded(load(self.config, self._loading, sharded=True), master=True)
        reference = _plain(self.config, self._loading, self._is_sharded)
        if self.config.learner.compile:  # rounds like the policy, so that their KL begins at 0
            layers.compile_layers(reference)
        return self._sharded(reference.requires_grad_(False), master=False)

    def _make_critic(self) -> Critic:
        trunk = self._copy_decoder() if self.config.critic.kind == "separate" else None
        return Critic(self.model, trunk, self.ranks, betas=self._betas, eps=self.config.learner.eps)

    def _copy_decoder(self) -> torch.nn.Module:
        """Copy the policy's decoder, as it is now, with trained weights."""
        decoder, _ = policy.split_model(self.model)
        if self.ranks.mesh is None:
            return lora.twin(decoder)
        copy, _ = policy.split_model(load(self.config, self._loading, sharded=True))
        dtype = self.config.policy.decided_dtype
        copy = self.ranks.shard(copy, master=True, dtype=dtype, drops=True)
        policy.load_state(copy, policy.state_tensors(decoder))
        return copy

    def _make_reward_model(self) -> RewardModel:
        """Make one of the policy as it is now, or of the directory that the configuration names."""
        config, learner = self.config, self.config.learner
        model = reward_model.load(config, self._loading, sharded=self._is_sharded)
        assert isinstance(self.model, PreTrainedModel)
        alike = model.config.model_type == self.model.config.model_type
        module = self._sharded(model, master=True)
        if not config.reward_model.path:
            decoder, _ = policy.split_model(self.model)
            policy.load_state(model.base_model, policy.state_tensors(decoder))
        return RewardModel(
            module,
            self.layout if alike else "padded",
            betas=self._betas,
            eps=learner.eps,
            weight_decay=learner.weight_decay,
        )

    @property
    def _betas(self) -> tuple[float, float]:
        return self.config.learner.betas[0], self.config.learner.betas[1]

    @property
    def _is_sharded(self) -> bool:
        return self.ranks.mesh is not None

    @property
    def _loading(self) -> str:
        """Device to load a model on: a model to be sharded goes through host memory."""
        return str(self.ranks.device) if self.ranks.mesh is None else "cpu"

    def _sharded(self, model: torch.nn.Module, *, master: bool) -> torch.nn.Module:
        return self.ranks.shard(model, master=master, dtype=self.config.policy.decided_dtype)
