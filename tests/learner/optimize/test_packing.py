"""Packed rows, recomputed layers and bounded log-probs against padded rows, kept ones, all at once.

The oracle of packed attention is one forward pass a sequence by transformers' own attention.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from collated_groups import collated, make_groups
from hypothesis import example, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from micro_batches import actions
from tensor_memory import Peak, Traffic
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    Qwen2Config,
    Qwen3Config,
)
from updates import FORKS, config, updater

from evolver_async.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    CorrectionConfig,
    CriticConfig,
    StageConfig,
)
from evolver_async.config.load import dump, load, stage_config
from evolver_async.errors import TrainingError
from evolver_async.model import attention, flash, layers, policy, row_checks
from evolver_async.model.logit_chunks import LOGITS
from evolver_async.model.rows.borders import SHORT, SIMILAR, Borders
from evolver_async.model.tokenizer import ModelError
from evolver_async.process.setup import RoleArgs
from learner.optimize import step_passes, token_budget
from learner.optimize.logprobs import Scorer
from learner.ranks.mesh import Ranks, alone
from learner.state import LearnerState
from learner.step import Updater
from learner.tools import prepare

CPU = torch.device("cpu")
LENGTHS = [23, 21, 20, 11, 9, 9, 2, 1]
WINDOW = 6
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "windowed": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "llama": LlamaConfig(**SHAPE),
}


LAYOUTS = dict.fromkeys(CONFIGS, "tree") | {"windowed": "packed"}  # by default


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each kind of model, by name; all with the tiny preset's tokenizer."""
    root = tmp_path_factory.mktemp("packing")
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32, "max_length": 64}
    policy.make_tiny(root / "tiny", seed=0, **sizes)
    vocabulary = len(policy.load_tokenizer(root / "tiny"))
    for name, shape in CONFIGS.items():
        torch.manual_seed(0)
        shape.vocab_size = vocabulary
        policy.export(AutoModelForCausalLM.from_config(shape), root / name, root / "tiny")
    return {name: root / name for name in ["tiny", *CONFIGS]}


def opened(path: Path) -> Any:
    return policy.load_model(path, dtype="float32", device="cpu")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
        parameter.grad = None
    return found


# ---- attention


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_are_those_of_each_alone(paths, name):
    model = opened(paths[name])
    tokens_1T = torch.randint(0, 90, (1, sum(LENGTHS)), generator=torch.manual_seed(0))
    weights = torch.randn(sum(LENGTHS), 16, generator=torch.manual_seed(1))
    alone = torch.cat([policy.hidden_states(model, one) for one in tokens_1T.split(LENGTHS, 1)], 1)
    (alone[0] * weights).sum().backward()
    theirs = gradients(policy.split_model(model)[0])
    packed = policy.hidden_states(model, tokens_1T, Borders.of(LENGTHS, CPU))
    (packed[0] * weights).sum().backward()
    torch.testing.assert_close(packed, alone, atol=2e-6, rtol=1e-5)
    ours = gradients(policy.split_model(model)[0])
    for name, expected in theirs.items():
        # of the norm: single elements can be small differences of large ones
        assert (ours[name] - expected).norm() <= 3e-6 * expected.norm(), name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_still_takes_padded_rows(paths, name):
    model, packed = opened(paths[name]), opened(paths[name])
    row_checks.check_packing(packed)
    tokens_BT = torch.randint(0, 90, (3, 2 * WINDOW), generator=torch.manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            policy.hidden_states(packed, tokens_BT),
            policy.hidden_states(model, tokens_BT),
            atol=2e-6,
            rtol=1e-5,
        )


def test_other_sequences_of_a_row_are_out_of_sight(paths):
    model = opened(paths["qwen3"])
    tokens_1T = torch.randint(0, 90, (1, 12), generator=torch.manual_seed(0))
    other_1T = tokens_1T.clone()
    other_1T[0, :5] += 1
    with torch.no_grad():
        found, changed = (
            policy.hidden_states(model, one, Borders.of([5, 7], CPU))
            for one in (tokens_1T, other_1T)
        )
    assert torch.equal(found[:, 5:], changed[:, 5:])
    assert (found[:, :5] != changed[:, :5]).any(-1).all()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
