"""A run on a Ray instance of its own: its ends, its refusals, and its pace."""

import asyncio
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from launches import Launch, alive, wait_for
from ray.exceptions import ActorUnavailableError, RayTaskError, RuntimeEnvSetupError

from evolver_async.checkpoint.checkpoints import valid
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.errors import UNPLACED
from evolver_async.launch.child import Unreachable
from evolver_async.launch.ray_cluster import head as heads
from evolver_async.launch.ray_cluster import spawner as spawning
from evolver_async.launch.ray_cluster.handle import RayHandle
from evolver_async.launch.ray_cluster.head import HeadService, NodeView
from evolver_async.launch.ray_cluster.launcher import check, connect, learner_home_of
from evolver_async.launch.ray_cluster.ray_host import Order, ProcessHost
from evolver_async.launch.ray_cluster.spawner import RaySpawner, forwarded

RECIPE = """
env: {name: bandit}
policy: {max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, max: 2, scale_s: 3600, groups: 2}
advantage: {kind: reinforce}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
stages: [{kind: rl, steps: 1000000}]
eval: {every: 0, episodes: 4}
checkpoint: {every: 1000000}
metrics: {panel: none}
launch: {kind: ray, ray: {address: local}, restarts: 1, backoff_s: 0.1}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "recipe.yaml"
    path.write_text(RECIPE + f"run: {{dir: {path.parent}, name: run}}\n")
    return path


def node(name: str, **resources: float) -> dict[str, Any]:
    address = {"home": "10.0.0.1", "other": "10.0.0.2"}[name]
    host = {"NodeManagerAddress": address, "NodeManagerHostname": f"host-{name}"}
    return {"Resources": resources, "NodeID": name} | host


ONE, TWO = [node("home", CPU=4.0, GPU=2.0)], [node("home", CPU=4.0), node("other", CPU=4.0)]
ELSEWHERE = [node("home", CPU=4.0), node("other", CPU=4.0, GPU=2.0)]
TCP = "buffer.address=tcp://10.0.0.1:4000"
KEYS, SHARED = "security.keys=k", "weights.dir=/shared"
HOSTS = [TCP, KEYS, SHARED, "launch.ray.shared=true"]
BIG = ["launch.ray.actor_gpus=3"]


def head_with(*nodes: str) -> Any:
    """The head of a cluster of these nodes."""
    return SimpleNamespace(now=lambda: NodeView(frozenset(nodes)), view=NodeView(frozenset(nodes)))


HEAD = head_with()


def learner_at(host: str) -> str:
    """Two ranks on two hosts, that of the first one being `host`."""
    met = f"address: 'tcp://{host}:4002', trusted_network: true"
    return f"learner={{ranks: 4, hosts: 2, {met}}}"


def weights_at(host: str) -> str:
    return f"weights={{address: 'tcp://{host}:4001', trusted_network: true}}"


@pytest.mark.parametrize(
    ("nodes", "changes", "message"),
    [
        (ONE, [], ""),
        (ONE, ["learner.ranks=5"], "learner.ranks: all ranks run on one node: 5 with 1 CPUs each"),
        (
            ONE,
            ["learner.ranks=4", "launch.ray.learner_gpus=1"],
            "4 with 1 GPUs each need 4 there, and the node of the buffer",
        ),
        (
            ELSEWHERE,
            ["launch.ray.learner_gpus=1"],
            "1 with 1 GPUs each need 1 there, and the node of the buffer",
        ),
        (ELSEWHERE, ["launch.ray={learner_gpus: 1, shared: true}", TCP, KEYS, SHARED], ""),
        (
            ELSEWHERE,
            ["launch.ray={learner_gpus: 3, shared: true}"],
            "1 with 3 GPUs each need 3 there, and the largest node has 2",
        ),
        (TWO, [], "buffer.address: processes on 2 nodes need tcp://HOST:PORT"),
        (
            TWO,
            ["buffer.address=tcp://0.0.0.0:4000", KEYS, SHARED],
            "buffer.address: must name a node by its address: processes on 2 nodes would look for",
        ),
        (
            TWO,
            [TCP, KEYS, "weights.kind=collective"],
            "weights.address: processes on 2 nodes need tcp://HOST:PORT of the learner's node",
        ),
        (
            TWO,
            ["buffer.address=tcp://127.0.0.1:4000", KEYS, SHARED],
            "on 2 nodes would look for 127.0.0.1 on their own",
        ),
        (TWO, [TCP, KEYS], "weights.kind: shm in /dev/shm belongs to one host"),
        (TWO, [TCP, KEYS, SHARED], ""),
        (TWO, [TCP, KEYS, SHARED, "policy.path="], "policy.path: the new model of this run"),
        (TWO, [TCP, KEYS, SHARED, "policy.path=", "launch.ray.shared=true"], ""),
        (ELSEWHERE, [TCP, KEYS, SHARED, *BIG], "the largest node, host-other, has 4 and 2"),
        (ELSEWHERE, [TCP, KEYS, SHARED, "launch.ray.actor_cpus=5"], "launch.ray.actor_cpus: an"),
        (
            TWO,
            ["launch.ray.shared=true", TCP, KEYS, weights_at("10.255.255.1")],
            "weights.address: 10.255.255.1 is no node of the cluster now; name one of these:"
            " host-home 10.0.0.1, host-other 10.0.0.2",
        ),
        (
            TWO,
            ["buffer.address=tcp://10.255.255.1:4000", KEYS, SHARED],
            "buffer.address: 10.255.255.1 is no node of the cluster now; name one of these:",
        ),
        (TWO, [TCP, KEYS, weights_at("10.0.0.1")], ""),
        (
            TWO,
            [TCP, KEYS, weights_at("10.0.0.2")],
            "weights.address: tcp://10.0.0.2:4001 is on another node than the buffer",
        ),
        (
            TWO,
            [TCP, KEYS, weights_at("127.0.0.1")],
            "weights.address: must name a node by its address: processes on 2 nodes would look for",
        ),
        (
            ELSEWHERE,
            ["launch.ray={learner_gpus: 1, shared: true}", TCP, KEYS, weights_at("10.0.0.2")],
            "",
        ),
        (
            ELSEWHERE,
            ["launch.ray={learner_gpus: 1, shared: true}", TCP, KEYS, weights_at("10.0.0.1")],
            "1 with 1 GPUs each need 1 there, and the node of weights.address has 0",
        ),
        (TWO, [*HOSTS, learner_at("10.0.0.2")], ""),
        (TWO, [*HOSTS, learner_at("10.0.0.2"), weights_at("host-other")], ""),
        (
            TWO,
            [*HOSTS, learner_at("10.0.0.2"), weights_at("10.0.0.1")],
            "weights.address: tcp://10.0.0.1:4001 must be on the node of learner.address",
        ),
        (
            TWO,
            [*HOSTS, learner_at("127.0.0.1")],
            "learner.address: must name a node by its address: processes on 2 nodes would look for",
        ),
        (
            ONE,
            [*HOSTS, learner_at("10.0.0.1")],
            "learner.hosts: needs 2 nodes with 2 CPUs and 0 GPUs, for 2 ranks each; there are 1",
        ),
        (
            ELSEWHERE,
            [*HOSTS[:-1], "launch.ray={learner_gpus: 1, shared: true}", learner_at("10.0.0.2")],
            "learner.hosts: needs 2 nodes with 2 CPUs and 2 GPUs, for 2 ranks each; there are 1",
        ),
        (
            TWO,
            [*HOSTS, learner_at("10.255.255.1")],
            "learner.address: 10.255.255.1 is no node of the cluster now",
        ),
    ],
)
def test_what_these_nodes_cannot_do_is_named(
    nodes: list[dict[str, Any]], changes: list[str], message: str
) -> None:
    model = "policy.path=/shared/model"
    config = load(None, ["launch.kind=ray", "stages=[{steps: 1}]", model, *changes])
    if not message:
        return check(config, nodes, "home")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, nodes, "home")
    return None


def test_the_client_of_ray_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"launch\.ray\.address: .*ray job submit"):
        load(None, ["launch.ray.address=ray://10.0.0.1:10001", "stages=[{steps: 1}]"])
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: .*ray job submit"):
        connect(load(None, ["launch.kind=ray", "stages=[{steps: 1}]"]))


def test_an_autoscaler_may_bring_what_an_actor_asks_for() -> None:
    asked = ["launch.kind=ray", "stages=[{steps: 1}]", "policy.path=/shared/model", *BIG]
    config = load(None, [*asked, TCP, KEYS, SHARED])
    check(config, ELSEWHERE, "home", {"CPU": 64, "GPU": 8})


def test_an_address_of_this_machine_may_be_one_that_ray_does_not_know() -> None:
    asked = ["launch.kind=ray", "stages=[{steps: 1}]", weights_at("127.0.0.1")]
    check(load(None, asked), ONE, "home")


@pytest.mark.parametrize(
    ("shared", "weights", "expected"),
    [
        (False, "", "home"),
        (True, "", ""),
        (True, "10.0.0.1", "home"),
        (True, "10.0.0.2", "other"),
        (True, "host-other", "other"),
        (True, "192.168.0.2", ""),  # another interface, of an unknown node
    ],
)
def test_a_learner_runs_on_the_node_at_which_it_publishes(
    tmp_path: Path, shared: bool, weights: str, expected: str
) -> None:
    changes = [weights_at(weights)] if weights else [SHARED]
    more = [f"launch.ray.shared={str(shared).lower()}", TCP, KEYS, *changes]
    config = load(None, ["launch.kind=ray", "stages=[{steps: 1}]", *more])
    ids = {"": "", "home": "0" * 56, "other": "1" * 56}
    nodes = [one | {"NodeID": ids[one["NodeID"]]} for one in TWO]
    place = learner_home_of(config, nodes, ids["home"])
    spawner = RaySpawner(config, tmp_path, "ipc:///none", ids["home"], place, HEAD)
    assert place == ids[expected] and spawner.bound("learner") == bool(expected)
    assert spawner.bound("buffer") and not spawner.bound("actor")


def test_a_learner_that_asks_for_nothing_takes_nothing_from_its_node(tmp_path: Path) -> None:
    config = load(None, ["launch={kind: ray, ray: {learner_cpus: 0}}", "stages=[{steps: 1}]"])
    spawner = RaySpawner(config, tmp_path, "ipc:///none", "0" * 56, "1" * 56, HEAD)
    assert spawner._strategy("learner", 0).node_id == "1" * 56
    assert not spawner.groups  # the least CPU is too much where there is none, or actors need it


def test_what_killed_processes_leave_on_a_node_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = ProcessHost()
    order = Order(["--help"], {}, "", meeting="evolver-ranks-0", keys={"client.secret": b"key"})
    asyncio.run(killed.start(order))
    assert killed.process is not None and killed.meeting is not None
    killed.process.wait()
    (killed.meeting.directory / "ranks").touch()
    living = ProcessHost()
    assert (
        killed.private / "keys" / "client.secret"
    ).exists() and killed.meeting.directory.exists()
    for one in (killed.claim, killed.meeting):
        one.release()  # as the kernel does
    last = ProcessHost()
    assert {*tmp_path.iterdir()} == {living.private, last.private}


def test_variables_are_sent_to_which_the_configuration_refers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("A_TOKEN", "JUDGE_KEY", "VECTORS_KEY", "OTHER_KEY", "WANDB_ENTITY"):
        monkeypatch.setenv(name, name.lower())
    parts = ["env={name: bandit, params: {token: '${oc.env:A_TOKEN}'}}"]
    parts += ["judge.kind=llm", "judge.llm={url: 'http://h', model: m, key_env: JUDGE_KEY}"]
    config = load(None, ["launch.kind=ray", "stages=[{steps: 1}]", *parts])
    config.experience.embedding.key_env = "VECTORS_KEY"
    sent = forwarded(config)
    assert sent.keys() >= {"A_TOKEN", "JUDGE_KEY", "VECTORS_KEY", "WANDB_ENTITY"}
    assert "OTHER_KEY" not in sent
    order = Order([], {}, "", secrets=sent, keys={"client.secret": b"key"})
    assert "a_token" not in repr(order) and "key" not in repr(order)


def test_a_process_that_ray_cannot_place_has_ended_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a runtime_env that cannot be made, or on a node that is gone."""

    def get(_: object) -> None:
        raise RuntimeEnvSetupError("no such environment")

    monkeypatch.setattr(ray, "wait", lambda replies, timeout: (replies, []))
    monkeypatch.setattr(ray, "get", get)
    host = SimpleNamespace(start=SimpleNamespace(remote=lambda order: order))
    handle = RayHandle("actor-0", host, Order([], {}, ""), "1 CPUs", tmp_path / "actor-0.log", HEAD)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    assert handle.poll() == 1
    said = (tmp_path / "actor-0.log").read_text()
    assert "its node cannot start it: " in said and "no such environment" in said


