"""Start of a run on a Ray cluster: the connection, the checks, the supervisor."""

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray._private.state import state  # pyright: ignore[reportMissingImports]

from evolver_async.config import Config, ConfigError
from evolver_async.config.secrets import looks_secret
from evolver_async.config.sections.system import NO_CLIENT
from evolver_async.config.sections.weight_channel import (
    channel,
    host_and_port,
    is_loopback,
    leaves_host,
)
from evolver_async.errors import USER_ERROR
from evolver_async.launch.ray_cluster.head import HeadService
from evolver_async.launch.ray_cluster.spawner import RaySpawner, learner_section
from evolver_async.launch.supervisor import Supervisor
from evolver_async.process.private_directories import PREFIX, Claim, claim, sweep
from evolver_async.process.rendezvous import make_weights_dir
from evolver_async.wire.addresses import EVERYWHERE

AUTHENTICATION = (
    "if the cluster runs, its authentication may differ: `ray start --head` switches tokens on"
    " where ~/.ray/auth_token exists. Set RAY_AUTH_MODE=token here and on every node, with the"
    " token of `ray get-auth-token` on the head in ~/.ray/auth_token or RAY_AUTH_TOKEN; or"
    " RAY_AUTH_MODE=disabled everywhere"
)
STARTS = 3  # of a Ray instance of its own, on a busy machine

log = logging.getLogger(__name__)


def run(config: Config, run_dir: Path) -> int:
    """Run to the end; return 0, 128 + the signal that ended it, or the exit code of a failure."""
    claims: list[Claim] = []
    spawner = None
    try:
        connect(config)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        home = home_of(config, nodes)
        check(config, nodes, home, state.get_max_resources_from_cluster_config())
        learner_home = learner_home_of(config, nodes, home)
        for parent in (Path(config.weights.dir), Path(tempfile.gettempdir())):
            sweep(parent)
        claims.append(claim(make_weights_dir(config, run_dir)))
        claims.append(claim(Path(tempfile.mkdtemp(prefix=PREFIX))))
        address = config.buffer.address or f"ipc://{claims[-1].directory}/buffer"
        head = HeadService(ray.get_runtime_context().gcs_address)
        spawner = RaySpawner(config, run_dir, address, home, learner_home, head)
        try:
            return Supervisor(config, run_dir, spawner).run()
        finally:
            spawner.close()
    except (ConfigError, ConnectionError, OSError) as error:
        log.error("%s", error)
        return USER_ERROR
    finally:
        for one in claims:
            one.remove()
        if spawner is None or not spawner.silent:
            ray.shutdown()  # else for seconds: Ray does it at exit, when the end is written


def connect(config: Config) -> None:
    """Connect to the cluster, or start one on this machine. Raise ConfigError if there is none."""
    asked = config.launch.ray
    for name in filter(looks_secret, asked.runtime_env.get("env_vars", {})):
        raise ConfigError(
            f"launch.ray.runtime_env: env_vars.{name} looks like a secret, which Ray's dashboard"
            " would show: set it where you start the run, and refer to it as ${oc.env:NAME} or"
            " key_env; the launcher sends such variables to the processes"
        )
    if asked.address == "auto" and os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS: must be HOST:PORT or none, with launch.ray.address {NO_CLIENT}"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if asked.runtime_env:
        options["runtime_env"] = asked.runtime_env
    if asked.address == "local":
        cpus, gpus = demand(config)
        options |= {"num_cpus": max(1, round(cpus + 0.5)), "include_dashboard": False}
        options |= {"num_gpus": round(gpus + 0.5)} if gpus and not _has_gpus() else {}
    for attempt in range(STARTS):
        try:
            ray.init(asked.address, **options)
            return
        except (
            Exception
        ) as error:  # Ray gives its own instance 30 s, and raises no class of its own
            reason = " ".join(str(error).split())
            own = asked.address == "local"  # another one that does not answer is gone
            if not own or "timed out" not in reason or attempt + 1 == STARTS:
                hint = "" if own else f"; {AUTHENTICATION}"
                raise ConfigError(f"launch.ray.address: {asked.address}: {reason}{hint}") from None
            log.warning("Ray did not start, and is started again: %s", reason)
            ray.shutdown()


def _has_gpus() -> bool:
    return os.path.exists("/dev/nvidiactl")


