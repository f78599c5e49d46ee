"""A whole run whose actor samples with vLLM, as its user sees it; the actor is killed once."""

import signal
from pathlib import Path

import pytest
from launches import alive, launching, wait_for

from evolver_async.metrics.tail import Tail
from evolver_async.process import segments

pytestmark = pytest.mark.vllm

STEPS = 12
START_S = 400  # vLLM's start and the first step: half a minute, more on a busy machine
RECIPE = """
run: {{dir: {directory}}}
env: {{name: bandit}}
policy: {{max_length: 64, hidden_size: 32, layers: 1, heads: 1, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
engine: {{kind: vllm, slots: 16, prefill_tokens: 256}}
actors: {{count: 1, groups: 4}}
buffer: {{max_staleness: 4}}
learner: {{groups_per_step: 4, minibatches: 1, decay: none, token_budget: 1024}}
stages:
  - kind: rl
    steps: {steps}
eval: {{every: 6, episodes: 4, final_episodes: 4}}
checkpoint: {{every: 6}}
metrics: {{panel: none}}
launch: {{backoff_s: 0.1}}
"""


def test_a_run_on_vllm_trains_and_outlives_its_actor(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(directory=tmp_path, steps=STEPS))
    run_dir = tmp_path / "whole"
    with launching() as start:
        launch = start(run_dir, recipe, "run.name=whole")
        launch.wait_for_steps(2, START_S)
        actor = launch.children()["actor-0"]
        below = actor.children(recursive=True)
        assert len(below) >= 2, "vLLM's engine and its worker"
        mapped = segments.mapped_below(actor.pid)
        actor.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(alive, below)), "vLLM's processes to end with their actor")
        wait_for(lambda: launch.process.poll() is not None, "the run to end", START_S)
        code, errors = launch.end()
    assert code == 0, (errors, launch.logs())
    assert not [one for one in mapped if (segments.SHARED / one).exists()]
    tail = Tail(run_dir / "metrics.jsonl")
    rows = [row for row in tail.rows() if "stage_kind" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Tokens labelled with other weights than they were sampled with would look far off policy.
    assert max(abs(row["offpolicy/kl"]) for row in rows) < 0.01
