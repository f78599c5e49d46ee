"""Adapters: what they compute, what is trained and travels, and runs that train nothing else."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from killed_runs import PHASES, Killed, Run, compare
from published import whole_tensors
from safetensors import safe_open
from safetensors.torch import load_file
from serial_runs import Finished, trainer
from small_models import SHAPE, SIZES, TOKENIZER
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM
from updates import FORKS, config, groups, step, updater

from actors.engines.engine import Generation, Request
from actors.engines.torch_engine import TorchEngine
from actors.evaluate import evaluate
from evolver_async.checkpoint import shards
from evolver_async.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    CriticConfig,
    LoraConfig,
    LossConfig,
    PolicyConfig,
    StageConfig,
)
from evolver_async.config.load import dump, load, stage_config
from evolver_async.metrics.writer import Timers
from evolver_async.model import lora, policy
from evolver_async.process.setup import RoleArgs
from evolver_async.schema import Group, WeightId
from evolver_async.weights import ends as channel
from evolver_async.weights.lora_receiver import MergingReceiver, whole
from evolver_async.weights.probe import Probe, add, separate
from evolver_async.weights.shm import ShmPublisher
from learner.ranks.meeting import FileMeeting
from learner.ranks.mesh import Ranks, join
from learner.run.rank_server import Leader, follow
from learner.state import LearnerState
from learner.step import Updater
from learner.tools import prepare
from learner.tools.export import export

RANK, ALPHA = 4, 8.0
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 64, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 8, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2}
advantage: {std: batch}
learner: {groups_per_step: 4, minibatches: 1, lr: 1.0e-2, decay: none}
eval: {every: 0, episodes: 32, final_episodes: 64}
checkpoint: {every: 10}
launch: {kind: serial}
"""
FORMAT = "{kind: sft, steps: 25, expert_fraction: 0.0, override: {rollout: {group_size: 1}, "
FORMAT += "learner: {groups_per_step: 16}}}"


