"""A language model solves a task again, with the reference as a hint that may be wrong.

What cannot be solved so is no task; what can gets the solution that was found as its reference.
"""

from actors.envs.base import Step
from actors.llm.asking import Asker, shown, steps_shown
from actors.progress import TicketProgress
from actors.questioning.explore import parse_choice
from actors.questioning.grade import grade
from actors.questioning.prompts import SOLVE
from actors.rollout.environment import TimedEnvironment
from evolver_async.protocol.transcripts import Turn
from evolver_async.schema import Task


async def solve_again(
    asker: Asker,
    world: TimedEnvironment,
    progress: TicketProgress,
    task: Task,
    dynamics_seed: int,
    max_turns: int,
    checked: bool,
) -> list[str] | None:
    """The actions that solved the task in `world`, which is fresh; None where none did.

    `checked`: the environment knows whether it is solved; else the language model grades. Raises
    Unavailable and EnvironmentFailure.
    """
    await world.open()
    beginning = seen = await world.call("reset", world.env.reset, task, dynamics_seed)
    turns: list[Turn] = []
    solved = False
    for _ in range(max_turns):
        after = [*(turn.observation for turn in turns[1:]), seen] if turns else []
        record = {
            "task": task.query,
            "hint": task.reference,
            "beginning": beginning,
            "so far": steps_shown([(t.action, s) for t, s in zip(turns, after, strict=True)]),
        }
        choice = await asker.ask(SOLVE, shown(record), parse_choice)
        if choice is None or not choice.action.strip():
            break
        action = choice.action.strip()
        step: Step = await world.call("solving again", world.env.step, action)
        turns.append(Turn(observation=seen, state="", action=action))
        progress.count += 1
        seen = step.observation
        solved = step.info.success
        if step.terminated or step.truncated:
            break
    if not turns:
        return None
    if not checked:
        given = await grade(asker, task, turns, seen)
        solved = given is not None and given.success
    return [turn.action for turn in turns] if solved else None