def test_a_process_that_cannot_be_watched_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on, beside the one that is started in its place."""
    replies, killed = [(17, "node")], []

    def get(_: object) -> tuple[int, str]:
        if replies:
            return replies.pop()
        raise RayTaskError("watch", "", OSError("Too many open files"))

    monkeypatch.setattr(ray, "wait", lambda replies, timeout: (replies, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    call = SimpleNamespace(remote=lambda order: order)
    host = SimpleNamespace(start=call, watch=call)
    handle = RayHandle("actor-0", host, Order([], {}, ""), "1 CPUs", tmp_path / "actor-0.log", HEAD)
    assert handle.poll() == 1 and killed == [host]
    assert "its node cannot watch it: Too many open files" in handle.log_file.read_text()


def test_a_process_whose_start_is_not_answered_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []

    def get(_: object) -> None:
        raise ActorUnavailableError("the network is down", None)

    monkeypatch.setattr(ray, "wait", lambda replies, timeout: (replies, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    host = SimpleNamespace(start=SimpleNamespace(remote=lambda order: order))
    handle = RayHandle("actor-0", host, Order([], {}, ""), "1 CPUs", tmp_path / "actor-0.log", HEAD)
    assert handle.poll() == -signal.SIGKILL and killed == [host]


def test_a_process_whose_node_went_before_it_was_placed_is_lost_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray goes on waiting for it."""
    head = head_with("here")
    monkeypatch.setattr(ray, "wait", lambda replies, timeout: ([], replies))
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr("evolver_async.launch.ray_cluster.handle.PATIENCE_S", 0.0)
    config = load(None, ["launch.kind=ray", "stages=[{steps: 1}]"])
    spawner = RaySpawner(config, tmp_path, f"ipc://{tmp_path}/none", "here", "gone", head)
    host = SimpleNamespace(start=SimpleNamespace(remote=lambda order: order))
    order = Order([], {}, "")
    waiting, learner = (
        RayHandle("learner", host, order, "1 CPUs", tmp_path / "learner.log", head, home)
        for home in ("here", "gone")
    )
    assert waiting.poll() is None and not spawner.lost(waiting)
    assert learner.poll() == -signal.SIGKILL and spawner.lost(learner) and spawner.bound("learner")
    assert "its node gone is gone" in learner.log_file.read_text()


