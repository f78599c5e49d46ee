"""What judging adds to rollout time, with 50 ms of environment latency a step.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_judge.py

First the rule judge's own work on an episode (the environment's scores and the labels), alone and
without any waiting. Then whole rollouts of FrozenLake groups, episodes side by side on one loop as
in an actor, with and without the rule judge in turns; a scripted engine answers at once, so that
environment and judge are all there is. Last what an episode costs the loop with a judge that is
asked in words, without the answer's own time.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chatml import make_tokenizer
from torch import Tensor

from actors.engines.engine import Generation, Request
from actors.envs.grid.frozen_lake import FrozenLake
from actors.envs.grid.frozen_lake_map import ACTIONS
from actors.formats.chat import Chat
from actors.formats.turns import ThinkAnswer
from actors.judge.judge import JudgedEpisode, RuleJudge
from actors.judge.labels import parse
from actors.judge.prompt import question
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
from evolver_async.schema import Sampling, Task, Ticket, WeightId
from evolver_async.wire.transcripts import Turn

LATENCY_S = 0.05
REQUIRED = 1.0  # percent of rollout time, at most
TURNS = 10
GROUPS, MEMBERS = 4, 8  # at a time, as in an actor
ROUNDS = 15
PARAMS: dict[str, Any] = {"size": 6}
CHAT = Chat(make_tokenizer())
WEIGHTS = WeightId(lineage=1, step=0)


class Walker:
    """An engine that says random moves, at once."""

    weights: WeightId | None = WEIGHTS
    obeys_grammars = False

    async def generate(self, request: Request) -> Generation:
        move = random.Random(request.seed).choice(ACTIONS)
        tokens = CHAT.tokens_of(f" {move}</answer>")
        weights = [WEIGHTS] * len(tokens)
        return Generation(tokens=tokens, logprobs=[-1.0] * len(tokens), weights=weights)

    def release(self, session: str) -> None: ...

    async def score(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


def setting(scored: bool) -> Setting:
    return Setting(
        chat=CHAT,
        format=ThinkAnswer(think=False, actions_per_turn=1),
        actor="bench",
        incarnation=0,
        seed=0,
        max_turns=TURNS,
        max_length=8192,
        format_penalty=-0.1,
        format_errors=0,
        step_timeout_s=10.0,
        episode_timeout_s=60.0,
        latency="fixed",
        latency_median_s=LATENCY_S,
        latency_sigma=0.0,
        scored=float(scored),
    )


def ticket(group_id: int) -> Ticket:
    task = Task(
        task_id=str(group_id), env="frozen_lake", split="train", map_seed=group_id, params=PARAMS
    )
    return Ticket(
        group_id=group_id,
        task=task,
        kind="rollout",
        stage=0,
        members=list(range(MEMBERS)),
        guided=[],
        dynamics_seed=5,
        attempt=0,
        weights=None,
        lease_s=30.0,
        sampling=Sampling(temperature=1.0, max_tokens=24),
    )


async def alone() -> float:
    """Seconds of the judge's own work on one episode of `TURNS` turns."""
    lake, judge, repeats = FrozenLake(**PARAMS), RuleJudge(), 2000
    lake.reset(ticket(0).task, 0)
    began = time.perf_counter()
    for _ in range(repeats):
        scores = [lake.score() for _ in range(TURNS + 1)]
        await judge.label(
            JudgedEpisode(query="", turns=[], reward=0.0, success=False, scores=scores)
        )
    return (time.perf_counter() - began) / repeats


async def rollouts(judge: RuleJudge | None) -> tuple[float, float, int]:
    """Wall and processor seconds of `GROUPS` groups, judged or not, and their turns."""
    done: list[Finished] = []
    ends: list[asyncio.Task[object]] = []

    def deliver(finished: Finished) -> None:
        done.append(finished)
        if judge is not None:
            trajectory = finished.trajectory
            judged = JudgedEpisode(
                query=finished.query,
                turns=finished.transcript.turns,
                reward=trajectory.reward,
                success=trajectory.success,
                scores=finished.scores,
            )
            ends.append(asyncio.create_task(judge.label(judged)))

    wall, processor = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as groups:
        for group_id in range(GROUPS):
            groups.create_task(
                run_group(
                    ticket(group_id),
                    setting(judge is not None),
                    Walker(),
                    TicketProgress(),
                    deliver,
                )
            )
    labelled = await asyncio.gather(*ends)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert judge is None or len(labelled) == GROUPS * MEMBERS
    return wall, processor, sum(len(finished.trajectory.labels) for finished in done)


def words() -> tuple[float, float]:
    """Seconds that putting an episode into words, and reading the answer, take."""
    turns = [Turn(observation="o" * 500, state="s", action="a" * 50)] * TURNS
    answer = "\n".join(f"Step {number + 1} Judgment: GOOD" for number in range(TURNS))
    repeats = 500
    began = time.perf_counter()
    for _ in range(repeats):
        question("task", turns, True, 1.0, 2000)
    asked = time.perf_counter()
    for _ in range(repeats):
        parse(answer, TURNS)
    return (asked - began) / repeats, (time.perf_counter() - asked) / repeats


async def measure() -> None:
    own_s = await alone()
    episode_s = TURNS * LATENCY_S
    print(
        f"rule, alone: {1e6 * own_s:.0f} µs for an episode of {TURNS} turns, which takes"
        f" {1e3 * episode_s:.0f} ms: {100 * own_s / episode_s:.3f} % (required {REQUIRED} %)"
    )
    await rollouts(None)  # maps are drawn once
    runs: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    for round_number in range(ROUNDS):
        for judged in (bool(round_number % 2), not round_number % 2):
            runs[judged].append(await rollouts(RuleJudge() if judged else None))
    wall = {judged: min(wall for wall, _, _ in some) for judged, some in runs.items()}
    processor = {judged: min(spent for _, spent, _ in some) for judged, some in runs.items()}
    print(
        f"rule, in a rollout of {GROUPS * MEMBERS} episodes and {runs[True][0][2]} turns:"
        f" {wall[False]:.4f} s without, {wall[True]:.4f} s with,"
        f" {100 * (wall[True] / wall[False] - 1):+.2f} % (best of {ROUNDS} each, in turns; required"
        f" {REQUIRED} %); processor time {1e3 * processor[False]:.1f} and"
        f" {1e3 * processor[True]:.1f} ms; load {os.getloadavg()[0]:.1f}"
    )
    asking_s, reading_s = words()
    print(
        f"in words: {1e6 * asking_s:.0f} µs to put an episode of {TURNS} turns into a question,"
        f" {1e6 * reading_s:.0f} µs to read the answer"
    )


if __name__ == "__main__":
    asyncio.run(measure())
