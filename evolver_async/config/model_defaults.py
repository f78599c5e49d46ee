"""Defaults for the model at hand: a layer between those of the dataclasses and the recipe.

The defaults of the dataclasses are those of the tiny preset. With `policy.path` set, the keys below
follow from the sizes of that model, unless the recipe or the command line names them. The layer
depends on the model and on the recipe with its rows, not on the machine: a recipe resolves alike
everywhere.
"""

from collections.abc import Collection, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from evolver_async.config import hub
from evolver_async.config.sampled_rows import row_lengths
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import SUPERVISED, PolicyConfig
from evolver_async.config.shape import GGUF, DecoderShape, shape_of

GIB = 1 << 30
FLOAT = 4  # bytes: on a CPU weights are float32, whatever the type of products
# Full training. A power law of the number of parameters through two rates that work: 1e-5 with
# SmolLM2-135M (its arithmetic, .23 to .77 in 15 steps) and 1e-6 with 7B (AgentEvolver, verl's and
# DAPO's recipes). Continued, it meets the rate of the preset at a quarter of a million parameters.
FULL_RATE, FULL_PARAMETERS = 1e-5, 134.5e6
EXPONENT = -0.583  # of one decade of the rate between 134.5 million and 7 billion parameters
LEAST_RATE, LARGEST_RATE = 1e-6, 5e-4
# Adapters: ten times the rate of full training whatever the size of the model ("LoRA Without
# Regret", Thinking Machines 2025), here 1e-4 as in most published recipes.
ADAPTER_RATE = 1e-4
SUPERVISED_FACTOR = 10  # demonstrations bear larger rates: SmolLM2 itself was tuned at 1e-3
REPLY, OBSERVATION, PROMPT = 256, 128, 512  # tokens of a turn, of what follows it, of the first one
LONGEST_REPLY = 1024
CONTEXTS, LEAST_CONTEXT = (1024, 4096), 256  # tokens, and where the lengths of prompts are known
TEMPLATE, MARGIN = 64, 1.25  # tokens of a template's own; for prompts that a sample has missed
KV_BYTES = 4 * GIB  # of all engines together
ACTIVATION_BYTES = 4 * GIB  # of one pass of the learner
# Of a pass with one row as long as the context: recomputing layers costs a third more time in every
# pass, for rows that are rare.
ROW_BYTES = 7 * GIB
STATE_BYTES = 12  # of a trained parameter in a checkpoint: value and two moments
LARGE_CHECKPOINT = 4 * GIB


class Default(NamedTuple):
    """A value of the layer, and the reason for it in a few words."""

    value: Any
    why: str


def model_defaults(config: Config, named: Collection[str]) -> dict[str, Default]:
    """Return the defaults of the layer by key; none for the preset, or if there is no model.

    `config` is the recipe without the layer, `named` its keys and those of the command line.
    """
    if not _has_model(config.policy):
        return {}
    made: dict[str, Default] = {}

    def default(key: str, value: Any, why: str) -> Any:
        """Make a default of a key that is not named; return the key's value."""
        if key not in named:
            made[key] = Default(value, why)
            return value
        section, _, name = key.partition(".")
        return getattr(getattr(config, section), name)

    shape = shape_of(config)
    size = count_text(shape.parameters) if shape else "model of unknown size"
    kind = "adapters" if config.policy.lora.rank else "full training"
    default("learner.lr", _rounded(rate_of(config, shape)), f"{size}, {kind}")
    default("learner.decay", "none", "a trained model's rate is small throughout")
    groups = default("learner.groups_per_step", 16, "trained model: few, dear episodes")
    default("learner.minibatches", min(2, groups), "trained model: small steps away from its data")
    lag = max(2, config.actors.weight_lag)
    default("buffer.max_staleness", lag, "episodes cost more than waiting")
    default("buffer.max_ready", 1.0, "no episode is made only to grow old")
    longest = _lengths(config, shape, default)
    if shape is not None:
        _sizes(config, shape, longest, default)
    return made


def _has_model(policy: PolicyConfig) -> bool:
    """Return True for a directory, a .gguf file, or a hub's model in the cache or to download."""
    if not policy.path:
        return False
    if hub.is_id(policy.path):
        return policy.download or hub.cached(policy) is not None
    place = Path(policy.path).expanduser()
    return place.is_dir() or (place.suffix == GGUF and place.is_file())