def test_a_head_that_does_not_answer_blocks_nobody_and_ends_the_run_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question to it returns only when Ray ends the process that asked."""
    answering = threading.Event()
    answering.set()

    def ask() -> NodeView:
        asked = time.monotonic()
        answering.wait()
        return NodeView(frozenset(["here"]), frozenset(["here"]), asked)

    monkeypatch.setattr(heads, "_ask", ask)
    monkeypatch.setattr(heads, "LATE_S", 0.1)
    monkeypatch.setattr(heads, "LOOK_S", 0.01)
    monkeypatch.setattr(spawning, "PATIENCE_S", 0.2)
    head = HeadService("10.0.0.1:6399")
    config = load(None, ["launch.kind=ray", "stages=[{steps: 1}]"])
    spawner = RaySpawner(config, tmp_path, "ipc:///none", "here", "here", head)
    try:
        assert (view := head.now()) is not None and "here" in view.draining
        assert spawner.answers()
        answering.clear()
        wait_for(lambda: not spawner.answers(), "its silence")
        assert head.now(0.01) is None
        monkeypatch.setattr(head, "now", lambda: None)
        assert spawner.start("actor", "actor-0", 0).poll() == UNPLACED
        with pytest.raises(Unreachable, match="6399"):
            wait_for(spawner.answers, "the end")
        answering.set()
        wait_for(lambda: head.silent_s() == 0 and spawner.answers(), "its answers again")
        answering.clear()
        monkeypatch.setattr(head, "_looked", head._looked - heads.STANDSTILL_S - 1)
        monkeypatch.setattr(head, "view", NodeView(asked=head.view.asked - 100))
        assert spawner.answers(), "this process was stopped, too"
    finally:
        answering.set()
        spawner.close()


def test_a_log_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk; here a directory is in its place."""
    replies: list[tuple[object, object]] = [(17, "node"), (None, b"a line\n")]
    monkeypatch.setattr(ray, "wait", lambda _, timeout: (replies[:], []))
    monkeypatch.setattr(ray, "get", lambda _: replies.pop(0))
    call = SimpleNamespace(remote=lambda order: order)
    host = SimpleNamespace(start=call, watch=call)
    handle = RayHandle("actor-0", host, Order([], {}, ""), "1 CPUs", tmp_path, HEAD)
    assert handle.poll() is None and handle.pid == 17


