"""Evaluation sets in a run of real processes: interrupted, resumed, and complete in the end."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, launching, wait_for

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records
from evolver_async.schema import WeightId

pytestmark = pytest.mark.process

TASKS, SAMPLES = 20, 3  # so many that the evaluation takes 7 seconds, which no machine misses
RECIPE = f"""
env: {{name: bandit, step_timeout_s: 10, latency: {{kind: fixed, median_s: 1.0}}}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 1, groups: 2}}
learner: {{groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}}
stages:
  - kind: sft
    steps: 2
    override: {{rollout: {{group_size: 1}}, learner: {{groups_per_step: 8}}}}
  - {{kind: rl, steps: 3}}
eval:
  every: 0
  episodes: 4
  final_episodes: 4
  sets:
    swapped: {{tasks: 4, env: {{params: {{low_arm: dragon, high_arm: phoenix}}}}}}
    sampled: {{tasks: {TASKS}, k: {SAMPLES}, temperature: 1.0}}
buffer: {{archive: all}}
metrics: {{panel: none}}
launch: {{backoff_s: 0.1}}
"""


def is_last(row: dict[str, Any]) -> bool:
    return row.get("stage_kind") == "rl" and row["step"] == 5


def halfway(run: Launch) -> bool:
    """True while the samples of the last evaluation are being played."""
    found = re.search(rf"sampled (\d+) of {TASKS * SAMPLES}", str(run.status()["evaluations"][-1:]))
    return found is not None and 0 < int(found[1]) < TASKS * SAMPLES


def arrivals(run_dir: Path, newest: WeightId) -> list[records.Arrived]:
    """Arrived samples of the evaluation of these weights."""
    groups, found = set(), []
    for record, _ in JournalReader(run_dir / "journal").read():
        if isinstance(record, records.Granted) and record.pinned == newest:
            if record.episode is not None and record.episode.set_name == "sampled":
                groups.add(record.group_id)
        elif isinstance(record, records.Arrived) and record.group_id in groups:
            found.append(record)
    return found


def test_an_evaluation_that_was_interrupted_is_repeated_and_survives_the_buffer(
    tmp_path: Path,
) -> None:
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE + f"run: {{dir: {tmp_path}}}\n")
    with launching() as start:
        run = start(run_dir, recipe, "run.name=run")
        run.wait_for_row(is_last, "the last step")
        wait_for(lambda: halfway(run), "the middle of the last evaluation")
        run.process.send_signal(signal.SIGINT)
        run.end()
        again = start(run_dir, "--resume", run_dir)
        wait_for(lambda: {"buffer", "learner"} <= again.children().keys(), "the second start")
        wait_for(lambda: halfway(again), "the middle of the repeated evaluation")
        again.children()["buffer"].kill()
        code, errors = again.end()
    assert code == 0, (errors, again.logs())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval/success" in row][-1]
    assert (last["step"], last["eval/episodes"], last["eval/swapped/episodes"]) == (5, 4, 4)
    assert last["eval/sampled/episodes"] == TASKS * SAMPLES
    newest = WeightId(lineage=last["lineage"], step=int(last["eval/version"]))
    played = arrivals(run_dir, newest)
    assert len(played) == TASKS * SAMPLES
    success = sum(one.success for one in played) / len(played)
    assert last["eval/sampled/avg@3"] == pytest.approx(success)
    assert success <= last["eval/sampled/best@3"] <= min(1.0, SAMPLES * success)