@example([3, 1])
@example([SHORT, 1, 1])
def test_attention_pads_no_sequence_by_much(lengths):
    borders = Borders.of(lengths, CPU)
    for rows in (block.queries for block in borders.calls.blocks):
        held = rows.index_T // rows.longest
        least = int(held.bincount().min())
        assert rows.longest <= SHORT or least >= SIMILAR * rows.longest
    assert sum(len(block.queries.source_T) for block in borders.calls.blocks) == sum(lengths)
    assert borders.starts_S1.diff().tolist() == lengths and borders.starts_S1[0] == 0
    assert borders.longest == max(lengths)
    expected = [position for length in lengths for position in range(length)]
    assert borders.position_1T.tolist() == [expected]
    # few: their lengths fall by a quarter from one to the next
    assert len(borders.calls.blocks) <= 1 + np.log(300) / -np.log(SIMILAR)


@pytest.mark.parametrize("shape", [BloomConfig, MambaConfig], ids=["bloom", "mamba"])
def test_a_model_that_mixes_packed_sequences_is_refused(shape):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        shape(hidden_size=16, num_hidden_layers=1, n_head=2, vocab_size=50)
    )
    with pytest.raises(ModelError, match=r"learner\.packing"):
        row_checks.check_packing(model.eval())


def test_rounding_of_a_short_type_is_not_taken_for_mixing(monkeypatch):
    """Other kernels round otherwise: here those of packed rows get values off by a last place."""
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 64, "num_hidden_layers": 12}
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**shape, vocab_size=50), attn_implementation="sdpa"
    )
    model = model.to(torch.bfloat16).eval()
    whole = attention._by_blocks
    off = torch.Generator().manual_seed(0)

    def rounded(*given: Any) -> torch.Tensor:
        out = whole(*given)
        return out * (1 + 2**-8 * torch.randn(out.shape, generator=off)).to(out.dtype)

    monkeypatch.setattr(attention, "_by_blocks", rounded)
    row_checks.check_packing(model)
    monkeypatch.setattr(  # all sequences as one
        policy.Borders, "of", lambda _, device: Borders.trees([(9, 0)], (), device)
    )
    with pytest.raises(ModelError, match=r"learner\.packing"):
        row_checks.check_packing(model)


# ---- micro-batches


@hypothesis(max_examples=examples(50))
@given(st.integers(0, 10**6), st.integers(1, 120))
def test_packed_micro_batches_hold_every_token_once_and_no_padding(seed, tokens):
    batch = collated(make_groups(seed, 3, 3))
    found = list(batch.whole().micro_batches(tokens, CPU, "packed"))
    index = torch.cat([micro.index_N for micro in found]).numpy()
    assert sorted(index) == list(range(len(batch.mu_N)))
    for micro in found:
        rows = micro.row_B.tolist()
        cut = [batch.tokens[batch.row_start_R[r] : batch.row_start_R[r + 1]] for r in rows]
        assert micro.tokens_BT.tolist() == [np.concatenate(cut).tolist()]
        assert micro.attention_BT.all()
        assert micro.borders is not None
        assert micro.borders.starts_S1.diff().tolist() == [len(one) for one in cut]
        assert (micro.read_K[micro.end_B] + 1).tolist() == micro.borders.starts_S1[1:].tolist()
        labels = batch.tokens[batch.action][micro.index_N.numpy()]
        assert micro.tokens_BT[actions(micro)].tolist() == labels.tolist()
        trajectories = len(set(batch.trajectory_R[rows]))
        assert micro.tokens_BT.numel() <= tokens or trajectories == 1
    padded = list(batch.whole().micro_batches(tokens, CPU))
    assert len(found) <= len(padded)


# ---- whole steps

STATE: dict[str, Any] = {"lineage": 1, "version": 8}
KINDS = [
    ("none", "token"),
    ("ppo", "token"),
    ("decoupled", "token"),
    ("decoupled", "trajectory"),
    ("icepop", "token"),
    ("geo_mask", "token"),
    ("cispo", "token"),
    ("gspo", "token"),
    ("topr", "trajectory"),
]


