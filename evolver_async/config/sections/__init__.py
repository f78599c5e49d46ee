"""All sections of a configuration, composed. Defaults, choices and ranges stand at the fields."""

from dataclasses import dataclass, field
from typing import Annotated

from evolver_async.config.sections.agentevolver import (
    ExperienceConfig,
    JudgeConfig,
    QuestioningConfig,
    ReflectionConfig,
)
from evolver_async.config.sections.data import BufferConfig, DataConfig, TasksConfig
from evolver_async.config.sections.learner import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    RewardModelConfig,
    SafetyConfig,
    SelectionConfig,
    TeacherConfig,
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
from evolver_async.config.values.rules import Scope


@dataclass
class Config:
    """The whole configuration of a run. A recipe holds only what differs from the defaults.

    The product changes none in place: `dataclasses.replace` makes another one.
    The scope of a section is that of its keys, unless a field says another one.
    """

    run: Annotated[RunConfig, Scope.RUN | Scope.DATA] = field(default_factory=RunConfig)
    policy: Annotated[PolicyConfig, Scope.RUN | Scope.WEIGHTS] = field(default_factory=PolicyConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    tasks: Annotated[TasksConfig, Scope.DATA] = field(default_factory=TasksConfig)
    data: Annotated[DataConfig, Scope.DATA] = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: Annotated[RewardConfig, Scope.RUN] = field(default_factory=RewardConfig)
    engine: Annotated[EngineConfig, Scope.RUN] = field(default_factory=EngineConfig)
    actors: Annotated[ActorsConfig, Scope.RUN] = field(default_factory=ActorsConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    experience: Annotated[ExperienceConfig, Scope.RUN] = field(default_factory=ExperienceConfig)
    judge: Annotated[JudgeConfig, Scope.RUN] = field(default_factory=JudgeConfig)
    questioning: Annotated[QuestioningConfig, Scope.RUN] = field(default_factory=QuestioningConfig)
    reflection: Annotated[ReflectionConfig, Scope.RUN] = field(default_factory=ReflectionConfig)
    selection: Annotated[SelectionConfig, Scope.LEARNER] = field(default_factory=SelectionConfig)
    advantage: Annotated[AdvantageConfig, Scope.LEARNER] = field(default_factory=AdvantageConfig)
    critic: Annotated[CriticConfig, Scope.LEARNER] = field(default_factory=CriticConfig)
    reward_model: Annotated[RewardModelConfig, Scope.LEARNER] = field(
        default_factory=RewardModelConfig
    )
    correction: Annotated[CorrectionConfig, Scope.LEARNER] = field(default_factory=CorrectionConfig)
    loss: Annotated[LossConfig, Scope.LEARNER] = field(default_factory=LossConfig)
    teacher: Annotated[TeacherConfig, Scope.LEARNER] = field(default_factory=TeacherConfig)
    learner: Annotated[LearnerConfig, Scope.LEARNER] = field(default_factory=LearnerConfig)
    stages: Annotated[list[StageConfig], Scope.RUN] = field(default_factory=lambda: [StageConfig()])
    eval: Annotated[EvalConfig, Scope.RUN] = field(default_factory=EvalConfig)
    weights: Annotated[WeightsConfig, Scope.RUN] = field(default_factory=WeightsConfig)
    checkpoint: Annotated[CheckpointConfig, Scope.RUN] = field(default_factory=CheckpointConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    metrics: Annotated[MetricsConfig, Scope.RUN] = field(default_factory=MetricsConfig)
    launch: Annotated[LaunchConfig, Scope.RUN] = field(default_factory=LaunchConfig)
    security: Annotated[SecurityConfig, Scope.RUN] = field(default_factory=SecurityConfig)

    @property
    def reads_reference(self) -> bool:
        """True if an rl stage with this configuration reads the reference."""
        return self.loss.kl_coef > 0 or self.experience.by_reference
