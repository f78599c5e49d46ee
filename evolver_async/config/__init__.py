"""The configuration: its sections, composed in `Config`, and the error that names a wrong key."""

# ruff: noqa: F401, F403  (the other packages import these names from here)

from evolver_async.config.sections import *
from evolver_async.config.sections.agentevolver import EmbeddingConfig, LlmConfig
from evolver_async.config.sections.data import DataConfig, PartConfig
from evolver_async.config.sections.rollout import LatencyConfig
from evolver_async.config.sections.run import LoraConfig
from evolver_async.config.sections.system import GpusConfig
from evolver_async.config.values.config_error import ConfigError