def descending(settings: Config, run_dir: Path) -> Updater:
    """A learner whose weights move by exactly its gradient, so that the one tells the other."""
    settings.learner.lr, settings.learner.grad_clip = 1.0, 1e9
    made = updater(settings, run_dir)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=1.0)
    return made


def with_critic(made: Updater) -> None:
    critic = made._make_critic()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in critic.module["head"].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    critic.optimizer = torch.optim.SGD(critic.module.parameters(), lr=1.0)
    made.critic = critic


def stepped(kind: str, settings: Config, run_dir: Path) -> tuple[Updater, dict[str, float]]:
    """One optimizer update over guided and unguided data in several contexts a trajectory."""
    settings.stages = [StageConfig(kind=kind, steps=1)]
    settings.learner.token_budget = 64
    made, stage = descending(settings, run_dir), stage_config(settings, 0)
    made.begin_stage(stage, 0)
    if made.reference is not None:
        with torch.no_grad():
            for parameter in made.reference.parameters():
                parameter.mul_(1.1)
    if settings.advantage.kind == "gae":
        with_critic(made)
    groups = make_groups(7, 4, 3, sequences=3, scripted=kind == "sft")
    state = LearnerState(**STATE)
    return made, made.step(kind, stage, groups, state, FORKS, 1).metrics


