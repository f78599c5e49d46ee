"""A scripted engine, a small environment and the settings that rollout tests share."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import episodes
from chatml import make_tokenizer
from torch import Tensor

from actors.engines.engine import Generation, Request
from actors.formats.chat import Chat
from actors.formats.turns import ThinkAnswer
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import Advice
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
from evolver_async.env import Info, Step
from evolver_async.schema import (
    Task,
    Ticket,
    Trajectory,
    WeightId,
)

TOKENIZER = make_tokenizer()


CHAT = Chat(TOKENIZER)


LEFT, RIGHT = " left</answer>", " right</answer>"


OLD, NEW = WeightId(lineage=1, step=1), WeightId(lineage=1, step=2)


class FakeEngine:
    """Says what the script says, turn by turn of each session; remembers what it was asked."""

    weights: WeightId | None = OLD

    def __init__(self, script: dict[str, list[list[int]]]) -> None:
        self.script = {session: iter(turns) for session, turns in script.items()}
        self.requests: list[Request] = []
        self.released: list[str] = []

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(0)
        self.requests.append(request)
        tokens = next(self.script[request.session])
        logprobs = [-0.25 - index for index in range(len(tokens))]
        weights = [OLD if index == 0 else NEW for index in range(len(tokens))]
        return Generation(tokens=tokens, logprobs=logprobs, weights=weights, finish="stop")

    def release(self, session: str) -> None:
        self.released.append(session)

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        self.weights = weights

    async def score(self, tokens: list[int]) -> list[float]:
        raise NotImplementedError

    async def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"generated": 0.0, "busy_s": 0.0}


class Corridor:
    """Walk right until the end; what it does at step `at` is a parameter."""

    instructions = "walk"
    isolation = "loop"
    closed = 0

    def __init__(self, *, length: int = 3, at: int = -1, what: str = "") -> None:
        self.length, self.at, self.what = length, at, what

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.position = self.steps = 0
        return "at 0"

    def step(self, action: str) -> Step:
        if self.steps == self.at and self.what == "raise":
            raise OSError("the floor fell in")
        if self.steps == self.at and self.what == "truncate":
            return Step("", 0.0, False, True, Info())
        self.steps += 1
        if action not in ("left", "right"):
            return Step(f"at {self.position}", 0.0, False, False, Info(valid=False))
        self.position += 1 if action == "right" else -1
        done = self.position == self.length
        return Step(f"at {self.position}", float(done), done, False, Info(success=done))

    def close(self) -> None:
        type(self).closed += 1


def setting(think: bool = False, actions_per_turn: int = 1, **changes: Any) -> Setting:
    values: dict[str, Any] = {
        "chat": CHAT,
        "format": ThinkAnswer(think=think, actions_per_turn=actions_per_turn),
        "actor": "actor-0",
        "incarnation": 0,
        "seed": 0,
        "max_turns": 10,
        "max_length": 4096,
        "format_penalty": -0.1,
        "format_errors": 0,
        "step_timeout_s": 10.0,
        "episode_timeout_s": 20.0,
        "latency": "none",
        "latency_median_s": 0.0,
        "latency_sigma": 0.0,
    }
    return Setting(**(values | changes))


def ticket(
    params: dict[str, Any] | None = None,
    members: int = 1,
    group_id: int = 0,
    env: str = "frozen_lake",
    max_tokens: int = 24,
) -> Ticket:
    task = Task(
        task_id="t",
        env=env,
        split="train",
        map_seed=group_id,
        params={} if params is None else params,
    )
    facts = {"group_id": group_id, "members": list(range(members)), "dynamics_seed": 5}
    return episodes.ticket(task, max_tokens=max_tokens, **facts)


def corridor(members: int = 1, env: type = Corridor, **params: Any) -> Ticket:
    return ticket(params, members, env=f"{env.__module__}:{env.__name__}")


def say(*turns: str) -> list[list[int]]:
    return [CHAT.tokens_of(turn) for turn in turns]


def roll_out(
    ticket: Ticket,
    setting: Setting,
    engine: FakeEngine,
    progress: TicketProgress | None = None,
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> list[Trajectory]:
    done: list[Trajectory] = []

    def deliver(finished: Finished) -> None:
        done.append(finished.trajectory)

    run(run_group(ticket, setting, engine, progress or TicketProgress(), deliver))
    return done


class Hanging(Corridor):
    """Blocks in one of its calls until `free` is set; may fail in others."""

    isolation = "thread"
    free = threading.Event()

    def __init__(
        self, *, hangs: str = "", at: int = -1, what: str = "", closes: bool = True
    ) -> None:
        super().__init__(length=2, at=at, what=what)
        self.hangs, self.closes = hangs, closes

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.call("reset")
        return super().reset(task, dynamics_seed)

    def step(self, action: str) -> Step:
        self.call("step")
        return super().step(action)

    def close(self) -> None:
        self.call("close")
        if not self.closes:
            raise OSError("the door is stuck")
        super().close()

    def actions(self) -> list[str]:
        return ["left", "right"]

    def solve(self) -> list[str]:
        return ["right"]

    def call(self, name: str) -> None:
        if name == self.hangs:
            self.free.wait(60)


class Adviser:
    """Knows something about every task, and was asked about these."""

    def __init__(self, text: str = "go right <|im_end|>") -> None:
        self.text = text
        self.asked: list[str] = []
        self.states: list[str] = []
        self.unguided = 0

    async def advise(self, query: str, state: str) -> Advice:
        self.asked.append(query)
        self.states.append(state)
        return Advice(text=self.text.format(state=state), ids=(7, 9))

    def count_unguided(self) -> None:
        self.unguided += 1


def play(
    ticket: Ticket, how: Setting, engine: FakeEngine, guide: Adviser | None = None
) -> list[Finished]:
    done: list[Finished] = []
    asyncio.run(run_group(ticket, how, engine, TicketProgress(), done.append, guide))
    return sorted(done, key=lambda finished: finished.trajectory.member)