@pytest.mark.parametrize("role", ["learner", "buffer"])
def test_what_has_died_finds_its_place_again_though_an_actor_waits_for_one(
    tmp_path: Path, role: str
) -> None:
    asked = "launch={kind: ray, ray: {service_cpus: 1}}"
    config = load(None, [asked, "stages=[{steps: 1}]"])
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    home = ray.get_runtime_context().get_node_id()
    head = HeadService()
    spawner = RaySpawner(config, tmp_path, f"ipc://{tmp_path}/none", home, home, head)
    handles: list[RayHandle] = []

    def start(role: str, name: str, incarnation: int = 0) -> RayHandle:
        handle = spawner.start(role, name, incarnation)
        assert isinstance(handle, RayHandle)
        handles.append(handle)
        return handle

    def placed(handle: RayHandle) -> str:
        handle.poll()
        return handle.node

    try:
        first = start(role, role)
        wait_for(lambda: placed(first), f"the {role}'s place")
        actor = start("actor", "actor-0")
        wait_for(lambda: placed(actor), "the place of an actor")
        waiting = start("actor", "actor-1")
        first.kill()
        again = start(role, role, 1)
        assert wait_for(lambda: placed(again), f"the {role}'s place again") == home
        assert not placed(waiting)
    finally:
        for handle in handles:
            handle.kill()
        head.close()
        ray.shutdown()


