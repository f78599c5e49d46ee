"""Second solution of a task by a language model, with the reference as an unreliable hint.

An unsolved task is rejected; a solved one gets the found solution as its reference if that can be
replayed.
"""

from functools import partial

from actors.llm.json_client import JsonClient, as_json, step_records
from actors.questioning.actions import ActionForm
from actors.questioning.explore import parse_choice
from actors.questioning.grade import grade
from actors.questioning.questioning_prompts import SOLVE
from actors.rollout.environment import TimedEnvironment
from actors.ticket_progress import TicketProgress
from evolver_async.schema import Task
from evolver_async.wire.transcripts import Turn


async def solve_again(
    client: JsonClient,
    world: TimedEnvironment,
    progress: TicketProgress,
    task: Task,
    dynamics_seed: int,
    max_turns: int,
    checked: bool,
    form: ActionForm,
) -> list[str] | None:
    """Return the valid actions that solved the task in the fresh `world`; None if none did.

    `checked`: the environment checks success; otherwise the language model grades it. Raise
    Unavailable or EnvironmentFailure.
    """
    system = SOLVE.format(action=form.example, ending=form.ending)
    tools = {"tools": list(form.tools)} if form.tools else {}
    await world.open()
    beginning = seen = (await world.reset(task, dynamics_seed)).text
    turns: list[Turn] = []
    valid: list[str] = []
    solved = False
    for _ in range(max_turns):
        after = [*(turn.observation for turn in turns[1:]), seen] if turns else []
        record = tools | {
            "task": task.query,
            "hint": task.reference,
            "beginning": beginning,
            "so far": step_records([(t.action, s) for t, s in zip(turns, after, strict=True)]),
        }
        action = await client.ask(system, as_json(record), partial(parse_choice, form=form))
        progress.count += 1
        if not action:
            break
        step = await world.step(action, doing="solving again")
        turns.append(Turn(observation=seen, state="", action=action))
        progress.count += 1
        if step.info.valid:
            valid.append(action)
        seen = step.observation
        solved = step.info.success
        if step.terminated or step.truncated:
            break
    if not valid:
        return None
    if not checked:
        given = await grade(client, task, turns, seen)
        solved = given is not None and given.success
    return valid if solved else None
