"""The launcher for a Ray cluster: Ray places the processes, our own sockets carry all data."""

from evolver_async.launch.ray_cluster.launcher import run

__all__ = ["run"]
