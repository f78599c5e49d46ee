"""The learner's numbers, as a checkpoint holds them in `state.json`.

Training is a pure function of these, of the tensors beside them, and of the groups taken
afterwards.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evolver_async.files import parsed
from evolver_async.schema import Group, WeightId

FILE = "state.json"


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation of `version` on the tasks of `stage` that has no result yet.

    `changed_take`: of these weights, as in `LearnerState`. `sets`: those of `eval.sets` that belong
    to it.
    """

    version: int
    changed_take: int
    stage: int
    episodes: int
    sets: list[str] = field(default_factory=list)
    progress: dict[str, float] = field(default_factory=dict)  # of the run, with these weights


NO_EVALUATION = PendingEvaluation(version=-1, changed_take=-1, stage=0, episodes=0)


@dataclass
class Track:
    """Running mean and variance of one signal in a stage.

    `first` is the mean at the end of the warm-up, `peak` and `least` are the largest and the
    smallest mean since.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0
    first: float = 0.0
    peak: float = 0.0
    least: float = 0.0


@dataclass
class Watched:
    """Memory of the alarms: tracks by signal, suspicious steps in a row by alarm.

    `judge_totals`: totals of the judge's audit after each of the last steps. `not_arrived`: totals
    of updates that did not arrive, as the actors reported them before and after the last step.
    """

    tracks: dict[str, Track] = field(default_factory=dict)
    suspicious: dict[str, int] = field(default_factory=dict)
    judge_totals: list[list[float]] = field(default_factory=list)
    not_arrived: list[float] = field(default_factory=list)


@dataclass
class LearnerState:
    """Counters of a run: `take` counts SAMPLEs and `version` publishes, over all stages.

    Stages other than rl change the weights many times within one version. `changed_take`, the take
    at which the weights last changed, identifies them among the checkpoints of the present line.
    """

    lineage: int = 0
    take: int = 0
    version: int = 0
    changed_take: int = 0
    stage: int = 0
    stage_take: int = 0  # take at which the stage began
    entered: int = -1  # the stage whose beginning has been carried out
    stage_tokens: int = 0  # ACTION tokens trained in the stage
    stage_seconds: float = 0.0
    seconds: float = 0.0
    env_steps: int = 0  # turns of the groups taken, each once, over all stages
    explored_turns: int = 0  # turns of explorations, as the buffer last counted them
    tokens: int = 0  # ACTION tokens trained, over all stages
    baseline: float = 0.0  # of the reinforce estimator
    critic_steps: int = 0  # steps that trained the critic
    bad_steps: int = 0  # non-finite, in a row
    empty_steps: int = 0  # nothing selected, in a row
    masked_steps: int = 0  # nearly everything masked, in a row
    eval_success: float = -1.0  # the newest evaluation of the stage; -1 before the first
    pending: list[PendingEvaluation] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)  # by the alarms, in this stage
    rollbacks: int = 0  # of this stage
    discard: bool = False  # after a rollback: groups taken since then are not taken again
    finished: bool = False  # the last stage is over

    @property
    def head(self) -> WeightId:
        """Weights of the present version."""
        return WeightId(lineage=self.lineage, step=self.version)

    @property
    def stage_step(self) -> int:
        """Steps of the stage before this one."""
        return self.take - self.stage_take

    def count(self, groups: list[Group], tokens: int, updates: int) -> None:
        """Count a take of these groups: its ACTION tokens trained, and updates of the weights."""
        self.take += 1
        if updates:
            self.changed_take = self.take
        self.stage_tokens += tokens
        self.tokens += tokens
        played = (group for group in groups if group.use == 0)  # once, however often it is trained
        turns = (len(one.turn_rewards) for group in played for one in group.trajectories)
        self.env_steps += sum(turns)

    def count_explorations(self, counters: dict[str, float]) -> None:
        """Take over the turns of explorations from the counters of the buffer."""
        turns = counters.get("questioning/explored_turns", 0.0)
        self.explored_turns = max(self.explored_turns, int(turns))

    def progress(self) -> dict[str, float]:
        """Return the axes of a row besides its step and its seconds."""
        return {
            "progress/env_steps": float(self.env_steps + self.explored_turns),
            "progress/tokens": float(self.tokens),
        }

    def write(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, directory: Path) -> "LearnerState":
        numbers = parsed((directory / FILE).read_text())
        pending = [PendingEvaluation(**one) for one in numbers.pop("pending")]
        watched = numbers.pop("watched")
        tracks = {name: Track(**track) for name, track in watched["tracks"].items()}
        watched = Watched(**watched | {"tracks": tracks})
        return cls(**numbers, pending=pending, watched=watched)
