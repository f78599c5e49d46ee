"""The weight channel that a configuration selects, and facts that follow from its address."""

from ipaddress import ip_address

from evolver_async.config.sections import Config


def channel(config: Config) -> str:
    """Return `weights.kind` with auto resolved: shm, collective or cuda_ipc."""
    weights, gpus = config.weights, config.launch.gpus
    if weights.kind != "auto":
        return weights.kind
    if weights.address:
        return "collective"
    one_gpu = bool(gpus.learner) and {*gpus.learner} == {*gpus.actors} and len({*gpus.actors}) == 1
    return "cuda_ipc" if one_gpu and config.engine.kind == "torch" else "shm"


def host_and_port(address: str) -> tuple[str, int]:
    """Split tcp://host:port, where an IPv6 host is in brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this host can reach the name or address `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def leaves_host(config: Config) -> bool:
    """Return True if weights travel to other hosts."""
    address = config.weights.address
    return bool(address) and not is_loopback(host_and_port(address)[0])


def versions_kept(config: Config) -> int:
    """Return the number of newest versions in a channel. Actors that lag need older ones.

    In memory that both ends share the newest can be replaced while it is read. Receivers by
    broadcast have copies of their own.
    """
    least = 1 if channel(config) == "collective" else 2
    return max(least, 1 + config.actors.weight_lag)
