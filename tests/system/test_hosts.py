"""A learner over two hosts, the second one in a network namespace of its own: both lose a rank."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
from launches import free_port, launching, wait_for
from network import far_host

from evolver_async.checkpoint.checkpoints import load_newest

RECIPE = """
env: {name: bandit, latency: {kind: fixed, median_s: 0.05}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 4}
learner: {groups_per_step: 4, minibatches: 1, decay: none, token_budget: 64, deadline_s: 120}
stages:
  - {kind: rl, steps: 1000000}
eval: {every: 0, episodes: 4, final_episodes: 4}
checkpoint: {every: 2}
metrics: {panel: none}
launch: {backoff_s: 0.1}
"""


def steps_of(run_dir: Path) -> int:
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return max((int(json.loads(line)["step"]) for line in lines), default=0)


def rank_of(host: psutil.Process) -> psutil.Process | None:
    """The process of the rank that a host's command has started."""
    found = [one for one in host.children(recursive=True) if "--rank" in one.cmdline()]
    return found[0] if found else None


def test_a_learner_over_two_hosts_goes_on_from_its_checkpoint_without_either_rank(tmp_path):
    recipe, run_dir = tmp_path / "hosts.yaml", tmp_path / "runs" / "hosts"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "evolver_async.cli", "ranks", str(run_dir), "--host", "1"]
    with far_host() as far, launching() as start:
        here, port = ("127.0.0.1", free_port()) if far is None else (far.here, far.free_port())
        command = command if far is None else far.command(*command)
        changes = [
            *(f"run.dir={run_dir.parent}", f"run.name={run_dir.name}", "learner.ranks=2"),
            *("learner.hosts=2", f"learner.address=tcp://{here}:{port}"),
            "learner.trusted_network=true",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as there:
            try:
                run = start(run_dir, recipe, *changes)  # the other host is there already
                run.wait_for_steps(3)
                host = psutil.Process(there.pid)
                for find in (partial(rank_of, host), lambda: run.children().get("learner")):
                    wait_for(find, "a rank").send_signal(signal.SIGKILL)
                    before = steps_of(run_dir)
                    wait_for(
                        lambda before=before: steps_of(run_dir) > before + 4, "steps after a loss"
                    )
                run.process.send_signal(signal.SIGINT)
                code, errors = run.end()
                assert code == 128 + signal.SIGINT, (errors, run.logs())
                assert there.wait(60) == 0
            finally:
                there.terminate()
                said = there.stdout.read() if there.stdout else ""
        assert f"tcp://{here}:{port}" in said and said.count("meet the others") >= 3
    newest, _ = load_newest(run_dir / "checkpoints", run_dir.name)
    names = {path.name for path in newest.iterdir()}
    assert {"model.0of2.safetensors", "model.1of2.safetensors"} <= names
