"""A summary of a configuration in words: processes, stages, steps and the way of weights."""

from evolver_async.config.load import stage_config
from evolver_async.config.sections import Config
from evolver_async.config.sections.weight_channel import channel


def plan(config: Config) -> list[str]:
    """Return one line for each subject."""
    eval_ = config.eval
    steps = [stage.steps for stage in config.stages]
    total = str(sum(steps)) if all(steps) else "as many as its stages' limits allow"
    stages = []
    for index, stage in enumerate(config.stages):
        limits = {
            "steps": stage.steps,
            "tokens": stage.tokens,
            "hours": stage.hours,
            "eval success": stage.until_success,
        }
        until = " or ".join(f"{value:g} {name}" for name, value in limits.items() if value)
        own = stage_config(config, index)
        groups = f"{own.learner.groups_per_step} groups of {own.rollout.group_size}"
        turns = "an agent" if own.rollout.agent else f"{own.rollout.format} turns"
        line = f"stage {index}: {stage.kind} in {own.env.name} by {turns}, until {until}"
        stages.append(f"{line}, each step of {groups}")
    every = f"every {eval_.every} versions " if eval_.every else "after each stage "
    minutes = config.checkpoint.minutes
    minutes = f", and after {minutes:g} minutes" if minutes else ""
    return [
        f"processes: {_processes(config)}",
        *stages,
        f"steps: {total}",
        f"weights: {channel(config)} by {config.weights.address or config.weights.dir}",
        f"evaluations: {every}over {eval_.episodes} episodes, after the last stage"
        f" over {eval_.final_episodes} of the split test",
        f"checkpoints: every {config.checkpoint.every} steps{minutes}",
        f"W&B: {config.metrics.wandb}",
        f"run directory: {config.run.dir}/{config.run.name or '<recipe>-<time>'}",
    ]


def _processes(config: Config) -> str:
    if config.launch.kind == "serial":
        return f"1, with {config.actors.count} actors in one loop under a virtual clock"
    parts = ["a launcher", "a buffer"]
    if config.experience.pooled:
        parts.append("an experience service")
    ranks = config.learner.ranks
    where = f" on {config.learner.hosts} hosts" * (config.learner.hosts > 1)
    parts.append("a learner" if ranks == 1 else f"a learner of {ranks} ranks{where}")
    count, engine = config.actors.count, config.engine.kind
    return f"{', '.join(parts)}, {count} actor{'s' * (count != 1)} ({engine} engine)"
