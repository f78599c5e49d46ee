"""Hours of a recipe on GPUs, by count: arithmetic of its tokens and of the rates of a card.

Nothing here is measured. A token that is sampled reads the weights and the keys and values of its
context from the GPU's memory; what is read or trained is multiplied. Only `rl` stages count,
without the time of environments, judges, evaluations and checkpoints, and as if no actor waited for
the longest member of a group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.sections.weight_channel import channel
from evolver_async.config.shape import DecoderShape, teacher_shape
from evolver_async.durations import duration
from evolver_async.memory.bounds import Shape, token_bytes, weight_bytes
from evolver_async.memory.gpu_needs import bounds_of, gpu_demands, gpus_used
from evolver_async.memory.plan import memory_plan
from evolver_async.memory.units import stored

PRODUCTS = 0.4  # share of a card's bfloat16 rate that training and reading reach
BANDWIDTH = 0.6  # share of its memory's bandwidth that decoding reaches
TOKEN_S = 0.005  # of a decoding step beside its reads: its launch, and drawing the tokens
DOUBLED = 0.9  # share of two engines' rate that one on twice as many GPUs reaches
HOST_BYTES_S = 20e9  # between a GPU and its host's memory, or another host
REFILLED = 2.0  # groups that are sampled for each that trains, if those without spread are replaced
HOST_GPUS = 8  # of one machine
MEETING = {"address": "tcp://first:4003", "trusted_network": True}  # of ranks on several
SHARED_MEMORY = 0.3  # of a GPU that an engine shares with the learner
ALIKE = 1.05  # times the fewest hours, below which an engine with fewer GPUs is taken
GAIN = 0.8  # share of the present hours below which another division is proposed


@dataclass(frozen=True)
class Card:
    """A GPU: bytes of memory, bfloat16 operations and bytes a second by its data sheet."""

    name: str
    memory: float
    flops_s: float
    bytes_s: float


CARDS = (
    Card("H100", 80e9, 989e12, 3.35e12),
    Card("A100", 80e9, 312e12, 2.04e12),
    Card("H200", 141e9, 989e12, 4.8e12),
)


@dataclass(frozen=True)
class StepCount:
    """Seconds of a step: of the engines, of the learner with its publishing, of both together."""

    generation_s: float
    training_s: float
    step_s: float


@dataclass(frozen=True)
class RunCount:
    """Seconds of all rl stages, and of a step of the longest of them."""

    longest: StepCount
    steps: int
    run_s: float


def run_count(config: Config, shape: DecoderShape, card: Card) -> RunCount | None:
    """Count a run with bfloat16 on GPUs, None without an rl stage that has `steps`."""
    config, steps, counts = stored(config, gpu=True), 0, list[tuple[float, StepCount]]()
    for index, written in enumerate(config.stages):
        if written.kind == "rl" and written.steps:
            found = step_count(stage_config(config, index), shape, card)
            counts.append((written.steps * found.step_s, found))
            steps += written.steps
    if not counts:
        return None
    return RunCount(max(counts, key=lambda one: one[0])[1], steps, sum(one for one, _ in counts))


def step_count(stage: Config, shape: DecoderShape, card: Card) -> StepCount:
    """Count a step of a stage."""
    engine, learner, size = stage.engine, stage.learner, stage.rollout.group_size
    length = stage.run.expected_length * stage.policy.max_length  # mean tokens of an episode
    most = min(stage.rollout.max_turns * stage.rollout.max_tokens, stage.policy.max_length)
    sampled = stage.run.expected_length * most  # of it by the policy
    kept, drawn = _selected(stage)
    played = drawn * learner.groups_per_step * size
    products_s, bytes_s = PRODUCTS * card.flops_s, BANDWIDTH * card.bytes_s
    forward = 2 * shape.passed + 2 * shape.layers * shape.queries * length  # operations of a token
    bounds = bounds_of(shape, stage.policy.max_length)
    weights, of_token = weight_bytes(stage, bounds), token_bytes(stage, bounds)

    engines, parallel = stage.actors.bounds()[0], engine.tensor_parallel
    gpus = parallel * DOUBLED ** math.log2(parallel)
    at_once = min(
        engine.slots,
        stage.actors.groups * size,
        (1 + stage.buffer.max_staleness) * played / engines,
        2 * _cached_bytes(stage, bounds, card) / of_token / length,  # half a context each
    )
    decode_s = TOKEN_S + at_once * length / 2 * of_token / (gpus * bytes_s)
    decode_s += max(weights / (gpus * bytes_s), forward * at_once / (gpus * products_s))
    again = engines * at_once * length / 2 if engine.in_flight == "keep" else 0.0
    read_s = (played * (length - sampled) + again) * forward / (engines * gpus * products_s)
    published = 0 if stage.policy.lora.rank else weights
    adopt_s = published / (bytes_s if channel(stage) == "cuda_ipc" else parallel * HOST_BYTES_S)
    generation_s = played * sampled * decode_s / (engines * max(1.0, at_once)) + read_s + adopt_s

    trained = kept * learner.groups_per_step * size * length
    training_s = trained * _passes(stage) * forward / (learner.ranks * products_s)
    if (teacher := teacher_shape(stage)) is not None:
        training_s += trained * 2 * teacher.passed / (learner.ranks * products_s)
    training_s += published / (bytes_s if channel(stage) == "cuda_ipc" else HOST_BYTES_S)
    apart = stage.buffer.max_staleness > 0 and not _shared(stage)
    both = max if apart else sum
    return StepCount(generation_s, training_s, both((generation_s, training_s)))


def _selected(stage: Config) -> tuple[float, float]:
    """Return the share of a step's members that train, and how many times as many are sampled."""
    selection, groups = stage.selection, stage.learner.groups_per_step
    shares = {
        "spread": selection.keep,
        "top_p": selection.p,
        "top_k": min(1.0, selection.k / groups),
        "resample_on_correct": (selection.members or stage.rollout.group_size)
        / stage.rollout.group_size,
    }
    return shares.get(selection.kind, 1.0), REFILLED if selection.facts.refills else 1.0


