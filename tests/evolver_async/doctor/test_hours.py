"""Hours by count: what each key of a recipe adds to a step, in the terms of a card's rates."""

from dataclasses import replace

import pytest

from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.config.shape import DecoderShape
from evolver_async.doctor import hours
from evolver_async.doctor.hours import BANDWIDTH, CARDS, HOST_BYTES_S, PRODUCTS, TOKEN_S, step_count

CARD = CARDS[0]
SEVEN = DecoderShape(28, 3584, 18944, 28, 4, 128, 152064, biased=True)  # Qwen2.5-7B
SMALL = DecoderShape(24, 896, 4864, 14, 2, 64, 151936, tied=True, biased=True)  # Qwen2.5-0.5B
LENGTH, SAMPLED, EPISODES = 1000, 800, 64 * 8
PLACES = "launch.gpus={actors: [0, 1, 2, 3], learner: [4, 5, 6, 7]}"
CHANGES = (
    *("policy.path=/models/seven", "policy.dtype=bfloat16", "policy.max_length=4000", PLACES),
    *("run.expected_length=0.25", "rollout.max_turns=2", "rollout.max_tokens=1600"),
    *("learner.groups_per_step=64", "rollout.group_size=8", "learner.minibatches=1"),
    *("engine.kind=vllm", "engine.device=cuda", "learner.device=cuda", "learner.ranks=4"),
    *("engine.slots=64", "engine.in_flight=keep_kv", "actors.count=4", "actors.groups=16"),
    *("loss.kl_coef=0", "learner.gradient_checkpointing=false", "stages=[{steps: 10}]"),
)


def config(*changes: str) -> Config:
    return load(None, [*CHANGES, *changes])


def step(*changes: str) -> hours.StepCount:
    return step_count(config(*changes), SEVEN, CARD)


# operations of one token in a forward pass: 2 for each parameter, 4 for each pair of a query's
# value and one of the tokens before it, on average half of the episode
FORWARD = 2 * SEVEN.passed + 4 * SEVEN.layers * SEVEN.queries * LENGTH / 2
PASS_S = EPISODES * LENGTH * FORWARD / (4 * PRODUCTS * CARD.flops_s)
PUBLISH_S = 2 * SEVEN.parameters / HOST_BYTES_S
LEAN = "learner.gradient_checkpointing=true"


def test_training_is_six_operations_a_parameter_and_token_and_publishing() -> None:
    assert step().training_s == pytest.approx(3 * PASS_S + PUBLISH_S)


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ("learner.gradient_checkpointing=true", 4),
        ("learner.epochs=2", 6),
        ("learner.minibatches=4", 3.75),  # the anchor of the later three updates
        ("loss.kl_coef=0.1", 4),
        ("selection={kind: spread, keep: 0.5}", 1.5),
        ("selection={kind: resample_on_correct, members: 4}", 1.5),
    ],
)
def test_each_key_adds_its_passes(change: str, passes: float) -> None:
    assert step(change).training_s == pytest.approx(passes * PASS_S + PUBLISH_S)


def test_a_decoding_step_reads_the_weights_and_half_a_context_of_each_sequence() -> None:
    bytes_s = BANDWIDTH * CARD.bytes_s
    kv = 2 * 28 * 4 * 128 * 2 * LENGTH / 2
    decode_s = TOKEN_S + (2 * SEVEN.parameters + 64 * kv) / bytes_s
    prompts_s = EPISODES * (LENGTH - SAMPLED) * FORWARD / (4 * PRODUCTS * CARD.flops_s)
    expected = EPISODES * SAMPLED / (4 * 64) * decode_s + prompts_s + PUBLISH_S
    assert step().generation_s == pytest.approx(expected)


def test_keys_and_values_that_do_not_fit_are_fewer_sequences_at_once() -> None:
    room = 16 * 2 * 28 * 4 * 128 * 2 * LENGTH // 2  # of 16 half contexts
    few = step("engine.slots=16")
    assert step(f"engine.kv_cache_bytes={room}").generation_s == pytest.approx(few.generation_s)
    assert few.generation_s > 2 * step().generation_s


def test_refilled_groups_are_sampled_twice_and_trained_once() -> None:
    refilled, plain = step("selection.kind=dynamic"), step()
    assert refilled.training_s == plain.training_s
    assert refilled.generation_s - PUBLISH_S == pytest.approx(2 * (plain.generation_s - PUBLISH_S))


def test_sides_of_one_gpu_or_without_staleness_take_turns() -> None:
    apart = step()
    assert apart.step_s == max(apart.generation_s, apart.training_s)
    fresh = step("buffer.max_staleness=0")
    assert fresh.step_s == fresh.generation_s + fresh.training_s
    shared = step(
        *("actors.count=1", "learner.ranks=1", "launch.gpus={actors: [0], learner: [0]}"),
        *("engine.memory=0.3", "weights.kind=cuda_ipc"),
    )
    assert shared.step_s == shared.generation_s + shared.training_s


def test_a_mixture_multiplies_its_active_experts_alone() -> None:
    dense = replace(SEVEN, inner=768 * 8)
    mixed = replace(SEVEN, inner=768, experts=128, active=8)
    router = SEVEN.layers * SEVEN.hidden * 128
    assert mixed.passed == dense.passed + router and mixed.parameters > 5 * dense.parameters


def test_a_division_fits_and_its_ranks_fill_whole_machines() -> None:
    assert hours.divided(config(), SEVEN, CARD, 1) is None, "18 bytes a parameter and an engine"
    one = hours.divided(config(), SMALL, CARD, 1)
    assert one is not None and one.launch.gpus.actors == one.launch.gpus.learner == [0]
    many = hours.divided(config(LEAN), SEVEN, CARD, 64)
    assert many is not None and many.learner.ranks_per_host == hours.HOST_GPUS
    assert many.learner.hosts > 1
    assert many.actors.count * many.engine.tensor_parallel + many.learner.ranks == 64


def test_texts_propose_a_division_that_is_much_faster() -> None:
    uneven = config(LEAN, "actors.count=1", "launch.gpus={actors: [0], learner: [4, 5, 6, 7]}")
    counted, proposed, assumed = hours.texts(uneven, SEVEN, [CARD])
    assert "5 x H100" in counted and "10 rl steps" in counted
    assert "engines" in proposed and "launch.gpus" in proposed and "1,000 tokens" in assumed


def test_cards_are_those_that_are_there_else_those_of_the_hardware_key() -> None:
    named = config("run.hardware=8x80GB")
    assert [card.name for card in hours.cards_of(named, [])] == ["H100", "A100"]
    found = hours.cards_of(named, ["NVIDIA H200"])
    assert [card.name for card in found] == ["H200"]
    assert hours.cards_of(config(), ["NVIDIA T4"]) == []


def test_a_run_without_rl_has_no_hours() -> None:
    supervised = config("stages=[{kind: sft, steps: 10}]")
    assert hours.run_count(supervised, SEVEN, CARD) is None
    assert [*hours.texts(supervised, SEVEN, [CARD])] == []
