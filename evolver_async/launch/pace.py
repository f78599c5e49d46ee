"""Pace of a model on this machine, timed before a start, and what follows for a run: seconds of a
step, and a proposal of adapters. Pure but for the file in the run's directory.

The estimate is one of computations alone: replies as long as they may be, on processors that do
nothing else, without the time of environments, judges and groups that are discarded.
"""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.model_defaults import OBSERVATION
from evolver_async.config.shape import shape_of
from evolver_async.durations import duration
from evolver_async.files import write_whole
from evolver_async.launch.run_directory import record_of
from evolver_async.memory.host_memory import ADAPTER_RANK, available_bytes, uses_gpu
from evolver_async.memory.plan import memory_plan
from evolver_async.memory.units import gib
from evolver_async.process.processors import processors

FILE = "pace.json"
LONG_STEP_S = 20.0  # for a longer step shorter ones are proposed
SAVED = 0.75  # share of the present step below which adapters are proposed


class Pace(msgspec.Struct, frozen=True):
    """Times of one model on one process of each kind, in seconds.

    `decode_s`: of one token of each of `rows` replies; `forward_s`, `backward_s`: of a
    token; `update_s`: of the optimizer. `scores`: forward passes without gradient a token.
    `shares`: a group's prompt is computed once. `prompt`: tokens of a first prompt.
    """

    rows: int
    decode_s: float
    forward_s: float
    backward_s: float
    update_s: float
    scores: float
    shares: bool
    prompt: int

    def write(self, run_dir: Path) -> None:
        write_whole(run_dir / FILE, msgspec.json.encode(self).decode())

    @classmethod
    def read(cls, run_dir: Path) -> "Pace | None":
        """Return the pace that was timed for a run, None if none was."""
        return record_of(run_dir / FILE, cls)


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step: of the actors, of the learner, and of both together.

    `apart`: they compute at the same time. `adapted_s`: of both with adapters in place of full
    training.
    """

    episodes: int
    playing_s: float
    training_s: float
    step_s: float
    adapted_s: float
    apart: bool


def can_time(config: Config) -> bool:
    """True if the model computes on CPUs of this host, in this repository's own engine."""
    gpu = uses_gpu(config.engine.device) or uses_gpu(config.learner.device)
    alone = config.launch.kind != "ray" and config.learner.ranks == 1
    return config.engine.kind == "torch" and alone and not gpu


def step_estimate(config: Config, pace: Pace, cores: int = 0) -> StepEstimate | None:
    """Estimate a step of the first stage of reinforcement learning, None without one.

    `cores`: processors for all processes, 0 for those of this process.
    """
    kinds = [stage.kind for stage in config.stages]
    if "rl" not in kinds:
        return None
    stage, cores = stage_config(config, kinds.index("rl")), cores or processors()
    learner, rollout, actors = stage.learner, stage.rollout, config.actors.bounds()[0]
    groups, size, turns = learner.groups_per_step, rollout.group_size, rollout.max_turns
    episodes, longest = groups * size, stage.policy.max_length
    prompts = (groups if pace.shares else episodes) * pace.prompt
    later = turns * rollout.max_tokens + (turns - 1) * OBSERVATION
    later = max(1, min(later, longest - pace.prompt))
    sampled = min(later, turns * rollout.max_tokens)
    read = groups * pace.prompt + episodes * (later - sampled)
    waves = -(-episodes // (pace.rows * actors))
    serial = config.launch.kind == "serial"
    at_once = 1 if serial else actors
    playing_s = waves * sampled * pace.decode_s + read * pace.forward_s / at_once
    playing_s *= actors if serial else 1
    tokens = prompts + episodes * later
    scored_s = tokens * pace.scores * pace.forward_s
    training_s = tokens * (pace.forward_s + pace.backward_s) + scored_s
    adapted_s = training_s - tokens * pace.backward_s / 2  # no gradients of the weights
    training_s += learner.minibatches * pace.update_s
    apart = not serial and stage.buffer.max_staleness > 0

    def both(training_s: float) -> float:
        if not apart:
            return playing_s + training_s
        work_s = playing_s * at_once * config.engine.threads + training_s * learner.threads
        return max(playing_s, training_s, work_s / cores)

    adapted_s = training_s if config.policy.lora.rank else adapted_s
    return StepEstimate(
        episodes, playing_s, training_s, both(training_s), both(adapted_s), apart=apart
    )


def lines(texts: Iterable[str]) -> list[str]:
    """Return the lines of texts for a console."""
    wrapper = textwrap.TextWrapper(100, subsequent_indent="  ", break_on_hyphens=False)
    return [line for text in texts for line in wrapper.wrap(text)]


def time_texts(config: Config, pace: Pace | None) -> Iterator[str]:
    """Yield the time of a step, and adapters if they would save much of it.

    `pace`: None if the model was not timed.
    """
    found = None if pace is None else step_estimate(config, pace)
    if found is not None:
        steps = sum(stage.steps for stage in config.stages if stage.kind == "rl")
        how = "at the same time" if found.apart else "one after the other"
        whole = f", {steps} steps about {duration(steps * found.step_s)}" if steps else ""
        yield (
            f"estimate: a step of {found.episodes} episodes takes about {duration(found.step_s)}"
            f" (playing {duration(found.playing_s)}, training {duration(found.training_s)}, {how})"
            f"{whole}, if every reply has its {config.rollout.max_tokens} tokens"
        )
        if found.step_s > LONG_STEP_S and found.adapted_s < SAVED * found.step_s:
            yield (
                f"adapters would make that about {duration(found.adapted_s)} a step:"
                f" policy.lora.rank={ADAPTER_RANK}, with a learning rate of its own"
            )


def memory_texts(config: Config) -> Iterator[str]:
    """Yield the plan of a run's memory beside what this host has; nothing for an unknown shape."""
    if (shape := shape_of(config)) is not None:
        gpus = uses_gpu(config.learner.device), uses_gpu(config.engine.device)
        plan = memory_plan(config, shape, learner_gpu=gpus[0], actor_gpu=gpus[1])
        parts = [
            f"{f'{one.count} x ' if one.count > 1 else ''}{one.role} {gib(one.private)}"
            for one in plan.processes
        ]
        yield (
            f"memory: {gib(plan.host)} at most, of {gib(available_bytes())} available"
            f" ({', '.join(parts)}, files of weights {gib(plan.shared)})"
        )
