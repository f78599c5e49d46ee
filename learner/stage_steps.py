"""Steps of a run's stages: the beginning of a stage, and one take by the kind of its stage."""

import logging

from evolver_async.lineages import Fork
from evolver_async.schema import Group
from learner.diagnostics.step_result import StepResult
from learner.run.rank_server import Leader
from learner.schedule import Stages
from learner.state import LearnerState
from learner.step import Updater

log = logging.getLogger(__name__)


def enter_stage(updater: Updater | Leader, stages: Stages, state: LearnerState) -> None:
    """Carry out a stage's beginning once, and make the reference at every start."""
    index = state.stage
    stage = stages(index, state.rollbacks)
    if state.entered < index:
        updater.begin_stage(stage, index)
        state.entered = index
    updater.ensure_reference(stage, index)
    log.info("stage %d: %s", index, stages.config.stages[index].kind)


def train_take(
    updater: Updater | Leader,
    stages: Stages,
    state: LearnerState,
    groups: list[Group],
    forks: dict[int, Fork],
) -> StepResult:
    """Train one step of the current stage's kind."""
    stage, written = stages(state.stage, state.rollbacks), stages.config.stages[state.stage]
    match written.kind:
        case "rl":
            return updater.rl(stage, groups, state, forks, written.steps)
        case "dpo":
            return updater.dpo(stage, groups, state, forks, written.steps)
    return updater.sft(stage, groups, state, written.steps)
