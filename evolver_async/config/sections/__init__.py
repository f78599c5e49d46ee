"""All sections of a configuration, composed. Defaults, choices and ranges stand at the fields."""

from dataclasses import dataclass, field

from evolver_async.config.sections.agentevolver import Experience, Judge, Questioning, Reflection
from evolver_async.config.sections.data import Buffer, Tasks
from evolver_async.config.sections.learner import (
    Advantage,
    Correction,
    Critic,
    Learner,
    Loss,
    Safety,
    Selection,
)
from evolver_async.config.sections.rollout import Actors, Engine, Env, Rollout
from evolver_async.config.sections.run import Checkpoint, Eval, Metrics, Policy, Run, Stage
from evolver_async.config.sections.system import Launch, Security, Weights


@dataclass
class Config:
    """The whole configuration of a run. A recipe holds only what differs from the defaults."""

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
