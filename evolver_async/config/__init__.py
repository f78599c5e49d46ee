"""The configuration: its sections, composed in `Config`, and the error that names a wrong key."""

# ruff: noqa: F401  (the other packages import these names from here)

from evolver_async.config.sections import Config
from evolver_async.config.sections.agentevolver import (
    ExperienceConfig,
    JudgeConfig,
    LlmConfig,
    QuestioningConfig,
    ReflectionConfig,
)
from evolver_async.config.sections.data import BufferConfig, PartConfig, TasksConfig
from evolver_async.config.sections.learner import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    SafetyConfig,
    SelectionConfig,
)
from evolver_async.config.sections.rollout import (
    ActorsConfig,
    EngineConfig,
    EnvConfig,
    LatencyConfig,
    RolloutConfig,
)
from evolver_async.config.sections.run import (
    CheckpointConfig,
    EvalConfig,
    LoraConfig,
    MetricsConfig,
    PolicyConfig,
    RunConfig,
    StageConfig,
)
from evolver_async.config.sections.system import (
    GpusConfig,
    LaunchConfig,
    SecurityConfig,
    WeightsConfig,
)
from evolver_async.config.values.errors import ConfigError
