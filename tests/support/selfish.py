"""An environment that threads cannot share, as libraries with state of their process are."""

import os
import time
from typing import Any

from rollouts import Corridor

from evolver_async.env import Info, Step
from evolver_async.schema import Task

_inside: list[int] = []


class Selfish(Corridor):
    """Fails where two threads begin an episode at once. `what` happens at the step `at`: `raise`,
    `leave` or `hang`."""

    isolation = "auto"

    def reset(self, task: Task, dynamics_seed: int) -> str:
        _inside.append(dynamics_seed)
        time.sleep(0.2)  # so that episodes begun together meet, on a busy machine too
        shared = len(_inside) > 1
        _inside.pop()
        if shared:
            raise RuntimeError("two at once")
        self.instructions = f"walk in {os.getpid()}"
        return super().reset(task, dynamics_seed)

    def step(self, action: str) -> Step:
        if self.steps == self.at and self.what == "leave":
            os._exit(7)
        if self.steps == self.at and self.what == "hang":
            time.sleep(60)
        return super().step(action)

    def verdict(self) -> tuple[float, bool]:
        return 0.25, False

    def tools(self) -> list[dict[str, Any]]:
        return []


class Async(Corridor):
    async def step(self, action: str) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(action)


class Numbers(Corridor):
    def step(self, action: str) -> Step:
        import numpy as np

        return Step("", np.float32(0.5), np.bool_(True), False, Info(metrics={"a": np.int64(2)}))  # pyright: ignore
