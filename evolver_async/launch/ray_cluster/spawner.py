"""Placement of a run's processes on the nodes of a Ray cluster."""

import logging
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from evolver_async.config import Config
from evolver_async.config.secrets import mentioned
from evolver_async.config.sections.agentevolver import LLM_SECTIONS
from evolver_async.config.sections.weight_channel import host_and_port
from evolver_async.errors import UNPLACED
from evolver_async.launch.child import Handle, Spawner, Unreachable
from evolver_async.launch.ray_cluster.handle import RayHandle
from evolver_async.launch.ray_cluster.head import PATIENCE_S, HeadService
from evolver_async.launch.ray_cluster.ray_host import Order, ProcessHost

CLIENT_KEYS = ("server.public", "client.secret")  # what a client needs of the run's keys
NODE_LABEL = "ray.io/node-id"  # Ray sets it on every node
FORWARDED = "WANDB_"  # prefix of variables that every process of a run gets

log = logging.getLogger(__name__)


@dataclass
class RaySpawner(Spawner):
    """Starts processes as Ray actors.

    `home` is the node of the buffer and of the experience service, `learner_home` that of the
    learner, "" if it may run on any. Actors go wherever there is room.
    """

    home: str
    learner_home: str
    head: HeadService
    groups: dict[str, Any] = field(default_factory=dict)  # placement groups by role
    ranks: dict[int, RayHandle] = field(default_factory=dict)  # newest processes of the learner
    meeting: str = ""
    silent: bool = False  # the head's service

    def place(
        self, role: str, name: str, incarnation: int, rank: int, arguments: list[str]
    ) -> Handle:
        order = self._order(role, name, incarnation, arguments)
        if self.head.now() is None:  # to place it would block until Ray ends this process
            return self.failed(name, "the head of the Ray cluster does not answer", UNPLACED)
        cpus, gpus = self.resources(role)
        host: Any = ray.remote(ProcessHost)
        host = host.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,  # the supervisor restarts, under a new incarnation
            scheduling_strategy=self._strategy(role, rank),
            name=f"{self.run_dir.name}/{name}/{incarnation}",
        ).remote()
        wants = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        elsewhere = role == "learner" and rank >= self.config.learner.ranks_per_host
        log_file, home = self.log_file(name), "" if elsewhere else self._home_of(role)
        handle = RayHandle(name, host, order, wants, log_file, self.head, home)
        if role == "learner":
            self.ranks[rank] = handle
        return handle

    def moves(self, handle: Handle) -> bool:
        """True if the node of a process is being drained."""
        return isinstance(handle, RayHandle) and handle.node in self.head.view.draining

    def answers(self) -> bool:
        silent_s = self.head.silent_s()
        if self.silent and not silent_s:
            log.warning("the head of the Ray cluster answers again")
        elif silent_s and not self.silent:
            log.warning(
                "the head of the Ray cluster, %s, does not answer (its GCS): no process is started"
                " until it does; after %.0f s the run saves and ends",
                self.head.address,
                PATIENCE_S,
            )
        self.silent = bool(silent_s)
        if silent_s > PATIENCE_S:
            raise Unreachable(gone(self.config.launch.ray.address, self.head.address, silent_s))
        return not self.silent

    def bound(self, role: str) -> bool:
        """True for what has one node: others know its address, or its files are there."""
        return bool(self._home_of(role))

    def place_of(self, role: str) -> str:
        key = learner_section(self.config) if role == "learner" else "buffer"
        if not (address := getattr(self.config, key).address):
            key, address = "buffer", self.config.buffer.address
        if not address:
            return "place: it is where the run is started"
        host, port = host_and_port(address)
        again = f"`ray start --address={self.head.address}` on {host}"
        other = f"add {key}.address=tcp://HOST:{port} with the HOST of another node"
        return f"place: join that node again ({again}), or {other}"

    def hinders(self, handle: Handle, waiting: Handle) -> bool:
        """True if a process runs where the waiting one may."""
        return (
            isinstance(handle, RayHandle)
            and isinstance(waiting, RayHandle)
            and waiting.home in ("", handle.node)
        )

    def lost(self, handle: Handle) -> bool:
        """True if the node of a process that ended is no longer there."""
        node = (handle.node or handle.home) if isinstance(handle, RayHandle) else ""
        view = self.head.now() if node else None
        return view is not None and node not in view.living

    def _home_of(self, role: str) -> str:
        return {"actor": "", "learner": self.learner_home}.get(role, self.home)

    def resources(self, role: str) -> tuple[float, float]:
        """Return the CPUs and GPUs of one process of a role."""
        asked = self.config.launch.ray
        if role == "actor":
            return asked.actor_cpus, asked.actor_gpus
        if role == "learner":
            return asked.learner_cpus, asked.learner_gpus
        return asked.service_cpus, 0.0

    def _strategy(self, role: str, rank: int) -> Any:
        if role == "actor":
            return "SPREAD" if self.config.launch.ray.strategy == "spread" else "DEFAULT"
        node, resources = self._home_of(role), self.resources(role)
        spread = role == "learner" and self.config.learner.hosts > 1
        if node and not any(resources) and not spread:  # nothing to reserve
            return NodeAffinitySchedulingStrategy(node, soft=False)
        # A restart keeps its reserved places, unless a node of theirs is drained or gone.
        last = self.ranks.values() if role == "learner" and rank == 0 else ()
        if any(self.moves(one) or self.lost(one) for one in last):
            self._give_back(role)
        host = rank // self.config.learner.ranks_per_host
        return PlacementGroupSchedulingStrategy(
            self._reserved(role, node, resources), placement_group_bundle_index=host
        )

    def _reserved(self, role: str, node: str, resources: tuple[float, float]) -> Any:
        """Reserve the resources of a role's processes, those of a learner's host together on a node
        of its own, and keep them for restarts. The first host has `node`.

        An actor that waits for its place would take what a process that has died gives back.
        """
        if role not in self.groups:
            learner, here = self.config.learner, role == "learner"
            count, hosts = (learner.ranks_per_host, learner.hosts) if here else (1, 1)
            amounts = zip(("CPU", "GPU"), resources, strict=True)
            bundle = {name: count * amount for name, amount in amounts if amount}
            labels = [{NODE_LABEL: node} if node else {}, *[{}] * (hosts - 1)]
            self.groups[role] = placement_group(
                [bundle or {"CPU": 0.01}] * hosts,
                strategy="STRICT_PACK" if hosts == 1 else "STRICT_SPREAD",
                bundle_label_selector=labels,
            )
        return self.groups[role]

    def _give_back(self, role: str) -> None:
        if role in self.groups:
            remove_placement_group(self.groups.pop(role))

    def close(self) -> None:
        """Give back all reserved resources, unless the head of the cluster is silent."""
        if self.silent:
            self.head.close(wait_s=0)
            return
        for role in list(self.groups) if self.head.now() is not None else ():
            self._give_back(role)
        self.head.close()

    def start_others(self, role: str, name: str, incarnation: int, first: int = 0) -> list[Handle]:
        """Start the other ranks of a learner, on all of its hosts."""
        ranks = range(first + 1, self.config.learner.ranks if role == "learner" else first + 1)
        return [self.start(role, f"{name}-{rank}", incarnation, rank) for rank in ranks]

    def _order(self, role: str, name: str, incarnation: int, arguments: list[str]) -> Order:
        at_home = role != "actor"
        if at_home:
            arguments = [*arguments, "--run", str(self.run_dir)]
        keys = {}
        if self.keys is not None and role in ("buffer", "experience"):
            arguments = [*arguments, "--keys", str(self.keys)]  # with those of admitted clients
        elif self.keys is not None:
            keys = {one: (self.keys / one).read_bytes() for one in CLIENT_KEYS}
        learner = self.config.learner  # ranks of several hosts meet at its address
        several = role == "learner" and learner.ranks > 1 and learner.hosts == 1
        if several and "--rank" in arguments and arguments[arguments.index("--rank") + 1] == "0":
            self.meeting = f"evolver-ranks-{secrets.token_hex(8)}"
        return Order(
            arguments=arguments,
            variables=self.variables(role),
            directory=os.getcwd(),
            log=str(self.log_file(name)) if at_home else "",
            meeting=self.meeting if several else "",
            secrets=forwarded(self.config),
            keys=keys,
        )


def learner_section(config: Config) -> str:
    """Return the section whose address binds the learner's first rank to a node."""
    return "learner" if config.learner.hosts > 1 else "weights"


def gone(asked: str, head: str, silent_s: float) -> str:
    """Say what to do without the service of the head; `asked`: launch.ray.address."""
    host, _, port = head.rpartition(":")
    text = f"the head of the Ray cluster, {head}, has not answered for {silent_s:.0f} s (its GCS):"
    if asked == "local":
        return f"{text} the run saves and ends; the next start has a Ray of its own again"
    return (
        f"{text} the run saves and ends; start the cluster again, on {host} with `ray start --head"
        f" --port={port}`, on other nodes with `ray start --address={head}`, and then continue"
    )


def forwarded(config: Config) -> dict[str, str]:
    """Return the variables of this process that its configuration refers to, and those of W&B."""
    names = {getattr(config, one).llm.key_env for one in LLM_SECTIONS} | mentioned(config)
    others = config.experience.embedding, config.rollout.endpoint, config.teacher
    names |= {one.key_env for one in others} | {config.rollout.serve.users_env}
    names |= {name for name in os.environ if name.startswith(FORWARDED)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}