def _cached_bytes(stage: Config, bounds: Shape, card: Card) -> float:
    """Bytes of an engine's keys and values on all of its GPUs."""
    left = stage.engine.memory * card.memory * stage.engine.tensor_parallel
    given = stage.engine.kv_cache_bytes * stage.engine.tensor_parallel
    return given or max(0.0, left - weight_bytes(stage, bounds))


def _passes(stage: Config) -> float:
    """Return the forward passes of a trained token; one back through the weights counts as two."""
    learner, critic = stage.learner, stage.advantage.facts.critic
    back = 1 if stage.policy.lora.rank else 2
    update = learner.epochs * (1 + back + learner.gradient_checkpointing)
    separate = critic and stage.critic.kind == "separate"
    # the first update gives the anchor of its own tokens
    anchor = stage.correction.facts.reads_anchor * (1 - 1 / learner.minibatches)
    return update * (1 + separate) + anchor + critic + stage.reads_reference


def _shared(config: Config) -> bool:
    """True if an engine and the learner share a GPU."""
    engines, learner = gpus_used(config, 1)
    return bool({*engines} & {*learner})


def divided(config: Config, shape: DecoderShape, card: Card, gpus: int) -> Config | None:
    """Return the recipe with the engines and ranks for so many GPUs that take the fewest hours.

    None if no division fits into the GPUs' memory.
    """
    found = list[tuple[int, float, Config]]()
    of_hosts = range(2 * HOST_GPUS, gpus, HOST_GPUS)  # whole ones
    for ranks in (*range(1, min(gpus, HOST_GPUS) + 1), *of_hosts):
        for parallel in (1, 2, 4, 8):
            engines = (gpus - ranks) // parallel
            if gpus == 1:
                engines = int(parallel == 1)
            if not engines or shape.heads % parallel or shape.inner % parallel:
                continue
            one = _on(config, engines, parallel, ranks, shares=gpus == 1)
            if _fits(one, shape, card, gpus) and (count := run_count(one, shape, card)):
                found.append((parallel, count.run_s, one))
    least = min((run_s for _, run_s, _ in found), default=0.0)
    near = [one for one in found if one[1] <= ALIKE * least]
    return min(near, key=lambda one: one[:2])[2] if near else None


