"""A run on a Ray cluster of two nodes: what is lost with a node, and what nobody may read."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from invariants import check_journal
from launches import Launch, alive, wait_for
from ray_nodes import Nodes, free_port

from evolver_async.checkpoint.checkpoints import valid
from evolver_async.config.load import load
from evolver_async.wire.keys import make

CANARIES = {
    "BANDIT_TOKEN": "canary-4f1c9e-in-a-parameter",
    "WANDB_API_KEY": "canary0123456789canary0123456789canary01",
}
ENVIRONMENT = """
from actors.envs.bandit import Bandit

class Tokened(Bandit):
    def __init__(self, token: str = "", **params):
        assert token.startswith("canary-")
        super().__init__(**params)
"""
RECIPE = """
env: {{name: tokened:Tokened, params: {{token: "${{oc.env:BANDIT_TOKEN}}"}}}}
policy: {{max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 2, groups: 2}}
advantage: {{kind: reinforce}}
buffer: {{address: "tcp://127.0.0.1:{port}", lease_s: 4, stall_s: 40, archive: all}}
learner: {{groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}}
stages: [{{kind: rl, hours: 1}}]
eval: {{every: 0, episodes: 4}}
checkpoint: {{every: 20}}
metrics: {{panel: none, wandb: offline}}
weights: {{dir: {directory}}}
security: {{keys: {directory}/keys}}
launch: {{kind: ray, ray: {{address: auto}}, restarts: 1, backoff_s: 0.1}}
run: {{dir: {directory}, name: run}}
"""
KILLS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path / "keys", [])
    (tmp_path / "tokened.py").write_text(ENVIRONMENT)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(directory=tmp_path, port=free_port()))
    monkeypatch.chdir(tmp_path)
    return path


def roles(run_dir: Path) -> dict[str, psutil.Process]:
    """The processes of a run by name, wherever Ray has placed them."""
    found = {}
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        ours = "evolver_async.cli" in line and process_cwd(process) == str(run_dir.parent)
        if ours and "--name" in line:
            found[line[line.index("--name") + 1]] = process
    return found


def process_cwd(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def log_of(run: Launch) -> str:
    return (run.run_dir / "logs" / "launcher.log").read_text()


def placed(run: Launch, name: str, times: int) -> bool:
    return log_of(run).count(f"{name} runs on node") >= times


def lost(run: Launch, times: int) -> bool:
    return log_of(run).count("is lost with its node") >= times


def on_worker(run: Launch, cluster: Nodes) -> str:
    """The name of the actor that runs on the worker node."""
    node = cluster.worker.node_id[:8]
    last: dict[str, str] = dict(re.findall(r"(actor-\d) runs on node (\w+)", log_of(run)))
    return next((name for name, where in last.items() if where == node), "")


def test_nodes_are_lost_and_drained_and_nothing_of_the_run_is(
    cluster: Nodes, recipe: Path, launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    for name, canary in CANARIES.items():
        monkeypatch.setenv(name, canary)
    run_dir = recipe.parent / "run"
    run = launch(run_dir, recipe)
    run.wait_for_steps(2)
    for kill in range(KILLS):
        victim = wait_for(lambda: on_worker(run, cluster), "an actor on the worker node")
        times = log_of(run).count(f"{victim} runs on node")
        cluster.lose()
        run.wait_for_steps(5)
        wait_for(partial(lost, run, kill + 1), "its loss to be seen")
        cluster.replace()
        wait_for(partial(placed, run, victim, times + 1), f"{victim} on the new node")
        run.wait_for_steps(2)
    drain(cluster)
    wait_for(lambda: "has left a node that is drained" in log_of(run), "an actor that leaves")
    run.wait_for_steps(5)
    objects = stored_bytes(cluster)
    processes = roles(run_dir)
    run.process.terminate()
    code, errors = run.end()
    assert code == 143, errors
    assert objects == 0, "trajectories and weights travel over our own sockets"
    assert "is not started again" not in errors and "is lost with its node" in errors
    assert not any(alive(process) for process in processes.values())
    story = check_journal(run_dir / "journal", load(run_dir / "config.yaml"), "run")
    assert sum(map(len, story.arrived.values())) > 0
    assert valid(run_dir / "checkpoints")
    secrets = [*CANARIES.values(), (recipe.parent / "keys" / "client.secret").read_text().strip()]
    session = Path(cluster.cluster.head_node.get_session_dir_path())
    assert leaks(secrets, session) == leaks(secrets, run_dir) == []
    assert not any(canary in errors for canary in secrets)


def stored_bytes(cluster: Nodes) -> float:
    """Bytes in the object stores of all nodes."""
    ray.init(cluster.address, log_to_driver=False, namespace="test")
    try:
        total = ray.cluster_resources()["object_store_memory"]
        return total - ray.available_resources()["object_store_memory"]
    finally:
        ray.shutdown()


def drain(cluster: Nodes) -> None:
    """As a cloud takes back a machine, with notice."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--address", cluster.address, "--node-id", cluster.worker.node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)


def leaks(secrets: list[str], directory: Path) -> list[tuple[str, str]]:
    """Files that hold a secret."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_socket():
            content = path.read_bytes()
            found += [(str(path), one) for one in secrets if one.encode() in content]
    return found