@pytest.fixture(scope="module", params=["tiny", "qwen2_tied", "llama"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = tmp_path_factory.mktemp("tiny")
    policy.make_tiny(tiny, seed=0, **SIZES)
    if request.param == "tiny":
        return tiny
    torch.manual_seed(0)
    configs = {
        "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
        "llama": LlamaConfig(**SHAPE),
    }
    path = tmp_path_factory.mktemp(request.param)
    policy.export(AutoModelForCausalLM.from_config(configs[request.param]), path, tiny)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "policy"
    policy.make_tiny(path, seed=0, **SIZES)
    return path


def plain(directory: Path, dtype: str = "float32") -> PreTrainedModel:
    return policy.load_model(directory, dtype=dtype, device="cpu")


def adapted(directory: Path, seed: int = 0, dtype: str = "float32") -> PreTrainedModel:
    model = plain(directory, dtype)
    lora.inject(model, rank=RANK, alpha=ALPHA, targets=[], seed=seed)
    return model


@torch.no_grad()
def stir(model: torch.nn.Module, size: float = 0.1) -> None:
    """Adapters as after much training."""
    draws = torch.Generator().manual_seed(1)
    for name, tensor in policy.state_tensors(model).items():
        if name != lora.BASE:
            tensor.add_(size * torch.randn(tensor.shape, generator=draws))


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens_BT = torch.randint(len(TOKENIZER), (3, 20), generator=torch.Generator().manual_seed(0))
    module: Any = model
    return module(input_ids=tokens_BT, use_cache=False).logits.float()


def settings_of(directory: Path, **changed: object) -> PolicyConfig:
    return PolicyConfig(
        path=str(directory), max_length=128, lora=LoraConfig(rank=RANK, alpha=ALPHA), **changed
    )  # pyright: ignore[reportArgumentType]


# ---- what they compute


def test_it_begins_as_the_base_and_computes_what_the_merged_weights_do(directory: Path) -> None:
    base, model = plain(directory), adapted(directory)
    assert torch.equal(logits(model), logits(base))
    stir(model)
    moved = logits(model)
    assert (moved - logits(base)).abs().max() > 0.1
    merged = lora.merge(policy.state_tensors(base), policy.state_tensors(model), ALPHA / RANK)
    policy.load_state(base, merged)
    torch.testing.assert_close(logits(base), moved, atol=1e-5, rtol=1e-5)


def test_a_merged_weight_is_the_formula(tiny: Path) -> None:
    base, model = plain(tiny), adapted(tiny)
    stir(model)
    adapters = policy.state_tensors(model)
    merged = lora.merge(policy.state_tensors(base), adapters, ALPHA / RANK)
    name = "model.layers.1.mlp.down_proj"
    down, up = (adapters[f"{name}.{part}"].double().numpy() for part in ("lora_A", "lora_B"))
    whole_OI = base.get_submodule(name).weight.detach().double().numpy()
    for o, i in ((0, 0), (5, 7), (31, 47)):
        expected = whole_OI[o, i] + 2.0 * sum(up[o, r] * down[r, i] for r in range(RANK))
        assert merged[f"{name}.weight"][o, i].item() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(merged["model.norm.weight"], base.get_parameter("model.norm.weight"))


def test_a_base_in_bfloat16_has_adapters_in_float32(tiny: Path) -> None:
    model = adapted(tiny, dtype="bfloat16")
    stir(model)
    kinds = {one.dtype for one in model.parameters() if one.requires_grad}
    assert kinds == {torch.float32} and model.dtype == torch.bfloat16
    base = plain(tiny, "bfloat16")
    merged = lora.merge(policy.state_tensors(base), policy.state_tensors(model), ALPHA / RANK)
    assert {one.dtype for one in merged.values()} == {torch.bfloat16}
    policy.load_state(base, merged)
    exact = adapted(tiny)
    policy.load_state(exact, policy.state_tensors(model))
    for one in (model, base):  # roundings of 2^-9 in a few layers
        assert (logits(one) - logits(exact)).abs().mean() < 0.02


def test_draws_belong_to_the_seed_and_to_the_linear(tiny: Path) -> None:
    one, same, other = (policy.state_tensors(adapted(tiny, seed)) for seed in (0, 0, 1))
    down = [name for name in one if name.endswith("lora_A")]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in down)
    assert len({one[name][0, 0].item() for name in down}) == len(down)
    for name in down:
        bound = one[name].shape[1] ** -0.5
        assert 0.8 * bound < one[name].abs().max() <= bound


# ---- what is trained and travels


def test_gradient_reaches_the_adapters_alone(directory: Path) -> None:
    model = adapted(directory)
    stir(model)
    tokens_BT = torch.arange(12)[None]
    logprobs_BT, _ = policy.token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
    logprobs_BT.sum().backward()
    with_gradient = {
        name for name, one in model.named_parameters() if one.grad is not None and one.grad.any()
    }
    tensors = policy.state_tensors(model)
    assert with_gradient == tensors.keys() - {lora.BASE}
    assert len(with_gradient) == 2 * 2 * len(LINEARS)  # in each of two layers


def test_what_travels_has_the_size_of_the_rank(tiny: Path) -> None:
    model = adapted(tiny)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    sides = 4 * (hidden + hidden) + 3 * (hidden + inner)
    expected = 2 * 4 * RANK * sides + lora.FINGERPRINT_BYTES
    assert sum(one.nbytes for one in policy.state_tensors(model).values()) == expected


def test_targets_are_last_parts_of_names(tiny: Path) -> None:
    model = plain(tiny)
    chosen = lora.inject(
        model, rank=2, alpha=2.0, targets=["self_attn.q_proj", "down_proj"], seed=0
    )
    parts = {name.split("layers.")[1] for name in chosen}
    assert parts == {f"{i}.{one}" for i in (0, 1) for one in ("self_attn.q_proj", "mlp.down_proj")}
    for wrong in ("proj", "lm_head", "embed_tokens"):
        with pytest.raises(policy.ModelError, match=rf"policy\.lora\.targets: .* named {wrong}"):
            lora.inject(plain(tiny), rank=2, alpha=2.0, targets=["q_proj", wrong], seed=0)


def test_a_bad_target_is_refused_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    changes = ["policy.lora.rank=2", "policy.lora.targets=[nobody]", "stages.0.steps=1"]
    dump(load(None, [*changes, f"policy.path={tiny}"]), tmp_path / "config.yaml")
    args = RoleArgs(address="", name="prepare", incarnation=0, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"^policy\.lora\.targets: .*nobody"):
        prepare.main(args)
    load(None, ["policy.lora.rank=2", "learner.ranks=2", "stages.0.steps=1"])  # go together
    for wrong in ("rank=-1", "alpha=0"):
        with pytest.raises(ConfigError, match=rf"policy\.lora\.{wrong.split('=')[0]}"):
            load(None, [f"policy.lora.{wrong}", "stages.0.steps=1"])


def test_adapters_of_other_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    policy.make_tiny(tmp_path / "other", seed=1, **SIZES)
    base = policy.state_tensors(plain(tiny))
    adapters = policy.state_tensors(adapted(tiny))
    with pytest.raises(policy.ModelError, match=r"policy\.path: .* other weights"):
        lora.merge(policy.state_tensors(plain(tmp_path / "other")), adapters, 1.0)
    with pytest.raises(policy.ModelError, match="other weights"):
        lora.merge(base, base, 1.0)
    same = policy.state_tensors(plain(tiny, "bfloat16"))
    assert torch.equal(lora.fingerprint(same), adapters[lora.BASE])
    first = next(name for name in adapters if name.endswith("lora_B"))
    for changed, problem in (
        ({"model.nobody.lora_A": torch.zeros(1, 1)}, "model.nobody"),
        ({first: adapters[first][:, :-1]}, "does not fit"),
        ({first: adapters[first][:-1]}, "does not fit"),
        ({"model.norm.weight": base["model.norm.weight"]}, "unknown"),
    ):
        with pytest.raises(policy.ModelError, match=problem):
            lora.merge(base, adapters | changed, 1.0)


def test_a_twin_shares_what_is_frozen(tiny: Path) -> None:
    model = adapted(tiny)
    twin = lora.twin(model)
    before = logits(model)
    stir(model)
    assert isinstance(twin, PreTrainedModel)
    assert torch.equal(logits(twin), before) and not torch.equal(logits(model), before)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.data_ptr() == other.data_ptr()) == (not name.endswith(("lora_A", "lora_B")))


