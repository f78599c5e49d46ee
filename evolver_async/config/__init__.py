"""The configuration: its sections, composed in `Config`, and the error that names a wrong key."""

# ruff: noqa: F401  (the other packages import these names from here)

from evolver_async.config.sections import Config
from evolver_async.config.sections.agentevolver import (
    Experience,
    Judge,
    Llm,
    Questioning,
    Reflection,
)
from evolver_async.config.sections.data import Buffer, Part, Tasks
from evolver_async.config.sections.learner import (
    Advantage,
    Correction,
    Critic,
    Learner,
    Loss,
    Safety,
    Selection,
)
from evolver_async.config.sections.rollout import Actors, Engine, Env, Latency, Rollout
from evolver_async.config.sections.run import (
    Checkpoint,
    Eval,
    Lora,
    Metrics,
    Policy,
    Run,
    Stage,
)
from evolver_async.config.sections.system import Gpus, Launch, Security, Weights
from evolver_async.config.values.errors import ConfigError