def _lengths(config: Config, shape: DecoderShape | None, default: Any) -> int:
    """Default the tokens of a turn and of a context; return the latter."""
    rollout, rows = config.rollout, row_lengths(config)
    budget = config.learner.token_budget * config.learner.context_parallel
    turns = {"full": rollout.max_turns, "window": rollout.window + 1, "single": 1}[rollout.context]
    turns = min(turns, rollout.max_turns)
    prompt, reply, why_reply = PROMPT, REPLY, "a reply in words is not cut"
    if rows is not None:
        prompt = TEMPLATE + ceil(MARGIN * rows.prompt)
        if 2 * rows.answer > REPLY:
            reply = min(LONGEST_REPLY, _upwards(2 * rows.answer, 64))
            why_reply = f"twice the longest answer of {rows.rows} rows, {rows.answer} tokens"
    played = (
        reply if default("rollout.max_tokens", reply, why_reply) == reply else rollout.max_tokens
    )
    if rows is None:
        wanted = _upwards(prompt + turns * (played + OBSERVATION), 256)
        longest = min(CONTEXTS[1], max(CONTEXTS[0], wanted))
        why = f"{turns} turns of {played} tokens and their prompts"
    else:
        later = turns * played + (turns - 1) * OBSERVATION
        longest = max(LEAST_CONTEXT, min(CONTEXTS[1], _upwards(prompt + later, 64)))
        longest = max(longest, _upwards(prompt + played, 64))
        why = f"{turns} x {played} and prompts of {rows.prompt} tokens, in {rows.rows} rows"
    if shape is not None and 0 < shape.positions < longest:
        longest, why = shape.positions, "the model has no more positions"
    longest = default("policy.max_length", min(longest, budget or longest), why)
    if reply > longest - min(prompt, longest // 2):
        default("rollout.max_tokens", max(1, longest // 2), "half of policy.max_length")
    return longest


def _upwards(count: float, step: int) -> int:
    """Round up to a multiple of `step`."""
    return ceil(count / step) * step


def _sizes(config: Config, shape: DecoderShape, longest: int, default: Any) -> None:
    """Default what has to fit into memory, and the intervals of what is large or slow."""
    learner, engine, actors = config.learner, config.engine, config.actors
    count = actors.count
    alone = not (actors.min or actors.max or config.launch.gpus.actors)
    if alone and config.launch.kind != "ray":
        count = default("actors.count", 1, "each holds the model and a KV cache")
    on_cpu = "cuda" not in learner.device
    kept = shape.layers * shape.activations * FLOAT
    share = ceil(longest / learner.context_parallel)
    if on_cpu and kept * share > ROW_BYTES:
        why = f"a row of {longest} tokens would keep {kept * share / GIB:.1f} GiB"
        default("learner.gradient_checkpointing", True, why)
        kept = shape.layers * shape.hidden * FLOAT
    if on_cpu:
        tokens = min(16384, max(share, ACTIVATION_BYTES // kept // 256 * 256))
        default("learner.token_budget", tokens, f"a pass keeps {kept * tokens / GIB:.1f} GiB")
    if engine.kind == "torch" and "cuda" not in engine.device:
        context = 2 * shape.layers * shape.keys * FLOAT * (longest + 1)
        played = actors.groups * config.rollout.group_size
        slots = max(1, min(64, played, KV_BYTES // (count * context)))
        default("engine.slots", slots, f"KV cache of {slots * context / GIB:.1f} GiB")
    sets = any(chosen.every for chosen in config.eval.sets.values())
    every = config.eval.every if sets else default("eval.every", 10, "steps are long")
    default("eval.episodes", 128, "greedy replies of a trained model take long")
    default("eval.final_episodes", 128, "as many as before")
    written = STATE_BYTES * shape.parameters
    steps = (every or 10) * (1 if written <= LARGE_CHECKPOINT else 5)
    default("checkpoint.every", steps, _checkpoint_text(config, written))


def _checkpoint_text(config: Config, written: int) -> str:
    return "evaluated weights" if config.policy.lora.rank else f"each takes {written / GIB:.1f} GiB"


def rate_of(config: Config, shape: DecoderShape | None) -> float:
    """Return the learning rate for a trained model of this shape, by the kind of training."""
    if config.policy.lora.rank:
        return ADAPTER_RATE
    if shape is None:
        return LEAST_RATE
    rate = FULL_RATE * (shape.parameters / FULL_PARAMETERS) ** EXPONENT
    return min(LARGEST_RATE, max(LEAST_RATE, rate))


def _rounded(rate: float) -> float:
    """Round to two digits: 1e-5 for a model of 134.5 million parameters."""
    return float(f"{rate:.1e}")


def count_text(parameters: float) -> str:
    """Format a number of parameters: 135M, 7.6B."""
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2g}B" if parameters < 1e10 else f"{parameters / 1e9:.0f}B"
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.2g}M"


def said(config: Config, reasons: Mapping[str, str]) -> list[str]:
    """Return the text for the console: every key of the layer with its value and its reason."""
    parts = []
    for key, why in reasons.items():
        section, _, name = key.partition(".")
        parts.append(f"{key}={getattr(getattr(config, section), name)} ({why})")
    return [f"for the model at hand: {', '.join(parts)}"] if parts else []


def large_rates(config: Config, stages: list[Config]) -> Iterator[str]:
    """Yield the stages' learning rates that would ruin a trained model, each in one sentence.

    A model of 135 million parameters went from .094 of success to 0 in one step at 5e-4, fifty
    times its rate, and no alarm tells that from a model that never learned.
    """
    if not _has_model(config.policy):
        return
    shape = shape_of(config)
    rate = _rounded(rate_of(config, shape))
    size = f"a trained model of {count_text(shape.parameters)}" if shape else "a trained model"
    kind = "adapters" if config.policy.lora.rank else "full training"
    for index, (written, stage) in enumerate(zip(config.stages, stages, strict=True)):
        bound = config.safety.max_lr * (SUPERVISED_FACTOR if written.kind in SUPERVISED else 1)
        if stage.learner.lr <= bound * rate:
            continue
        own = "lr" in written.override.get("learner", {})
        yield (
            f"{f'stages[{index}].override.' if own else ''}learner.lr: {stage.learner.lr:g} is"
            f" {stage.learner.lr / rate:.0f} times the rate for {kind} of {size}, {rate:g};"
            f" set that or a smaller one (safety.max_lr allows more){''.join(_odd(stage))}"
        )


def _odd(stage: Config) -> Iterator[str]:
    """Yield what else of a stage's settings is made for the preset."""
    if stage.loss.entropy_coef > 0.003:
        yield f"; loss.entropy_coef {stage.loss.entropy_coef:g} is for the preset, too"
    if stage.rollout.max_tokens < 16:
        yield f"; rollout.max_tokens {stage.rollout.max_tokens} cuts its replies"
