"""What an agent of one's own rules out, and what a judge of its episodes needs."""

from evolver_async.config import Config
from evolver_async.config.values import require


def check_agent(config: Config) -> None:
    """Raises ConfigError for what cannot be where `rollout.agent` plays the episodes."""
    judged = config.rollout.agent_reward == "judged"
    if not config.rollout.agent:
        require(not judged, "rollout.agent_reward", "nobody to be judged: rollout.agent is not set")
        return
    require(
        config.launch.kind != "serial",
        "rollout.agent",
        "an agent needs real time, which launch.kind=serial has not",
    )
    for name, value, usual in (
        ("rollout.format", config.rollout.format, "think_answer"),
        ("rollout.context", config.rollout.context, "full"),
        ("rollout.system_prompt", config.rollout.system_prompt, ""),
        ("env.prompt", config.env.prompt, "auto"),
    ):
        require(value == usual, name, "rollout.agent decides itself how its turns are written")
    guide, questioner = config.experience.kind, config.questioning.kind
    require(
        guide == "none",
        "experience.kind",
        f"{guide} writes into prompts, and rollout.agent writes its own",
    )
    require(
        questioner == "none",
        "questioning.kind",
        f"{questioner} explores an environment, and rollout.agent plays without one",
    )
    require(
        config.judge.kind != "rule",
        "judge.kind",
        "rule needs the environment's scores, and rollout.agent plays without one",
    )
    if not judged:
        return
    for key in ("url", "model"):
        value = getattr(config.judge.llm, key)
        require(bool(value), f"judge.llm.{key}", "rollout.agent_reward=judged needs one")
    require(
        config.judge.timeout_s < config.buffer.stall_s,
        "judge.timeout_s",
        f"must be below buffer.stall_s ({config.buffer.stall_s:g}): else groups that are being"
        " judged are given to others",
    )
