"""Short trainings that a learner of one rank and one of several must do alike."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from critic_groups import data as crossed_groups
from critic_groups import ppo
from preference_groups import data as pairs
from published import whole_tensors
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from updates import FORKS, config, guided_config, guided_groups

from evolver_async.config import Config, CorrectionConfig, LoraConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.schema import Group, Role
from evolver_async.weights.probe import separate
from learner.loss.correction import ActionTokens, Corrected, decoupled
from learner.optimize import token_budget
from learner.ranks.meeting import AddressMeeting, FileMeeting, Meeting
from learner.ranks.mesh import Ranks, join
from learner.run.rank_server import Leader, follow
from learner.state import LearnerState
from learner.step import Updater

STEPS = 6
SAVED = 3  # steps before the checkpoint
DEADLINE_S = 240.0
LONGEST = max(
    int((sequence.roles != Role.EXPERIENCE).sum())
    for group in guided_groups(9, policy_kind="scripted")
    for trajectory in group.trajectories
    for sequence in trajectory.sequences
)


@dataclass
class Trained:
    """What a training left behind: metrics by step, the weights published at its end."""

    rows: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    filtered: list[dict[str, list[int]]] = field(default_factory=list)
    passes: int = 0  # of the reference that FSDP2 still remembers
    longest: int = 0  # most tokens of a training pass through the policy's layers, on this rank


def make_policies(directory: Path) -> None:
    """One with a projection of its own, `plain`, and one whose embedding is its projection."""
    for name in ("plain", "tied"):
        policy.make_tiny(
            directory / name,
            seed=0,
            hidden_size=16,
            layers=2,
            heads=2,
            intermediate_size=32,
            max_length=64,
        )
    for name, words in (("taller", []), ("worded", ["phoen", "fro"])):
        sizes = {"hidden_size": 24, "layers": 3, "heads": 2, "intermediate_size": 32}
        policy.make_tiny(directory / name, seed=1, max_length=64, words=words, **sizes)
    make_moe(directory / "moe", like=directory / "plain")
    tied = directory / "tied"
    about = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True}))
    (file,) = tied.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def make_moe(directory: Path, *, like: Path) -> None:
    """A mixture of four experts, two of which compute each token, with the tokenizer of `like`."""
    vocabulary = json.loads((like / "config.json").read_text())["vocab_size"]
    shape = Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        vocab_size=vocabulary,
    )
    torch.manual_seed(2)
    policy.export(AutoModelForCausalLM.from_config(shape), directory, like)


def settings_of(name: str, directory: Path, together: int = 1) -> tuple[Config, str, list[Group]]:
    """A training's configuration, the updater's method, and what it takes each time."""
    plain = directory / "plain"
    if name == "moe":
        return guided_config(directory / "moe", "strip", kind="decoupled"), "rl", guided_groups(5)
    if name in ("rl", "bounded", "bf16", "poisoned", "unfit", "slow"):
        settings = guided_config(plain, "strip", kind="decoupled")
        settings.loss.kl_coef = 0.1
        settings.policy.dtype = "bfloat16" if name == "bf16" else "float32"
        settings.learner.max_bad_steps = 99
        if name == "unfit":
            settings.correction.kind = f"{__name__}:own_correction"
        if name == "bounded":  # some updates move further, others do not
            settings.learner.minibatches, settings.loss.target_kl = 4, 0.016
        return settings, "rl", guided_groups(5)
    if name == "distill":
        settings = guided_config(plain, "distill", kind="decoupled")
        settings.learner.packing = True
        settings.learner.token_budget, settings.learner.logprob_chunk = 64, 3
        return settings, "rl", guided_groups(5)
    if name in ("teacher", "teacher_text"):
        settings = guided_config(plain, "strip", kind="decoupled")
        settings.teacher.path = str(directory / ("taller" if name == "teacher" else "worded"))
        settings.teacher.divergence = "jsd" if name == "teacher" else "reverse"
        settings.learner.token_budget, settings.learner.logprob_chunk = 64, 3
        settings.learner.lr = 1e-3  # a larger rate makes more of rounding
        return settings, "rl", guided_groups(5)
    if name == "vcpo":
        settings = guided_config(plain, "strip", kind="vcpo")
        settings.loss.boost = 0.0
        return settings, "rl", guided_groups(5)
    if name in ("sft", "long"):
        settings = config(directory / "tied", [StageConfig(kind="sft", steps=STEPS)])
        settings.learner.packing = settings.learner.gradient_checkpointing = True
        settings.learner.prefix_trees = "never"  # as on GPUs, where packed rows are dealt by cost
        settings.learner.token_budget = 64
        settings.learner.logprob_chunk = 3
        if name == "long":  # a trajectory a pass, of which each rank holds its share
            settings.policy.max_length, settings.rollout.max_tokens = LONGEST, 1
            settings.learner.token_budget = -(-LONGEST // together)
            settings.learner.ranks = settings.learner.context_parallel = together
        return settings, "sft", guided_groups(9, policy_kind="scripted")
    if name == "dpo":
        settings = config(plain, [StageConfig(kind="dpo", steps=STEPS)], 2)
        return settings, "dpo", pairs()
    if name in ("kto", "reward_model"):
        settings = config(plain, [StageConfig(kind=name, steps=STEPS)], 2)
        settings.learner.token_budget = 64
        if name == "reward_model":
            settings.reward_model.centre_coef = 0.1
            settings.learner.epochs = 2
        groups = pairs()
        for one in (one for group in groups for one in group.trajectories):
            one.success = one.reward > 0.9
        return settings, name, groups
    assert name in ("ppo", "apart", "apart_lora", "apart_bf16", "measured"), name
    settings = ppo(plain, "shared" if name == "ppo" else "separate", warmup=2)
    settings.policy.max_length = 64
    if name == "measured":
        settings.learner.token_budget = 0
    if name == "apart_lora":
        settings.policy.lora = LoraConfig(rank=2, alpha=4.0)
        settings.learner.gradient_checkpointing = settings.learner.packing = True
        settings.loss.kl_coef = 0.1
    if name == "apart_bf16":
        settings.policy.dtype = "bfloat16"
    return settings, "rl", crossed_groups()


def train(
    name: str,
    directory: Path,
    out: Path,
    ranks: Ranks | None = None,
    resume: Path | None = None,
    device: str = "cpu",
) -> Trained:
    """Take `STEPS` steps, or what is left of them after the checkpoint `resume`; saves one.

    With `ranks` the result is of rank 0 alone.
    """
    settings, kind, data = settings_of(name, directory, 1 if ranks is None else ranks.together)
    settings.learner.device = device if settings.learner.token_budget else "auto"
    out.mkdir(parents=True)
    updater = Updater(settings, out, Timers(), ranks)
    stage = stage_config(settings, 0)
    if ranks is not None and ranks.rank > 0:
        if name == "poisoned":
            poison(updater)
        if name == "slow":
            slow_down(updater)
        if name == "unfit":
            spoilt.append("weight_N")
        follow(updater, lambda *_: stage, ranks)
        return Trained()
    leader = updater if ranks is None else Leader(updater, ranks)
    state = LearnerState(lineage=1) if resume is None else leader.restore(resume)
    leader.enter(stage, state)
    done = Trained()
    (first, *_) = (
        one for one in updater.model.modules() if isinstance(one, GradientCheckpointingLayer)
    )

    def seen(_: torch.nn.Module, hidden: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            done.longest = max(done.longest, hidden[0].shape[1])

    first.register_forward_pre_hook(seen)
    while state.take < STEPS:
        outcome = leader.step(kind, stage, data, state, FORKS, STEPS)
        held_out = {} if kind == "rl" else leader.validate(kind, stage, data, state)
        done.rows.append(outcome.metrics | held_out)
        done.filtered.append(outcome.filtered)
        state.take += 1
        if state.take == SAVED and resume is None:
            (out / "checkpoint").mkdir()
            leader.save(out / "checkpoint", state)
    done.weights, arrival = separate(whole_tensors(leader.published()))
    if name == "reward_model":
        leader.export_reward_model(out / "reward_model")
        if ranks is None or ranks.rank == 0:
            exported = load_file(out / "reward_model" / "model.safetensors")
            done.weights |= {f"reward/{key}": tensor for key, tensor in exported.items()}
    assert arrival is not None and len(arrival.logprobs) > 0
    if isinstance(leader, Leader):
        if isinstance(updater.reference, FSDPModule):
            done.passes = len(updater.reference._get_fsdp_state()._comm_ctx.post_forward_order)
        leader.end()
    return done


def slow_down(updater: Updater) -> None:
    """From here on every layer of this rank takes longer."""
    for layer in updater.model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.02))


def poison(updater: Updater) -> None:
    """From here on the loss of this rank is not a number."""
    whole = updater.stepper.passes._loss

    def poisoned(*arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, terms = whole(*arguments)
        return value * float("nan"), terms

    updater.stepper.passes._loss = poisoned


spoilt: list[str] = []  # numbers of `own_correction` that are not finite on this rank


def own_correction(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    found = decoupled(tokens, settings)
    return replace(found, **{name: torch.full_like(found.w_N, float("nan")) for name in spoilt})


class Faked:
    """The memory of a GPU that this rank of two has: the second's has less free, and a token takes
    more of it. Neither shares it."""

    def __init__(self, rank: int) -> None:
        self.id, self.gave_back = f"GPU-{rank}", False
        self.by_token, self.room = [(512, 2_000_000), (1024, 1_000_000)][rank]

    def needed(self, pass_: Callable[[int], None], tokens: int) -> int:
        pass_(tokens)
        return self.by_token * tokens

    def give_back(self) -> None:
        self.gave_back = True

    def free(self) -> int:
        assert self.gave_back
        return self.room


def be_rank(
    rank: int,
    count: int,
    directory: Path,
    plan: list[tuple[str, str | None]],
    device: str = "cpu",
    addresses: Sequence[str] = (),
    copies: int = 1,
    together: int = 1,
) -> None:
    """One of `count` spawned ranks: the trainings of `plan`, one after another.

    Each is a name and the checkpoint that it goes on from; rank 0 writes down what comes out.
    `addresses`: where the ranks meet for each, instead of at a file.
    """
    torch.set_num_threads(1)
    if device == "cpu":
        token_budget.Gpu = lambda _: Faked(rank)
    for number, (name, resume) in enumerate(plan):
        place: Meeting = FileMeeting(directory / f"meeting-{number}")
        if addresses:
            place = AddressMeeting(addresses[number])
        ranks = join(
            place,
            rank,
            count,
            device=device,
            deadline_s=DEADLINE_S,
            copies=copies,
            together=together,
        )
        out = directory / f"{name}-{'resumed' if resume else 'whole'}-{rank}"
        done = train(name, directory, out, ranks, Path(resume) if resume else None)
        if rank == 0:
            numbers = {"rows": done.rows, "filtered": done.filtered}
            numbers |= {"passes": done.passes, "longest": done.longest}
            (out / "done.json").write_text(json.dumps(numbers))
            save_file(done.weights, out / "weights.safetensors")
        ranks.leave()


def read(out: Path) -> Trained:
    """What rank 0 wrote down."""
    numbers = json.loads((out / "done.json").read_text())
    return Trained(weights=load_file(out / "weights.safetensors"), **numbers)
