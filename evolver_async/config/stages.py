"""What the stages of a run and the tasks of a stage may be: errors name the key."""

from evolver_async.config import Config, Stage
from evolver_async.config.values import check_number, check_params, choice, require

SUPERVISED = ("sft", "world_model", "reflect")  # trained on what actors write by script
STAGE_KINDS = ("sft", "world_model", "reflect", "dpo", "rl")


def check_stages(config: Config) -> None:
    """Kinds and limits; what a kind asks from other sections is `check_limits`."""
    require(bool(config.stages), "stages", "needs at least one stage")
    for index, stage in enumerate(config.stages):
        where = f"stages[{index}]"
        choice(f"{where}.kind", stage.kind, STAGE_KINDS)
        limits = ("steps", "tokens", "hours", "until_success")
        for name in (*limits, "expert_fraction", "alternatives"):
            check_number(f"{where}.{name}", getattr(stage, name))
        for name in ("until_success", "expert_fraction"):
            value = getattr(stage, name)
            require(value <= 1, f"{where}.{name}", f"must be at most 1, is {value}")
        require(stage.alternatives > 0, f"{where}.alternatives", "must be at least 1")
        limited = any(getattr(stage, name) for name in limits)
        require(limited, where, "has no limit: give it steps, tokens, hours or until_success")


def check_limits(config: Config, index: int) -> None:
    """What the limits of a stage, and its kind, ask from the other sections."""
    stage, where = config.stages[index], f"stages[{index}]"
    groups = config.learner.groups_per_step
    require(
        not stage.until_success or config.eval.every > 0,
        f"{where}.until_success",
        "needs evaluations: eval.every is 0",
    )
    require(
        stage.kind == "rl" or any((stage.steps, stage.tokens, stage.hours)),
        f"{where}.until_success",
        f"a stage of kind {stage.kind} is evaluated only after its end: give it steps, tokens or"
        " hours",
    )
    require(
        stage.kind != "dpo" or config.rollout.group_size > 1,
        "rollout.group_size",
        f"{where} compares the members of a group, so it needs at least 2",
    )
    require(
        not stage.refresh_reference or stage.kind != "dpo",
        f"{where}.refresh_reference",
        "the reference of a dpo stage always is the policy that it begins with",
    )
    require(
        not stage.refresh_reference or config.loss.kl_coef > 0,
        f"{where}.refresh_reference",
        "there is no reference: loss.kl_coef is 0",
    )
    require(
        config.learner.decay == "none" or stage.steps > 0,
        f"{where}.steps",
        f"learner.decay={config.learner.decay} runs over the stage's steps, so it needs some",
    )
    decays = config.advantage.kind == "adca" and config.advantage.alpha_final >= 0
    require(
        stage.kind != "rl" or not decays or stage.steps > 0,
        f"{where}.steps",
        "advantage.alpha_final is reached at the stage's last step, so it needs some",
    )
    require(
        stage.kind not in SUPERVISED or config.buffer.demo_groups >= groups,
        "buffer.demo_groups",
        f"must be at least learner.groups_per_step ({groups}), or {where} waits for ever",
    )


def check_tasks(config: Config) -> None:
    """Refuse keys of `tasks` that exclude each other or cannot act."""
    tasks = config.tasks
    require(
        not (tasks.path and tasks.mixture),
        "tasks.mixture",
        "a file of tasks names their environments itself: tasks.path",
    )
    require(
        not (tasks.path and tasks.train),
        "tasks.train",
        "a file of tasks has as many as it has: leave it at 0 with tasks.path",
    )
    for name in ("solved", "failed"):
        require(
            getattr(tasks, name) == 1 or tasks.train > 0 or bool(tasks.path) or tasks.synthetic > 0,
            f"tasks.{name}",
            "no task is met twice: with tasks.train=0 leave it at 1, or set tasks.train",
        )
    for index, part in enumerate(tasks.mixture):
        where = f"tasks.mixture[{index}]"
        require(bool(part.env), f"{where}.env", "names no environment")
        check_number(f"{where}.weight", part.weight)
        require(part.weight > 0, f"{where}.weight", "must be greater than 0")
        check_params(f"{where}.params", part.params)


def limit_reached(stage: Stage, *, steps: int, tokens: int, seconds: float, success: float) -> bool:
    """True if a stage with these totals has come to the first of its limits."""
    return (
        0 < stage.steps <= steps
        or 0 < stage.tokens <= tokens
        or 0 < stage.hours * 3600 <= seconds
        or 0 < stage.until_success <= success
    )
