"""A run whose keys name functions of a user's own, and what its rows must say of them."""

import json
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
KEYS = {
    "rollout.format": "Shouted",
    "buffer.sampler": "last_in",
    "judge.kind": "praise",
    "selection.kind": "first_two",
    "advantage.kind": "centred",
    "correction.kind": "halved",
    "metrics.sinks": "sink",
}
OWN = """
reward: ["own_rewards:bonus"]
buffer: {sampler: "own_functions:last_in"}
judge: {kind: "own_functions:praise"}
selection: {kind: "own_functions:first_two"}
advantage: {kind: "own_functions:centred"}
correction: {kind: "own_functions:halved", params: {weight: 0.5}}
metrics: {panel: none, sinks: ["own_functions:sink", "own_functions:broken_sink"]}
"""  # and rollout.format, in a section that recipes write themselves
FORMAT = "own_functions:Shouted"


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the steps of reinforcement learning."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("stage_kind") == "rl"]


def check_own_functions(run_dir: Path) -> None:
    """Compare a run that was evaluated with what its functions do."""
    found = rows_of(run_dir)
    for row in found:
        assert row["train/reward_mean"] > 90 and row["train/reward/bonus"] == 100.0
        assert row["selection/kept_share"] == 0.5
        assert row["judge/good_share"] == 1.0
    every = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    evaluated = [row for row in every if "eval/success" in row]
    assert evaluated
    for row in evaluated:
        assert row["eval/reward/bonus"] == 100.0 and row["eval/reward_mean"] > 90
    # the last ones: a learner that was killed can have left a step to its successor
    sent = [json.loads(line)["step"] for line in (run_dir / "sink.jsonl").read_text().splitlines()]
    assert {row["step"] for row in found[-3:]} <= set(sent)
