"""All sections of a configuration, composed. Defaults, choices and ranges stand at the fields."""

from dataclasses import dataclass, field

from evolver_async.config.sections.agentevolver import (
    ExperienceConfig,
    JudgeConfig,
    QuestioningConfig,
    ReflectionConfig,
)
from evolver_async.config.sections.data import BufferConfig, TasksConfig
from evolver_async.config.sections.learner import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    SafetyConfig,
    SelectionConfig,
)
from evolver_async.config.sections.reward import RewardConfig
from evolver_async.config.sections.rollout import (
    ActorsConfig,
    EngineConfig,
    EnvConfig,
    RolloutConfig,
)
from evolver_async.config.sections.run import (
    CheckpointConfig,
    EvalConfig,
    MetricsConfig,
    PolicyConfig,
    RunConfig,
    StageConfig,
)
from evolver_async.config.sections.system import LaunchConfig, SecurityConfig, WeightsConfig


@dataclass
class Config:
    """The whole configuration of a run. A recipe holds only what differs from the defaults."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    questioning: QuestioningConfig = field(default_factory=QuestioningConfig)
    reflection: ReflectionConfig = field(default_factory=ReflectionConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    stages: list[StageConfig] = field(default_factory=lambda: [StageConfig()])
    eval: EvalConfig = field(default_factory=EvalConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
