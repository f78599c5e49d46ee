"""A Ray cluster of two nodes on this machine, one of which can be lost and replaced."""

import os
from typing import Any

from ray.cluster_utils import Cluster

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
HEAD_CPUS, WORKER_CPUS = 2, 1  # the learner and one actor; another actor
QUICK = {  # so that Ray sees within seconds that a node is gone
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 10,
}


class Nodes:
    """A head, and one worker that can be lost and replaced."""

    def __init__(self) -> None:
        arguments = {"num_cpus": HEAD_CPUS, "_system_config": QUICK, "include_dashboard": False}
        self.cluster = Cluster()
        self.add(**arguments)
        self.worker = self.add(num_cpus=WORKER_CPUS)

    def add(self, **arguments: Any) -> Any:
        """Add a node; Ray gives it 30 s to start, which a busy machine can exceed."""
        for _ in range(4):
            try:
                return self.cluster.add_node(**arguments)
            except Exception as error:
                failure = error
        raise failure

    @property
    def address(self) -> str:
        return self.cluster.address

    def lose(self) -> None:
        """The worker's processes are killed."""
        self.cluster.remove_node(self.worker, allow_graceful=False)

    def replace(self) -> None:
        self.worker = self.add(num_cpus=WORKER_CPUS)
