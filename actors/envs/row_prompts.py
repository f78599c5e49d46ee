"""Prompts of the user's own rows: one message of the policy answers each.

The environment only asks. Reward and success are those of the run's reward terms, which read the
message and the row.
"""

import json
from dataclasses import dataclass
from typing import Any

from actors.envs.base import Env, EnvError
from evolver_async.env import Info, Step
from evolver_async.schema import Task


@dataclass(kw_only=True, eq=False)
class Prompts(Env):
    """Single turn that shows the messages of `task.prompt`; any action ends it without reward."""

    turn_format = "chat"
    max_turns = 1
    instructions = ""

    def reset(self, task: Task, dynamics_seed: int) -> list[dict[str, Any]]:
        if not task.prompt:
            raise EnvError(
                f"tasks.prompt: task {task.task_id} has no prompt: env.name=prompts shows the rows"
                " of tasks.path, and tasks.prompt names their column"
            )
        self.prompt = task.prompt
        return task.prompt

    def step(self, action: str) -> Step:
        """End the episode; the observation repeats what the policy said."""
        return Step(action, 0.0, True, False, Info())

    def content(self) -> str:
        return json.dumps(self.prompt, ensure_ascii=False)
