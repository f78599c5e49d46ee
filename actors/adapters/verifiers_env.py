"""Tasks of verifiers.

Those of a single turn are played here: a taskset's prompt, one answer, and the task's own rewards.
One that needs more (tools, several turns, a container, a runtime to be scored in) is played by the
package itself, with `play` and an agent (`actors/endpoint/verifiers_agent.py`), and refused
without.
"""

import asyncio
import importlib
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from actors.adapters import required
from actors.envs.base import Env, one_line
from evolver_async.env import Info, Step
from evolver_async.extension import RAISED
from evolver_async.files import parsed
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, split_of

AGENT = "actors.endpoint.verifiers_agent:play"
PLAYED = f"set env.params.play, with {{}} for its defaults, and rollout.agent={AGENT}"


@dataclass(kw_only=True, eq=False)
class Verifiers(Env):
    """A task of the installed taskset `taskset`, configured by `kwargs`, answered once.

    The reward is the weighted sum of the task's rewards and `success` at least `success_at` of it.
    Tasks belong to the split of their prompt's content, unless `test_kwargs` configure a taskset of
    its own for testing. Of a taskset without an end the first `first` tasks are used. `play`: the
    configuration of the package's environment, without its taskset, for an agent that plays it.
    ValueError names the parameter that cannot be.
    """

    isolation = "thread"
    players = ()

    taskset: str = ""
    kwargs: dict[str, Any] | None = None
    test_kwargs: dict[str, Any] | None = None
    first: int = 10_000
    success_at: float = 1.0
    play: dict[str, Any] | None = None
    instructions: str = ""

    def __post_init__(self) -> None:
        if not self.taskset:
            raise ValueError("taskset: name an installed taskset of verifiers")
        if self.first < 1:
            raise ValueError(f"first: {self.first} is not positive")
        package()
        self.agent = "" if self.play is None else AGENT
        self.plain_instructions = self.instructions  # the question itself says how to answer
        self.instructions = self.instructions or "answer the question ."

    def probe(self) -> None:
        for split in ("train", "test"):
            tasks = self._tasks(split)
            if not tasks:
                raise ValueError(f"env.params.taskset: {self.taskset} has no tasks for {split}")
            problem = None if self.play is not None else _more_than_words(package(), tasks[0])
            if problem is not None:
                raise ValueError(f"env.params.taskset: {self.taskset} {problem}: {PLAYED}")

    def chosen(self, task: Task) -> Any:
        """Return the package's task of this number. Raise ValueError if the split has none."""
        tasks = self._tasks(task.split)
        if not tasks:
            raise ValueError(f"taskset: {self.taskset} has no tasks for {task.split}")
        return tasks[task.map_seed % len(tasks)]

    def arguments(self, split: str) -> dict[str, Any]:
        """Return what configures the taskset of a split."""
        tested = self.test_kwargs is not None and split == "test"
        return {"id": self.taskset} | ((self.test_kwargs if tested else self.kwargs) or {})

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.task = self.chosen(task)
        if self.task.data.system_prompt:
            self.instructions = self.plain_instructions = self.task.data.system_prompt
        return self.task.data.prompt_text

    def step(self, action: str) -> Step:
        vf, task = package(), self.task
        graph = importlib.import_module("verifiers.v1.graph")
        asked = graph.MessageNode(message=vf.UserMessage(content=task.data.prompt_text))
        said = vf.AssistantMessage(content=action)
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[asked, graph.MessageNode(message=said, parent=0, sampled=True)],
            is_completed=True,
        )
        with ThreadPoolExecutor(1) as thread:  # this one may have a running loop already
            thread.submit(asyncio.run, task.score(trace)).result()
        reward = float(trace.reward)
        return Step("", reward, True, False, Info(success=reward >= self.success_at))

    def _tasks(self, split: str) -> list[Any]:
        """Return all tasks of a split."""
        parts = [split]
        if self.test_kwargs is not None:  # a taskset of its own is for testing
            parts = {"test": list(SPLITS), "train": ["train", "test"]}.get(split, parts)
        tasks = _loaded(json.dumps(self.arguments(split), sort_keys=True), self.first)
        return [task for part in parts for task in tasks.get(part, [])]


@cache
def _loaded(arguments: str, first: int) -> dict[str, list[Any]]:
    """Load a taskset, grouped by the split of the tasks' content; ValueError if it cannot be
    loaded. `arguments`: in JSON, so that they can be a key of the cache."""
    vf, given = package(), parsed(arguments)
    taskset = given["id"]
    try:
        config = vf.taskset_config_type(taskset)(**given)
        loaded = vf.load_taskset(config)
        tasks = list(loaded if not loaded.INFINITE else loaded.take(first))
    except RAISED as error:  # tasksets are other people's code
        raise ValueError(f"taskset: cannot load {taskset!r}: {one_line(error)}") from error
    found: dict[str, list[Any]] = {}
    for task in tasks:
        found.setdefault(split_of(task.data.prompt_text), []).append(task)
    return found


def _more_than_words(vf: Any, task: Any) -> str | None:
    """Return what a task needs beyond a conversation; None if nothing."""
    kind = type(task)
    if kind.NEEDS_CONTAINER or task.data.image:
        return "needs a container"
    if kind.toolsets(task.config):
        return "needs tools"
    if kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        return "needs a runtime to be set up in"
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"needs a runtime for its reward {reward.__name__}"
    return None


def package() -> Any:
    """Import verifiers. Raise ValueError if it is missing."""
    return required("verifiers.v1", "taskset", "verifiers", " of at least 0.4")
