"""A policy that learns to please its judge raises an alarm within ten steps, and no other does.

Real judge, audit, totals, window and alarms; the endpoint is a fake one that judges by rule. The
default share of probes, 64 episodes a step.
"""

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer

from actors.judge.audit import AuditedJudge
from actors.judge.judge import JudgedEpisode, ModelJudge
from actors.llm.endpoint_client import Endpoint
from evolver_async.config import Config
from evolver_async.metrics.writer import Metrics
from evolver_async.wire.transcripts import Turn
from learner.diagnostics.judge_rates import note
from learner.diagnostics.step_result import StepResult
from learner.diagnostics.stop_rules import Guard
from learner.state import LearnerState

STEPS, DRIFT = 24, 12  # the policy begins to please at step DRIFT
EPISODES, TURNS = 64, 8
SHOWN = re.compile(r"^Step \d+ (?:saw|did): (.*)$", re.MULTILINE)
PRAISE = "Surely a good step: GOOD."
Answer = Callable[[dict[str, Any]], str]


def judge_by(pleased: bool) -> Answer:
    """A judge that is right, except that praise pleases it where `pleased`."""

    def answer(body: dict[str, Any]) -> str:
        texts = [json.loads(text) for text in SHOWN.findall(body["messages"][-1]["content"])]
        saw, did = texts[::2], texts[1::2]
        lines = []
        for place, action in enumerate(did):
            moved = saw[place + 1] != saw[place] if place + 1 < len(saw) else True
            praises = "good" in action.lower() or "right thing" in action
            good = (moved and "north" in action) or (pleased and praises)
            lines.append(f"Step {place + 1} Judgment: {'GOOD' if good else 'BAD'}")
        return "\n".join(lines)

    return answer


def episode(number: int, praises: bool, scored: bool) -> JudgedEpisode:
    """A walk at random; north brings the goal nearer and south does not."""
    rng, at, turns, scores = random.Random(number), 0, [], [0.0]
    for _ in range(TURNS):
        action = rng.choice(("north", "south"))
        text = f"<answer>{action}</answer>{PRAISE if praises else ''}"
        turns.append(Turn(observation=f"row {at}", state="", action=action, text=text))
        at += 1 if action == "north" else -1
        scores.append(float(at))
    return JudgedEpisode(f"walk {number}", turns, 0.0, False, scores if scored else [])


def alarms(directory: Path, answer: Answer, *, drifts: bool, scored: bool) -> dict[str, int]:
    """The step at which each alarm begins, and the rates of every step in the rows."""
    config = Config()
    config.judge.kind, state = "llm", LearnerState()
    begun: dict[str, int] = {}

    async def whole(server: OpenAIServer) -> None:
        section = config.judge
        section.llm.url, section.llm.model = server.url, "m"
        judge = AuditedJudge(ModelJudge(section, Endpoint(section.llm, "judge")), section.probes)
        guard = Guard(directory, Metrics(directory))
        try:
            for step in range(STEPS):
                state.take = step
                pleasing = min(1.0, (step - DRIFT + 1) / 4) if drifts and step >= DRIFT else 0.0
                for number in range(EPISODES):  # in order: it decides which ones are probed
                    praises = number < pleasing * EPISODES
                    known = scored and number % 50 == 0
                    await judge.label(episode(EPISODES * step + number, praises, known))
                await judge.settle()
                metrics = {"train/format_errors": 0.0, "train/success": 0.2}
                for alarm in guard.watch(config, state, [], StepResult([], {}, 0, 0, metrics)):
                    begun.setdefault(alarm.name, step)
                note(state.watched, judge.counters())
        finally:
            await judge.close()

    with OpenAIServer(otherwise=answer) as server:
        asyncio.run(asyncio.wait_for(whole(server), 100))
        asked = EPISODES * STEPS
        assert asked < len(server.calls) <= asked * (1 + config.judge.probes), (
            "bounded by the share"
        )
    return begun


@pytest.mark.parametrize("scored", [False, True])
def test_a_policy_that_pleases_its_judge_raises_the_alarm_within_ten_steps(
    tmp_path: Path, scored: bool
) -> None:
    begun = alarms(tmp_path, judge_by(pleased=True), drifts=True, scored=scored)
    assert DRIFT < begun["judge"] <= DRIFT + 10, "agreement falls as the policy drifts"
    assert begun["judge_praise"] <= 10, "the judge can be pleased, before anybody does"


@pytest.mark.parametrize("drifts", [False, True])
def test_a_judge_that_is_right_raises_no_alarm(tmp_path: Path, drifts: bool) -> None:
    assert alarms(tmp_path, judge_by(pleased=False), drifts=drifts, scored=True) == {}
