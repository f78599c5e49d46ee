"""The configuration: dataclasses by wing, composed here; defaults live in the dataclasses alone."""

from dataclasses import dataclass, field

from evolver_async.config.actors import Actors, Engine, Env, Latency, Rollout
from evolver_async.config.learner import (
    Advantage,
    Correction,
    Critic,
    Learner,
    Loss,
    Safety,
    Selection,
)
from evolver_async.config.mechanisms import Experience, Judge, Llm, Questioning, Reflection
from evolver_async.config.run import (
    Buffer,
    Checkpoint,
    Eval,
    Gpus,
    Launch,
    Lora,
    Metrics,
    Part,
    Policy,
    Run,
    Security,
    Stage,
    Tasks,
    Weights,
)


@dataclass
class Config:
    """Everything a run needs to know. A recipe holds only what differs from these defaults."""

    run: Run = field(default_factory=Run)
    policy: Policy = field(default_factory=Policy)
    env: Env = field(default_factory=Env)
    tasks: Tasks = field(default_factory=Tasks)
    rollout: Rollout = field(default_factory=Rollout)
    engine: Engine = field(default_factory=Engine)
    actors: Actors = field(default_factory=Actors)
    buffer: Buffer = field(default_factory=Buffer)
    experience: Experience = field(default_factory=Experience)
    judge: Judge = field(default_factory=Judge)
    questioning: Questioning = field(default_factory=Questioning)
    reflection: Reflection = field(default_factory=Reflection)
    selection: Selection = field(default_factory=Selection)
    advantage: Advantage = field(default_factory=Advantage)
    critic: Critic = field(default_factory=Critic)
    correction: Correction = field(default_factory=Correction)
    loss: Loss = field(default_factory=Loss)
    learner: Learner = field(default_factory=Learner)
    stages: list[Stage] = field(default_factory=lambda: [Stage()])
    eval: Eval = field(default_factory=Eval)
    weights: Weights = field(default_factory=Weights)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    safety: Safety = field(default_factory=Safety)
    metrics: Metrics = field(default_factory=Metrics)
    launch: Launch = field(default_factory=Launch)
    security: Security = field(default_factory=Security)


__all__ = [
    "Actors",
    "Advantage",
    "Buffer",
    "Checkpoint",
    "Config",
    "Correction",
    "Critic",
    "Engine",
    "Env",
    "Eval",
    "Experience",
    "Gpus",
    "Judge",
    "Latency",
    "Launch",
    "Learner",
    "Llm",
    "Lora",
    "Loss",
    "Metrics",
    "Part",
    "Policy",
    "Questioning",
    "Reflection",
    "Rollout",
    "Run",
    "Safety",
    "Security",
    "Selection",
    "Stage",
    "Tasks",
    "Weights",
]