# ---- the learner's steps


def lora_config(tiny: Path, *stages: StageConfig, **loss: Any) -> Config:
    settings = config(tiny, list(stages) or [StageConfig(kind="rl", steps=3)], **loss)
    settings.policy = settings_of(tiny)
    return settings


def test_the_first_reference_is_the_model_without_adapters(tiny: Path, tmp_path: Path) -> None:
    settings = lora_config(tiny, kl_coef=0.1)
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    made.begin_stage(stage, 0)
    first = made.step("rl", stage, groups(4), LearnerState(lineage=1), FORKS, 3)
    assert first.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    second = made.step("rl", stage, groups(4), LearnerState(lineage=1), FORKS, 3)
    assert second.metrics["loss/kl"] > 1e-6
    assert made.reference is not None
    assert torch.equal(logits(made.reference), logits(plain(tiny)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_steps_of_every_kind_move_the_adapters_alone(
    critic: str, tiny: Path, tmp_path: Path
) -> None:
    settings = lora_config(tiny, StageConfig(kind="rl", steps=3), StageConfig(kind="dpo", steps=3))
    settings.advantage, settings.critic = (
        AdvantageConfig(kind="gae"),
        CriticConfig(kind=critic, lr=1e-2),
    )
    made = updater(settings, tmp_path)
    base = {name: one.clone() for name, one in made.model.named_parameters() if not _trains(one)}
    state = LearnerState(lineage=1)
    found = [step(made, groups(4))]
    found.append(made.step("sft", stage_config(settings, 0), shown(groups(4)), state, {}, 3))
    made.begin_stage(stage_config(settings, 1), 1)
    pairs = [preference(one) for one in groups(4)]
    found.append(made.step("dpo", stage_config(settings, 1), pairs, state, FORKS, 3))
    assert all(one.updates == 1 for one in found)
    trained = {name for name, one in made.model.named_parameters() if _trains(one)}
    assert all(made.optimizer.state[made.model.get_parameter(name)] for name in trained)
    assert len(made.optimizer.state) == len(trained)
    for name, one in made.model.named_parameters():
        assert name in trained or torch.equal(one, base[name])
    assert made.critic is not None
    own = sum(one.numel() for one in made.critic.module.parameters() if _trains(one))
    head = SIZES["hidden_size"] + 1
    assert own == head + (critic == "separate") * sum(
        one.numel() for one in made.model.parameters() if _trains(one)
    )


def _trains(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


def shown(data: list[Group]) -> list[Group]:
    """The same as demonstrations, which no weights have sampled."""
    for group in data:
        for sequence in group.trajectories[0].sequences:
            sequence.versions = []
    return data


def preference(group: Group) -> Group:
    """The group with a second member whose reward is another."""
    (one,) = group.trajectories
    other = msgspec.structs.replace(one, member=1, reward=one.reward + 1)
    return msgspec.structs.replace(group, trajectories=[one, other])


def test_packed_rows_and_recomputed_layers_train_the_same_adapters(
    tiny: Path, tmp_path: Path
) -> None:
    found = []
    for spared in (False, True):
        settings = lora_config(tiny, kl_coef=0.1)
        settings.learner.packing = settings.learner.gradient_checkpointing = spared
        made = updater(settings, tmp_path)
        made.begin_stage(stage_config(settings, 0), 0)
        losses = [step(made, groups(6), take).metrics["loss/policy"] for take in range(3)]
        found.append((losses, policy.state_tensors(made.model)))
    (losses, adapters), (losses_then, adapters_then) = found
    assert losses == pytest.approx(losses_then, abs=1e-5)
    assert any(adapters[name].any() for name in adapters if name.endswith(lora.UP))
    for name, tensor in adapters.items():
        torch.testing.assert_close(adapters_then[name], tensor, atol=1e-3, rtol=1e-3)


def test_an_engine_gives_the_log_probs_of_the_learner_after_every_update(
    tiny: Path, tmp_path: Path
) -> None:
    settings = lora_config(tiny)
    made = updater(settings, tmp_path)
    publisher = ShmPublisher(tmp_path / "w", background=False)
    receiver = channel.receiver(channel.receiver_settings(settings, publisher.address), "cpu")
    assert isinstance(receiver, MergingReceiver)
    base = plain(tiny)
    prompt = list(range(20, 40))

    async def sample(engine: TorchEngine, take: int) -> Generation:
        weights = WeightId(lineage=1, step=take)
        assert receiver.head() == weights and receiver.available()[-1] == weights
        await engine.update(weights, receiver.fetch(weights))
        asked = Request(
            tokens=prompt, max_tokens=24, temperature=1.0, session=f"s{take}", seed=take
        )
        return await engine.generate(asked)

    async def rounds() -> list[float]:
        engine = TorchEngine(
            base,
            policy.load_tokenizer(tiny),
            weights=None,
            slots=2,
            max_length=128,
            prefill_tokens=512,
            in_flight="keep",
        )
        errors = []
        for take in range(4):
            publisher.publish(WeightId(lineage=1, step=take), policy.state_tensors(made.model))
            generation = await sample(engine, take)
            errors.append(error_of(generation))
            step(made, groups(4), take % 3)
            stir(made.model, 0.05)
        await engine.close()
        return errors

    def error_of(generation: Generation) -> float:
        tokens_BT = torch.tensor([[*prompt, *generation.tokens]])
        with torch.no_grad():
            logprobs_BT, _ = policy.token_logprobs(
                made.model, tokens_BT, torch.ones_like(tokens_BT)
            )
        mine = logprobs_BT[0, len(prompt) :].numpy()
        return float(np.abs(mine - np.array(generation.logprobs)).max())

    assert max(asyncio.run(rounds())) <= 1e-4
    published = (tmp_path / "w" / "weights-1.3").stat().st_size
    assert published < 0.7 * sum(one.nbytes for one in policy.state_tensors(plain(tiny)).values())
    receiver.close()
    publisher.close()


def test_a_probe_of_adapters_stays_beside_the_weights_that_they_are_merged_into(
    tiny: Path,
) -> None:
    sent, adapters = Probe([1, 2, 3], [-0.5, -1.5]), policy.state_tensors(adapted(tiny))
    settings = settings_of(tiny)
    merged, found = separate(whole(add(adapters, sent), settings, "float32"))
    assert found == sent and merged.keys() == whole(adapters, settings, "float32").keys()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["none", "shared", "separate"])
def test_a_killed_learner_of_adapters_is_resumed_bitwise(kind: str, tmp_path: Path) -> None:
    runs = []
    for name in ("whole", "killed"):
        path = tmp_path / name
        sections = {
            "policy": PolicyConfig(
                path=str(path / "policy"), max_length=64, lora=LoraConfig(rank=RANK, alpha=ALPHA)
            ),
            "loss": LossConfig(kl_coef=0.1),
        }
        if kind != "none":
            sections |= {
                "advantage": AdvantageConfig(kind="gae"),
                "critic": CriticConfig(kind=kind, lr=1e-2),
            }
        runs.append(Run(path, **sections))
    undisturbed, killed = runs
    try:
        assert undisturbed.train() == 0
        with pytest.raises(Killed):
            killed.train(PHASES["after publish"])
        assert killed.train() == 0
        compare(killed, undisturbed)
        _, tensors = killed.newest()
        parts = {name.split("/")[0] for name in tensors}
        assert "reference" in parts and ("critic" in parts) == (kind != "none")
        ours = ("lora_A", "lora_B", lora.BASE, "rng", "head.weight", "head.bias")
        assert [name for name in tensors if not name.endswith(ours)] == []
    finally:
        for run in runs:
            run.close()


# ---- several ranks


def short_training(
    tiny: Path, out: Path, dtype: str, ranks: Ranks | None = None, resume: Path | None = None
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of steps with a KL, and the adapters published at their end; saves a checkpoint."""
    settings = lora_config(tiny, kl_coef=0.1)
    settings.policy.lora.rank = 3  # of two ranks the second holds less, of the head's rows none
    settings.policy.dtype = dtype
    out.mkdir(parents=True)
    made, stage = Updater(settings, out, Timers(), ranks), stage_config(settings, 0)
    frozen = {one.dtype for one in made.model.parameters() if not one.requires_grad}
    if ranks is not None:  # a single process would keep float32 and round its products
        assert frozen == {getattr(torch, dtype)}, "nothing is gained by a base in float32"
    if ranks is not None and ranks.rank > 0:
        follow(made, lambda *_: stage, ranks)
        return [], {}
    leader = made if ranks is None else Leader(made, ranks)
    state = LearnerState(lineage=1) if resume is None else leader.restore(resume)
    leader.enter(stage, state)
    rows = []
    while state.take < 5:
        rows.append(leader.step("rl", stage, groups(6), state, FORKS, 5).metrics)
        state.take += 1
        if state.take == 2 and resume is None:
            (out / "checkpoint").mkdir()
            leader.save(out / "checkpoint", state)
    weights, _ = separate(whole_tensors(leader.published()))
    published = {name: one.clone() for name, one in weights.items()}
    if isinstance(leader, Leader):
        leader.end()
    return rows, published


def be_rank(rank: int, tiny: Path, directory: Path) -> None:
    """One of two spawned ranks; the first writes down what comes out."""
    torch.set_num_threads(1)
    alone = str(directory / "alone" / "checkpoint")
    plan = [("both", "float32", None), ("resumed", "float32", alone), ("short", "bfloat16", None)]
    for name, dtype, resume in plan:
        meeting = directory / f"meeting-{name}"
        ranks = join(FileMeeting(meeting), rank, 2, device="cpu", deadline_s=60.0)
        out = directory / f"{name}-{rank}"
        done = short_training(tiny, out, dtype, ranks, Path(resume) if resume else None)
        if rank == 0:
            torch.save(done, out / "done.pt")
        ranks.leave()


@pytest.mark.process
def test_two_ranks_train_adapters_as_one_does(tiny: Path, tmp_path: Path) -> None:
    rows, published = short_training(tiny, tmp_path / "alone", "float32")
    mp.spawn(be_rank, args=(tiny, tmp_path), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    found = {name: torch.load(tmp_path / f"{name}-0" / "done.pt") for name in ("both", "resumed")}
    assert found["both"][1].keys() == published.keys()
    for name, steps in (("both", rows), ("resumed", rows[2:])):
        assert len(found[name][0]) == len(steps)
        for ours, theirs in zip(found[name][0], steps, strict=True):
            for metric in ("loss/policy", "loss/kl", "loss/grad_norm", "loss/entropy"):
                assert ours[metric] == pytest.approx(theirs[metric], abs=1e-5, rel=1e-4), metric
        for key, tensor in published.items():
            torch.testing.assert_close(
                found[name][1][key].to(tensor.dtype), tensor, atol=1e-3, rtol=1e-3
            )
    base = policy.state_tensors(plain(tiny))
    merged = lora.merge(base, found["both"][1], ALPHA / 3)
    assert any(not torch.equal(merged[name], base[name]) for name in base)
    again, _ = short_training(
        tiny, tmp_path / "again", "float32", resume=tmp_path / "both-0" / "checkpoint"
    )
    for ours, theirs in zip(again, rows[2:], strict=True):
        assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
    short, adapters = torch.load(tmp_path / "short-0" / "done.pt")
    ups = [one for name, one in adapters.items() if name.endswith(lora.UP)]
    assert not all(torch.equal(one, one.bfloat16()) for one in ups), "as exact as they are trained"
    assert short[0]["loss/policy"] == pytest.approx(rows[0]["loss/policy"], abs=0.02)


# ---- a whole run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The format is taught to the whole model, the arm to adapters of what that gave."""
    directory = tmp_path_factory.mktemp("serial")
    train: Callable[..., Finished] = trainer(directory, RECIPE)
    taught = train("taught", f"stages=[{FORMAT}]")
    export(taught.run_dir, directory / "base")
    return train(
        "lora",
        f"policy.path={directory / 'base'}",
        "policy.lora={rank: 8, alpha: 16, targets: [q_proj, v_proj, up_proj, down_proj]}",
        "loss.kl_coef=0.01",
        "stages=[{kind: rl, steps: 30}]",
    )


def adapters_of(run: Finished) -> dict[str, torch.Tensor]:
    return shards.read(max((run.run_dir / "checkpoints").iterdir()), "model")


@pytest.mark.process
def test_a_run_that_trains_adapters_alone_learns(run: Finished) -> None:
    success = run.rl("train/success")
    assert success[0] < 0.6, "the base must not know the arm"
    assert sum(success[-10:]) / 10 >= 0.8  # sampled, with a frozen head that bounds how sure it is
    assert run.rl("loss/kl")[0] == pytest.approx(0.0, abs=1e-5), "the reference is the base"
    kept = adapters_of(run)
    assert all(name.endswith(("lora_A", "lora_B", lora.BASE)) for name in kept)


@pytest.mark.process
def test_evaluation_and_export_run_the_policy_that_was_trained(
    run: Finished, tmp_path: Path
) -> None:
    said = evaluate(run.run_dir, 32)
    assert float(said.split("success ")[1].split()[0].rstrip(",")) >= 0.95, "greedy"
    assert "adapter" in export(run.run_dir, tmp_path / "out")
    settings = load(run.run_dir / "config.yaml", []).policy
    model = plain(Path(settings.path))
    lora.inject(model, rank=8, alpha=16.0, targets=settings.lora.targets, seed=0)
    adapters = adapters_of(run)
    policy.load_state(model, adapters)
    exported = plain(tmp_path / "out")
    torch.testing.assert_close(logits(exported), logits(model), atol=1e-5, rtol=1e-5)
    merged = whole(adapters, settings, "float32")
    assert policy.state_tensors(exported).keys() == merged.keys()


@pytest.mark.process
def test_the_adapter_directory_is_in_the_format_of_peft(run: Finished, tmp_path: Path) -> None:
    export(run.run_dir, tmp_path / "out")
    adapter = tmp_path / "out" / "adapter"
    said = json.loads((adapter / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 8, 16)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["name"] == run.run_dir.name
    own = adapters_of(run)
    assert len(tensors) == len(own) - 1 == 2 * 4
    for name, tensor in tensors.items():
        linear, part, weight = name.removeprefix("base_model.model.").rsplit(".", 2)
        assert weight == "weight" and linear in said["target_modules"]
        assert torch.equal(tensor, own[f"{linear}.{part}"])