def demand(config: Config) -> tuple[float, float]:
    """Return the CPUs and GPUs that all processes of a run ask for together."""
    asked, actors, ranks = config.launch.ray, config.actors.bounds()[1], config.learner.ranks
    cpus = 2 * asked.service_cpus + actors * asked.actor_cpus + ranks * asked.learner_cpus
    return cpus, actors * asked.actor_gpus + ranks * asked.learner_gpus


def check(
    config: Config,
    nodes: list[dict[str, Any]],
    home: str,
    growth: Mapping[str, float] | None = None,
) -> None:
    """Raise ConfigError for what cannot work on these nodes, of which `home` is the buffer's.

    `growth`: the most of every resource that an autoscaler may bring; None without one.
    """
    _check_learner(config, nodes, home)
    if growth is None:
        _check_actors(config, nodes)
    _check_addresses(config, nodes)
    _check_policy(config, nodes)
    if len(nodes) == 1:
        return
    where = f"{len(nodes)} nodes"
    if not config.buffer.address.startswith("tcp://"):
        raise ConfigError(
            f"buffer.address: processes on {where} need tcp://HOST:PORT, HOST being a node's"
            " address, and security.keys"
        )
    named = f"must name a node by its address: processes on {where} would look for"
    host, _ = host_and_port(config.buffer.address)
    hosts = {node["NodeManagerAddress"] for node in nodes}
    # nodes of one machine can have loopback addresses of their own
    here_alone = is_loopback(host) and host not in hosts
    if host in (*EVERYWHERE, "::") or (here_alone and len(hosts) > 1):
        raise ConfigError(f"buffer.address: {named} {host} on their own")
    met = host_and_port(config.learner.address)[0] if config.learner.hosts > 1 else ""
    if met and is_loopback(met) and met not in hosts:
        raise ConfigError(f"learner.address: {named} {met} on their own")
    if config.weights.address and len(hosts) > 1 and not leaves_host(config):
        raise ConfigError(f"weights.address: {named} {config.weights.address} on their own")
    if channel(config) == "cuda_ipc":
        raise ConfigError(f"weights.kind: cuda_ipc is for one GPU, and the cluster has {where}")
    if channel(config) == "collective" and not config.weights.address:
        raise ConfigError(
            f"weights.address: processes on {where} need tcp://HOST:PORT of the learner's node, on"
            " which weights stay without it"
        )
    if channel(config) == "shm" and Path(config.weights.dir).is_relative_to("/dev/shm"):
        raise ConfigError(
            f"weights.kind: shm in {config.weights.dir} belongs to one host: processes on {where}"
            " need collective, or a weights.dir that all of them see"
        )


def _check_actors(config: Config, nodes: list[dict[str, Any]]) -> None:
    """Raise ConfigError unless some node has, when it is idle, what one actor asks for."""
    asked = {"CPU": config.launch.ray.actor_cpus, "GPU": config.launch.ray.actor_gpus}
    has = [{name: one["Resources"].get(name, 0.0) for name in asked} for one in nodes]
    if any(all(one[name] >= asked[name] for name in asked) for one in has):
        return
    largest = max(range(len(nodes)), key=lambda index: (has[index]["GPU"], has[index]["CPU"]))
    key = "actor_gpus" if asked["GPU"] > has[largest]["GPU"] else "actor_cpus"
    raise ConfigError(
        f"launch.ray.{key}: an actor asks for {asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs, and"
        f" the largest node, {nodes[largest]['NodeManagerHostname']}, has"
        f" {has[largest]['CPU']:g} and {has[largest]['GPU']:g}; no autoscaler brings a larger one"
    )


def _check_addresses(config: Config, nodes: list[dict[str, Any]]) -> None:
    """Raise ConfigError if an address belongs to no node, as to one that is gone.

    It may be another address of this node than the one that Ray knows.
    """
    tcp = config.buffer.address if config.buffer.address.startswith("tcp://") else ""
    met = config.learner.address if config.learner.hosts > 1 else ""
    for key, address in (("buffer", tcp), ("weights", config.weights.address), ("learner", met)):
        host = host_and_port(address)[0] if address else ""
        if host and host not in (*EVERYWHERE, "::") and not _at(host, nodes) and not _is_here(host):
            known = ", ".join(
                sorted(f"{one['NodeManagerHostname']} {one['NodeManagerAddress']}" for one in nodes)
            )
            raise ConfigError(
                f"{key}.address: {host} is no node of the cluster now; name one of these: {known}"
            )


