"""An actor on a far host: packets are late or lost, the network is cut and healed. Keys are on."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from invariants import check_journal
from launches import Launch, launching, wait_for
from network import FarHost, far_host

from evolver_async.config.load import load
from evolver_async.runs.watch.status_text import ask
from evolver_async.wire.keys import make

RECIPE = """
env: {{name: bandit, latency: {{kind: fixed, median_s: 0.1}}}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 1, groups: 2}}
advantage: {{kind: reinforce}}
buffer: {{address: "tcp://{here}:{port}", lease_s: 3, stall_s: 60, straggler: wait, archive: all}}
learner: {{groups_per_step: 4, minibatches: 1, decay: none, token_budget: 512}}
stages: [{{kind: rl, hours: 1}}]
eval: {{every: 0, episodes: 4}}
checkpoint: {{every: 50}}
metrics: {{panel: none}}
weights:
  {{kind: collective, address: "tcp://{here}:{channel}", trusted_network: true, deadline_s: 3}}
security: {{keys: {directory}/keys}}
run: {{dir: {directory}, name: run}}
"""
FAR = "far"


@pytest.fixture
def host() -> Iterator[FarHost]:
    with far_host() as made:
        if made is None:
            pytest.skip("network namespaces need root and the command ip")
        yield made


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


def test_an_actor_behind_a_bad_network_disturbs_nobody_and_comes_back(
    tmp_path: Path, host: FarHost, launch: Callable[..., Launch]
) -> None:
    make(tmp_path / "keys", [FAR])
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    address = f"tcp://{host.here}:{host.free_port()}"
    recipe.write_text(
        RECIPE.format(
            directory=tmp_path,
            here=host.here,
            port=address.rpartition(":")[2],
            channel=host.free_port(),
        )
    )
    run = launch(run_dir, recipe)
    run.wait_for_steps(1)
    command = [sys.executable, "-m", "evolver_async.cli", "actor", "--connect", address]
    command += ["--keys", str(tmp_path / "keys" / FAR), "--name", FAR]
    with open(tmp_path / "far.log", "wb") as output:
        far = subprocess.Popen(host.command(*command), stdout=output, stderr=subprocess.STDOUT)

    def heard() -> dict[str, float]:
        status = asyncio.run(ask(address, tmp_path / "keys", 60.0))
        return status["actors"].get(FAR, {"leases": 0, "seen_s_ago": 1e9})  # not heard of

    def plays() -> bool:
        now = heard()
        return now["leases"] > 0 and now["seen_s_ago"] < 10 and now["trajectories_per_s"] > 0

    try:
        wait_for(plays, f"{FAR} to play")
        run.wait_for_steps(3)
        if host.disturb("delay", "40ms", "20ms", "loss", "2%"):
            run.wait_for_steps(3)
            wait_for(plays, f"{FAR} to play over a bad line")
            host.calm()
        host.cut()
        wait_for(lambda: heard()["leases"] == 0, "its leases to end")
        run.rows()
        run.wait_for_steps(3)
        host.heal()
        wait_for(plays, f"{FAR} to play again")
    finally:
        far.terminate()
        assert far.wait() == 0, (tmp_path / "far.log").read_text()
    run.process.terminate()
    code, errors = run.end()
    assert code == 143, errors
    config = load(run_dir / "config.yaml")
    check_journal(run_dir / "journal", config, "run")
    assert "is not started again" not in errors