def descendants(run: Launch) -> dict[str, psutil.Process]:
    """The processes of the run by name, and those of Ray by number."""
    found = {}
    for process in psutil.Process(run.process.pid).children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        named = "evolver_async.cli" in line and "--name" in line
        found[line[line.index("--name") + 1] if named else str(process.pid)] = process
    return found


def test_a_run_restarts_grows_and_ends_by_ctrl_c_with_a_checkpoint(
    recipe: Path, launch: Callable[..., Launch]
) -> None:
    run_dir = recipe.parent / "run"
    run = launch(run_dir, recipe)
    run.wait_for_steps(1)
    first = descendants(run)["actor-0"]
    first.kill()
    wait_for(lambda: (now := descendants(run).get("actor-0")) and now != first, "another actor-0")
    run.rows()
    run.wait_for_steps(2)
    assert main(["scale", str(run_dir), "actors=2"]) == 0
    wait_for(lambda: "actor-1" in run.status()["actors"], "actor-1 at work")
    processes = descendants(run)
    assert {"buffer", "learner", "actor-0", "actor-1"} <= processes.keys()
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130, errors
    assert "actor-0 was killed by SIGKILL, restart 1 of 1" in errors
    wait_for(lambda: not any(map(alive, processes.values())), "the end of all processes")
    newest = valid(run_dir / "checkpoints")[-1][1]
    assert newest.step > 0, "the learner was asked to end, and saved"
    for name in ("buffer", "learner", "actor-0", "actor-1"):
        assert f"{name}, incarnation" in (run_dir / "logs" / f"{name}.log").read_text()


def test_a_resumed_run_goes_on_with_two_ranks_in_one_placement_group(
    recipe: Path, launch: Callable[..., Launch]
) -> None:
    run_dir = recipe.parent / "run"
    before = valid(run_dir / "checkpoints")[-1][1].step
    ranks = ["learner.ranks=2", "launch.ray.shared=true", f"stages.0.steps={before + 3}"]
    run = launch(run_dir, "--resume", run_dir, *ranks)
    code, errors = run.end()
    assert code == 0, errors
    assert valid(run_dir / "checkpoints")[-1][1].step == before + 3
    assert "learner-1 runs on node" in (run_dir / "logs" / "launcher.log").read_text()
    assert not list(Path(tempfile.gettempdir()).glob("evolver-ranks-*")), "they met there"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["launch.ray.address=auto"], "RAY_AUTH_MODE=token"),
        (
            ["launch.ray.runtime_env={env_vars: {MY_TOKEN: x}}"],
            "launch.ray.runtime_env: env_vars.MY_TOKEN looks like a secret",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(
    recipe: Path, launch: Callable[..., Launch], changes: list[str], message: str
) -> None:
    name = f"refused-{len(changes[0])}"
    run = launch(recipe.parent / name, recipe, f"run.name={name}", *changes)
    code, errors = run.end()
    assert code == 2 and message in errors and "Traceback" not in errors, errors
    assert changes[0].partition("=")[0] in errors