def _is_here(host: str) -> bool:
    """Return True if `host` is an address or a name of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as one:
            one.bind(address)
    except OSError:
        return False
    return True


def _check_policy(config: Config, nodes: list[dict[str, Any]]) -> None:
    """Raise ConfigError if the policy lies in run.dir, which other hosts need not see."""
    run_dir = Path(config.run.dir) / config.run.name
    several = len({node["NodeManagerAddress"] for node in nodes}) > 1
    inside = not config.policy.path or Path(config.policy.path).is_relative_to(run_dir)
    if several and inside and not config.launch.ray.shared:
        raise ConfigError(
            "policy.path: the new model of this run lies in run.dir, and actors on other hosts must"
            " see it: set launch.ray.shared=true if every host sees run.dir, or policy.path to a"
            " model that all of them have"
        )


def _check_learner(config: Config, nodes: list[dict[str, Any]], home: str) -> None:
    """Raise ConfigError unless a node where the learner may run has room for a host's ranks."""
    asked, ranks, hosts = config.launch.ray, config.learner.ranks_per_host, config.learner.hosts
    place = learner_home_of(config, nodes, home)
    needed = {"CPU": ranks * asked.learner_cpus, "GPU": ranks * asked.learner_gpus}
    roomy = [
        one
        for one in nodes
        if all(one["Resources"].get(name, 0.0) >= least for name, least in needed.items())
    ]
    if len(roomy) < hosts > 1:
        each = f"{needed['CPU']:g} CPUs and {needed['GPU']:g} GPUs, for {ranks} ranks each"
        raise ConfigError(f"learner.hosts: needs {hosts} nodes with {each}; there are {len(roomy)}")
    if hosts > 1 and config.weights.address:
        met, published = (
            _at(host_and_port(address)[0], nodes)
            for address in (config.learner.address, config.weights.address)
        )
        if met != published:
            raise ConfigError(
                f"weights.address: {config.weights.address} must be on the node of learner.address"
                f" ({config.learner.address}): the first rank has both"
            )
    if place != home and not asked.shared:
        raise ConfigError(
            f"weights.address: {config.weights.address} is on another node than the buffer, and"
            " without launch.ray.shared the learner runs on the buffer's"
        )
    places = [one for one in nodes if place in ("", one["NodeID"])]
    which = f"node of {learner_section(config)}.address" if place else "largest node"
    if not asked.shared:
        which = "node of the buffer, without launch.ray.shared,"
    for name, each in (("CPU", asked.learner_cpus), ("GPU", asked.learner_gpus)):
        largest = max((one["Resources"].get(name, 0.0) for one in places), default=0.0)
        if ranks * each > largest:
            together = "all ranks" if hosts == 1 else "the ranks of a host"
            raise ConfigError(
                f"learner.ranks: {together} run on one node: {ranks} with {each:g} {name}s each"
                f" need {ranks * each:g} there, and the {which} has {largest:g}"
            )


def home_of(config: Config, nodes: list[dict[str, Any]]) -> str:
    """Return the id of the node of the buffer: that of its address, else this one."""
    if config.buffer.address.startswith("tcp://"):
        host, _ = host_and_port(config.buffer.address)
        if named := _at(host, nodes):
            return named[-1]
    return ray.get_runtime_context().get_node_id()


def learner_home_of(config: Config, nodes: list[dict[str, Any]], home: str) -> str:
    """Return the id of the node of the learner's first rank, "" if it may run on any: that of
    `learner.address`, at which ranks of several hosts meet, or of `weights.address`, at which it
    publishes, else the buffer's unless every node sees `run.dir`."""
    otherwise = "" if config.launch.ray.shared else home
    address = getattr(config, learner_section(config)).address
    if not address:
        return otherwise
    host, _ = host_and_port(address)
    named = _at(host, nodes)
    return home if home in named else next(iter(named), otherwise)


def _at(host: str, nodes: list[dict[str, Any]]) -> list[str]:
    """Return the ids of the nodes of a host, of which `host` is the address or the name."""
    names = ("NodeManagerAddress", "NodeManagerHostname")
    return [node["NodeID"] for node in nodes if host in [node[name] for name in names]]