def _fits(config: Config, shape: DecoderShape, card: Card, gpus: int) -> bool:
    """True if engines have room and a rank's predicted peak leaves them their share of a GPU."""
    bounds = bounds_of(shape, config.policy.max_length)
    demands = gpu_demands(stored(config, gpu=True), bounds, [card.memory] * gpus)
    rank = memory_plan(config, shape, learner_gpu=True, actor_gpu=True).processes[0].gpu
    engine = config.engine.memory * card.memory if gpus == 1 else 0
    return rank + engine <= card.memory and all(demand.fits for demand in demands)


def _on(config: Config, engines: int, parallel: int, ranks: int, *, shares: bool) -> Config:
    """Return a configuration with these engines on the first GPUs and these ranks on the next."""
    used = engines * parallel
    hosts = max(1, ranks // HOST_GPUS)
    places = list(range(used)), [0] if shares else list(range(used, used + ranks // hosts))
    gpus = replace(config.launch.gpus, actors=places[0], learner=places[1])
    memory = min(config.engine.memory, SHARED_MEMORY) if shares else max(config.engine.memory, 0.9)
    kv = config.engine.kv_cache_bytes if shares else 0
    kind = "cuda_ipc" if shares else "auto"
    return replace(
        config,
        actors=replace(config.actors, count=engines),
        engine=replace(config.engine, tensor_parallel=parallel, memory=memory, kv_cache_bytes=kv),
        learner=replace(config.learner, ranks=ranks, hosts=hosts, **(MEETING if hosts > 1 else {})),
        launch=replace(config.launch, gpus=gpus),
        weights=replace(config.weights, kind=kind),
    )


def cards_of(config: Config, names: Sequence[str]) -> list[Card]:
    """Return the cards among GPUs of these names, else those with the memory of `run.hardware`."""
    found = [card for card in CARDS if any(card.name in name for name in names)]
    _, _, size = config.run.hardware.partition("x")
    return found or [card for card in CARDS if size == f"{card.memory / 1e9:.0f}GB"]


def texts(config: Config, shape: DecoderShape, cards: Sequence[Card]) -> Iterator[str]:
    """Yield a recipe's hours on each card, a better division of its GPUs, and what is assumed."""
    engines, learner = gpus_used(config, 1)
    number = len({*engines, *learner})
    for card in cards:
        if (count := run_count(config, shape, card)) is None:
            return
        yield f"By count, on {number} x {card.name}: {count_text(count)}"
        other = None if _shared(config) else divided(config, shape, card, number)
        better = other and run_count(other, shape, card)
        if other and better and better.run_s < GAIN * count.run_s:
            yield (
                f"By count, {division_text(other)} would take {duration(better.run_s)}:"
                " actors.count, engine.tensor_parallel, learner.ranks, launch.gpus."
            )
    if cards:
        length = config.run.expected_length * config.policy.max_length
        yield (
            f"This is no measurement: episodes of {length:,.0f} tokens (run.expected_length),"
            f" {PRODUCTS:.0%} of a card's bfloat16 products, {BANDWIDTH:.0%} of its bandwidth and"
            f" {TOKEN_S * 1000:.0f} ms a token; no time for environments, judges and evaluations."
        )


def count_text(count: RunCount) -> str:
    """Format a count: seconds of a step of its longest stage, and the whole."""
    one = count.longest
    return (
        f"generation {duration(one.generation_s)}, training {duration(one.training_s)} a step,"
        f" {count.steps} rl steps {duration(count.run_s)}."
    )


def division_text(config: Config) -> str:
    """Format the engines and ranks of a recipe."""
    engines, parallel = config.actors.count, config.engine.tensor_parallel
    of = f" of {parallel} GPUs" if parallel > 1 else ""
    ranks = config.learner.ranks
    return f"{engines} engine{'s'[: engines > 1]}{of} and {ranks} rank{'s'[: ranks > 1]}"
