"""Environments in processes: the same episodes, and what happens where a process does not live."""

import asyncio

import pytest
import selfish
from rollouts import RIGHT, Corridor, FakeEngine, corridor, roll_out, say, setting

from actors.checks.thread_trial import check_threads
from actors.envs.base import EnvironmentFailure, Solvable, Tooled
from actors.envs.env_process import EnvProcesses, make_remote
from actors.rollout.environment import IdleEnvironments, TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.ticket_progress import TicketProgress
from evolver_async.config import ConfigError
from evolver_async.config.load import from_dict

pytestmark = pytest.mark.process
MEMBERS = 4
RUNNER = asyncio.Runner()  # the processes belong to one loop


def walkers() -> FakeEngine:
    return FakeEngine({f"0/{member}/0": say(RIGHT, RIGHT, RIGHT) for member in range(MEMBERS)})


def isolated(processes: int = 2, step_timeout_s: float = 60.0) -> Setting:
    idle = IdleEnvironments(processes)
    return setting(isolation="process", idle=idle, step_timeout_s=step_timeout_s)


def test_processes_play_what_threads_cannot_share() -> None:
    asked = corridor(MEMBERS, env=selfish.Selfish)
    with pytest.raises(EnvironmentFailure, match="two at once"):
        roll_out(asked, setting(isolation="thread"), walkers())
    how = isolated()
    found = roll_out(asked, how, walkers(), run=RUNNER.run)
    again = roll_out(asked, how, walkers(), run=RUNNER.run)
    plain = roll_out(corridor(MEMBERS), setting(), walkers())
    assert [one.reward for one in found + again] == 2 * [one.reward for one in plain]
    assert len(how.idle.processes._living) == 2, "both groups had the same two"
    assert all(process.held == 0 for process in how.idle.processes._living)
    how.idle.processes.close()


@pytest.mark.parametrize(
    ("what", "named"), [("raise", "OSError: the floor"), ("leave", "ended it")]
)
def test_a_process_that_does_not_live_is_its_episodes_failure(what: str, named: str) -> None:
    how = isolated(processes=1)
    with pytest.raises(EnvironmentFailure, match=f"Selfish.*{named}") as caught:
        roll_out(corridor(env=selfish.Selfish, at=1, what=what), how, walkers(), run=RUNNER.run)
    if what == "raise":
        notes = "".join(getattr(caught.value.cause, "__notes__", []))
        assert "rollouts.py" in notes, "the traceback of the process"
    assert len(roll_out(corridor(env=selfish.Selfish), how, walkers(), run=RUNNER.run)) == 1, (
        "goes on"
    )
    how.idle.processes.close()


def test_a_call_that_hangs_ends_its_process() -> None:
    how = isolated(processes=1, step_timeout_s=1.0)
    with pytest.raises(EnvironmentFailure, match=r"step_timeout_s|did not return"):
        roll_out(corridor(env=selfish.Selfish, at=0, what="hang"), how, walkers(), run=RUNNER.run)
    assert how.idle.processes._living[0].end_reason
    patient = setting(isolation="process", idle=how.idle, step_timeout_s=60.0)
    assert len(roll_out(corridor(env=selfish.Selfish), patient, walkers(), run=RUNNER.run)) == 1
    how.idle.processes.close()


def test_a_remote_environment_can_do_what_its_class_can() -> None:
    processes, params = EnvProcesses(1), {"length": 1}
    env = make_remote(processes.place(), "selfish:Selfish", params, 60.0)
    assert isinstance(env, Tooled) and not isinstance(env, Solvable)
    assert env.instructions == "walk"
    env.reset(corridor().task, 3)
    assert env.instructions.startswith("walk in "), "as reset left it"
    waits = make_remote(processes.place(), "selfish:Async", params, 60.0)
    assert waits.reset(corridor().task, 3) == "at 0" and waits.step("right").terminated
    numbers = make_remote(processes.place(), "selfish:Numbers", {}, 60.0)
    numbers.reset(corridor().task, 3)
    step = numbers.step("right")
    assert step.reward == 0.5 and step.terminated is True and step.info.metrics == {"a": 2}
    assert processes.place().held == 4, "one process for all"
    processes.close()


def test_unknown_parameters_are_named_from_the_process() -> None:
    how = isolated(processes=1)

    async def opened() -> None:
        asked = corridor(env=selfish.Selfish, width=3)
        world = TimedEnvironment(
            asked, 0, 60.0, TicketProgress(), idle=how.idle, isolation="process"
        )
        await world.open()

    with pytest.raises(EnvironmentFailure, match=r"env\.params\.width"):
        asyncio.run(opened())
    assert all(process.held == 0 for process in how.idle.processes._living)
    how.idle.processes.close()


def test_what_threads_cannot_share_is_refused_before_the_start() -> None:
    config = from_dict({"env": {"name": "selfish:Selfish"}})
    task = corridor(env=selfish.Selfish).task
    with pytest.raises(ConfigError, match=r"env\.isolation.*two at once"):
        check_threads(config, task)
    check_threads(from_dict({"env": {"name": "selfish:Selfish", "isolation": "process"}}), task)
    check_threads(from_dict({"env": {"name": "rollouts:Corridor"}}), corridor(env=Corridor).task)