def same_step(
    kind: str,
    settings: Config,
    run_dir: Path,
    *,
    atol: float = 1e-5,
    layout: str = "",
    **changes: Any,
) -> None:
    """Packed rows (or what else `changes` of the learner) do to the weights what padded ones do."""
    if "packing" in changes:
        settings.learner.packing = False
    plain, expected = stepped(kind, settings, run_dir)
    for name, value in changes.items():
        setattr(settings.learner, name, value)
    other, found = stepped(kind, settings, run_dir)
    layer = policy.split_model(other.model)[0].layers[0]
    changed = settings.learner.gradient_checkpointing or settings.learner.compile
    assert isinstance(layer.forward, partial) == changed
    assert other.layout == (layout or ("tree" if settings.learner.packing else "padded"))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert abs(found["loss/policy"] - expected["loss/policy"]) <= 1e-5
    begun = policy.state_tensors(opened(Path(settings.policy.path)))
    ours = policy.state_tensors(other.model)
    for name, tensor in policy.state_tensors(plain.model).items():
        assert not torch.equal(tensor, begun[name]), name
        torch.testing.assert_close(ours[name], tensor, atol=atol, rtol=0)
    if plain.critic is not None:
        assert other.critic is not None
        torch.testing.assert_close(
            other.critic.module.state_dict(), plain.critic.module.state_dict(), atol=atol, rtol=0
        )


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_a_packed_rl_step_is_the_padded_one(paths, tmp_path, kind, level):
    settings = config(paths["tiny"], [], kl_coef=0.1, entropy_coef=0.01, entropy_top_k=5)
    settings.correction = CorrectionConfig(kind=kind, level=level, w_max=1.5, low=0.8, high=1.25)
    settings.advantage = AdvantageConfig(kind="grpo")
    settings.loss.boost = 0.0 if kind in ("cispo", "topr") else 0.6
    same_step("rl", settings, tmp_path, packing=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum_norm"])
def test_a_packed_step_of_any_model_is_the_padded_one(paths, tmp_path, name, aggregation):
    settings = config(paths[name], [], kl_coef=0.1, aggregation=aggregation, norm_tokens=9)
    same_step("rl", settings, tmp_path, packing=True, layout=LAYOUTS[name])


@pytest.mark.parametrize("name", ["qwen3", "windowed"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_packed_demonstrations_and_preferences_are_the_padded_ones(paths, tmp_path, name, kind):
    same_step(kind, config(paths[name], []), tmp_path, packing=True, layout=LAYOUTS[name])


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_packed_step_with_a_critic_is_the_padded_one(paths, tmp_path, critic):
    settings = config(paths["qwen3"], [])
    settings.advantage, settings.critic = AdvantageConfig(kind="gae"), CriticConfig(kind=critic)
    same_step("rl", settings, tmp_path, packing=True)


def test_scores_of_packed_rows_are_those_of_padded_ones(paths):
    model, batch = opened(paths["windowed"]), collated(make_groups(5, 4, 4, sequences=3))
    padded, packed = (
        Scorer(0.7, 50, 8, alone("cpu"), layout)(model, batch.whole())
        for layout in ("padded", "packed")
    )
    np.testing.assert_allclose(packed, padded, atol=1e-5)


# ---- recomputed layers


@pytest.mark.parametrize("critic", ["", "shared", "separate"])
@pytest.mark.parametrize("packing", [False, True])
def test_recomputed_layers_leave_every_bit_of_a_step(paths, tmp_path, packing, critic):
    settings = config(paths["qwen3"], [], kl_coef=0.1)
    settings.learner.packing = packing
    if critic:
        settings.advantage, settings.critic = AdvantageConfig(kind="gae"), CriticConfig(kind=critic)
    same_step("rl", settings, tmp_path, atol=0.0, gradient_checkpointing=True)


# ---- compiled layers


@pytest.mark.parametrize("critic", ["", "separate"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_of_compiled_layers_is_the_plain_one(
    paths, tmp_path, monkeypatch, critic, packing, recomputed
):
    """The traced code alone: test_layers.py makes machine code of it, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(layers, "check_compiler", lambda device: None)
    settings = config(paths["windowed" if packing else "qwen3"], [], kl_coef=0.1)
    settings.learner.packing = packing
    settings.learner.gradient_checkpointing = recomputed
    if critic:
        settings.advantage, settings.critic = AdvantageConfig(kind="gae"), CriticConfig(kind=critic)
    layout = LAYOUTS["windowed"] if packing else ""
    same_step("rl", settings, tmp_path, layout=layout, compile=True)


# ---- memory of log-probs


def logprob_memory(vocabulary: int, tokens: int) -> int:
    """Bytes that log-probs and entropies of hidden states take, forward and backward.

    Without the weights' gradient, of which two exist at once while chunks are added up.
    """
    shape = LlamaConfig(**SHAPE | {"num_hidden_layers": 1}, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(shape)
    tokens_BT = torch.zeros(1, tokens + 1, dtype=torch.long)
    hidden_BTD = torch.randn(1, tokens + 1, 16, requires_grad=True)
    with Peak() as memory:
        found = policy.token_logprobs(
            model,
            tokens_BT,
            torch.ones_like(tokens_BT),
            hidden_BTD=hidden_BTD,
            with_entropy=True,
        )
        sum(part.sum() for part in found).backward()
    return memory.most - 2 * policy.split_model(model)[1].weight.nbytes


def test_memory_of_logprobs_grows_neither_with_tokens_nor_with_the_vocabulary(monkeypatch):
    monkeypatch.setitem(LOGITS, False, 1 << 16)
    copies = 5 * 4 * LOGITS[False]  # bytes: more than one chunk holds at once, in float32
    sizes = [(512, 256), (512, 2048), (4096, 256), (4096, 2048)]
    bounded = [logprob_memory(*size) for size in sizes]
    assert max(bounded) < copies, bounded
    monkeypatch.setitem(LOGITS, False, 1 << 40)
    at_once = [logprob_memory(*size) for size in sizes]
    assert at_once[-1] > 16 * copies and at_once[-1] > 50 * at_once[0], at_once


def head_traffic(vocabulary: int, tokens: int, chunk: int, entropy_coef: float) -> Traffic:
    """Count what log-probs, entropies and their gradients move."""
    shape = LlamaConfig(**SHAPE | {"num_hidden_layers": 1}, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(shape)
    hidden_ND = torch.randn(tokens, shape.hidden_size, requires_grad=True)
    targets_N = torch.zeros(tokens, dtype=torch.long)
    with Traffic(vocabulary) as moved:
        found = policy.target_logprobs(model, hidden_ND, targets_N, 1.0, chunk, with_entropy=True)
        value = found[0].sum()
        if entropy_coef:
            value = value + entropy_coef * found[1].sum()
        value.backward()
    return moved


def test_a_chunk_has_the_tokens_that_its_key_names(monkeypatch):
    assert head_traffic(512, 100, 7, 0.0).largest == 7 * 512
    assert head_traffic(512, 100, 1000, 0.0).largest == 100 * 512
    monkeypatch.setitem(LOGITS, False, 9 * 512)
    assert head_traffic(512, 100, 0, 0.0).largest == 9 * 512
    assert head_traffic(512, 100, 20, 0.0).largest == 20 * 512, "whatever the bound of others"


def test_the_gradient_of_log_probs_moves_few_logits_and_that_of_entropy_only_where_it_counts():
    """Bytes for each logit, beside what products move; autograd's own, chunk by chunk, were 65."""
    logits = 8 * 128 * 2048
    plain, bonus = (head_traffic(2048, 8 * 128, 128, coef) for coef in (0.0, 0.1))
    assert plain.rest < 56 * logits
    assert plain.rest < 0.6 * bonus.rest < 0.6 * 110 * logits
    # forward, again in the backward pass but for the last chunk, and two for the gradients
    products = 2 * logits * 16
    assert plain.flops == bonus.flops <= (4 - 1 / 8) * products


# ---- budgets by memory


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**12), st.integers(1, 10**4))
def test_a_measured_budget_fits_and_leaves_little(constant, by_token, free, unit):
    def cost(tokens: int) -> int:
        """Two peaks: the head's, with its chunk of logits, and a recomputed layer's."""
        assert tokens == unit or cost(unit) <= room, "no pass may be tried that does not fit"
        needed = max(constant + by_token * tokens, 3 * by_token * tokens)
        assert tokens == unit or needed <= room * 1.001
        return needed

    room = token_budget.SHARE * free
    try:
        found = token_budget.fitting(cost, free, unit)
    except TrainingError as error:
        assert "learner.token_budget" in str(error) and cost(unit) > 0.999 * room
        return
    assert found >= unit and cost(found) <= room * 1.001
    if 2 * cost(unit) <= room <= 500 * by_token * unit:  # more would take more passes
        grain = max(unit, token_budget.GRAIN) + 1
        assert max(constant + by_token * (found + grain), 3 * by_token * (found + grain)) >= (
            0.8 * room
        )


def test_a_budget_is_measured_on_a_gpu_alone(paths, tmp_path):
    settings = config(paths["tiny"], [StageConfig(kind="rl", steps=1)])
    settings.learner.token_budget = 0
    made = updater(settings, tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match=r"learner\.token_budget"):
            made.step(
                "rl",
                stage_config(settings, 0),
                make_groups(1, 2, 2),
                LearnerState(**STATE),
                FORKS,
                1,
            )


def test_ranks_on_one_gpu_share_what_is_free_there(monkeypatch):
    did: list[str] = []

    class Gpu:
        id = "GPU-0"

        def needed(self, _: object, tokens: int) -> int:
            return 1000 * tokens

        def give_back(self) -> None:
            did.append("give back")

        def free(self) -> int:
            assert did == ["give back", "meet"], "nobody looks before all have given back"
            return 10**7

    def meet(data: bytes, others: list[bytes]) -> list[bytes]:
        did.append("meet")
        return [data, *others]

    monkeypatch.setattr(token_budget, "Gpu", lambda _: Gpu())
    for others, expected in ([], 8500), ([b"GPU-1"], 8500), ([b"GPU-0"], 4250):
        did.clear()
        monkeypatch.setattr(Ranks, "gather", lambda _, data, others=others: meet(data, others))
        found = token_budget.measured(lambda _: None, [], alone("cpu"), 10)
        assert found == expected // token_budget.GRAIN * token_budget.GRAIN


def test_a_budget_is_measured_again_when_a_critic_has_come(paths, tmp_path, monkeypatch):
    room = iter([512, 256, 128])
    monkeypatch.setattr(step_passes, "measured", lambda *_: next(room))
    settings = config(paths["tiny"], [StageConfig(kind="rl", steps=1)])
    settings.learner.token_budget = 0
    settings.advantage = AdvantageConfig(kind="gae")
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    made.begin_stage(stage, 0)
    made.step("rl", stage, make_groups(2, 2, 2), LearnerState(**STATE), FORKS, 1)
    assert made.critic is not None and made.stepper.passes.token_budget(stage, made.critic) == 256
    assert made.stepper.passes.token_budget(stage, None) == 128, (
        "less than before there was a critic"
    )


def test_a_budget_is_measured_again_when_a_reference_has_come(paths, tmp_path, monkeypatch):
    room = iter([512, 256])
    monkeypatch.setattr(step_passes, "measured", lambda *_: next(room))
    settings = config(
        paths["tiny"], [StageConfig(kind="sft", steps=1), StageConfig(kind="dpo", steps=1)]
    )
    settings.learner.token_budget = 0
    made = updater(settings, tmp_path)
    for index, expected in enumerate((512, 256)):
        stage = stage_config(settings, index)
        made.begin_stage(stage, index)
        for _ in range(2):
            assert made.stepper.passes.token_budget(stage, None) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about hosts without a GPU")
@pytest.mark.parametrize(
    "changes",
    [
        ["learner.token_budget=0"],
        ["stages.0.override={learner: {token_budget: 0}}"],
        ["safety={action: rollback, rollback: {learner: {token_budget: 0}}}"],
    ],
)
def test_a_budget_to_be_measured_is_refused_without_a_gpu_before_anything_starts(tmp_path, changes):
    dump(load(None, ["stages.0.steps=1", *changes]), tmp_path / "config.yaml")
    args = RoleArgs(address="", name="prepare", incarnation=0, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.token_budget"):
        prepare.main(args)


def test_the_probe_of_a_budget_reaches_all_that_trains(paths, tmp_path):
    for packing in (False, True):
        settings = config(paths["qwen3"], [StageConfig(kind="rl", steps=1)])
        settings.critic, settings.learner.packing = CriticConfig(kind="separate"), packing
        made = updater(settings, tmp_path)
        with_critic(made)
        assert made.critic is not None
        seen: list[int] = []
        policy.split_model(made.model)[0].embed_tokens.register_forward_hook(
            lambda module, given, out, seen=seen: seen.append(out.shape[:-1])
        )
        made.stepper.passes._probe(settings, made.critic, 2 * 64)
        assert seen == [(128,) if packing else (2, 64)]
        gradients(made.model)
        gradients(made.critic.module)


@pytest.mark.parametrize(
    "changes",
    [
        ["learner.token_budget=0", "learner.device=cpu"],
        ["stages.0.override.learner.packing=true"],
        ["stages.0.override.learner.gradient_checkpointing=true"],
    ],
)
def test_what_a_run_cannot_have_is_refused_by_its_key(changes):
    recipe = Path(__file__).parents[3] / "configs" / "frozen_lake.yaml"
    with pytest.raises(ConfigError, match=changes[0].split("=")[0].split("override.")[-1]):
        load(recipe, changes)


def by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, heads: bool
):
    """The oracle of torch's kernel on a GPU: every sequence by itself; `heads`: shares keys."""
    assert heads or q.shape[1] == k.shape[1]
    shared = q.shape[1] // k.shape[1]
    outs = []
    for start, end in itertools.pairwise(starts.tolist()):
        query, key, value = (one[start:end].transpose(0, 1) for one in (q, k, v))
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def newer(q, k, v, starts, _, longest, most, *, scale, window_size, enable_gqa=False):
    assert window_size == (-1, 0) and longest == most and scale == q.shape[-1] ** -0.5
    return by_sequence(q, k, v, starts, enable_gqa)


def older(q, k, v, starts, _, longest, most, *, scale, window_size):
    assert window_size == (-1, 0) and longest == most and scale == q.shape[-1] ** -0.5
    return by_sequence(q, k, v, starts, False)


@pytest.mark.parametrize("kernel", [newer, older])
@pytest.mark.parametrize("heads", [2, 4])
def test_the_kernel_is_told_of_shared_keys_where_it_can_be(monkeypatch, kernel, heads):
    """torch 2.11's has no word for it: there every query head gets keys and values of its own."""
    monkeypatch.setattr(flash, "varlen_attn", kernel)
    monkeypatch.setattr(flash, "fits", lambda query: True)
    lengths = [5, 1, 9]
    query = torch.randn(1, heads, sum(lengths), 8)
    key, value = torch.randn(2, 1, 2, sum(lengths), 8)
    given = {"scaling": 8**-0.5, "borders": Borders.of(lengths, torch.device("cpu"))}
    found, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, **given)
    monkeypatch.setattr(flash, "fits", lambda query: False)
    wanted, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, **given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
