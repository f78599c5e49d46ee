"""Ray clusters on this machine, whose nodes can be lost and replaced."""

import os
import socket
from typing import Any

from ray.cluster_utils import Cluster

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
HEAD_CPUS, WORKER_CPUS = 2, 1  # the learner and one actor; another actor
QUICK = {  # so that Ray sees within seconds that a node is gone
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 10,
}
BUFFER = "127.0.0.2"  # addresses of three hosts; the head has that of this machine
WORKERS = ("127.0.0.3", "127.0.0.4")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def add(cluster: Cluster, **arguments: Any) -> Any:
    """Add a node; Ray gives it 30 s to start, which a busy machine can exceed."""
    for _ in range(4):
        try:
            return cluster.add_node(**arguments)
        except Exception as error:
            failure = error
    raise failure


class Nodes:
    """A head, and one worker that can be lost and replaced."""

    def __init__(self) -> None:
        arguments = {"num_cpus": HEAD_CPUS, "_system_config": QUICK, "include_dashboard": False}
        self.cluster = Cluster()
        add(self.cluster, **arguments)
        self.worker = add(self.cluster, num_cpus=WORKER_CPUS)

    @property
    def address(self) -> str:
        return self.cluster.address

    def lose(self) -> None:
        """The worker's processes are killed."""
        self.cluster.remove_node(self.worker, allow_graceful=False)

    def replace(self) -> None:
        self.worker = add(self.cluster, num_cpus=WORKER_CPUS)


class Hosts:
    """Four nodes: a head without room, one for the buffer, two for learner and actors."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start all nodes, the head at the same port as before."""
        self.cluster = Cluster()
        arguments = {"_system_config": QUICK, "include_dashboard": False}
        add(self.cluster, num_cpus=0, gcs_server_port=self.port, **arguments)
        self.address = self.cluster.address
        self.nodes: dict[str, Any] = {}
        for address in (BUFFER, *WORKERS):
            self.join(address)

    def join(self, address: str) -> None:
        """Start the node of a host."""
        cpus = 2 if address in WORKERS else 0
        self.nodes[address] = add(self.cluster, num_cpus=cpus, node_ip_address=address)

    def host_of(self, node: str) -> str:
        """The address of the host of a node, by the beginning of its id."""
        return next(a for a, one in self.nodes.items() if one.node_id.startswith(node))

    def lose(self, address: str) -> None:
        """The processes of a host are killed."""
        self.cluster.remove_node(self.nodes.pop(address), allow_graceful=False)

    def lose_head(self) -> None:
        """The service of the head is killed; what else it has runs on."""
        self.cluster.head_node.kill_gcs_server(check_alive=False)

    def end(self) -> None:
        """The processes of all hosts are killed."""
        for address in list(self.nodes):
            self.lose(address)
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)
        self.cluster.shutdown()  # forgets its address, which others would wait for
