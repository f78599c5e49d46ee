"""Which weight channel a configuration means, and what excludes which."""

import re
from ipaddress import ip_address

from evolver_async.config import Config
from evolver_async.config.values import require


def channel(config: Config) -> str:
    """`weights.kind` without auto: shm, collective or cuda_ipc."""
    weights, gpus = config.weights, config.launch.gpus
    if weights.kind != "auto":
        return weights.kind
    if weights.address:
        return "collective"
    one_gpu = bool(gpus.learner) and {*gpus.learner} == {*gpus.actors} and len({*gpus.actors}) == 1
    return "cuda_ipc" if one_gpu and config.engine.kind == "torch" else "shm"


def host_and_port(address: str) -> tuple[str, int]:
    """Of tcp://host:port, where an IPv6 host is in brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def check_channel(config: Config) -> None:
    """Raises ConfigError for a channel that cannot work here, or would be open to strangers."""
    weights, kind = config.weights, channel(config)
    if config.launch.kind == "serial":
        require(
            kind == "shm",
            "weights.kind",
            f"launch.kind=serial has one process: {kind} is not for it",
        )
    if kind == "cuda_ipc":
        for section, device in (
            ("learner", config.learner.device),
            ("engine", config.engine.device),
        ):
            require(
                device != "cpu", f"{section}.device", "weights.kind=cuda_ipc needs a GPU, is cpu"
            )
        require(
            config.learner.ranks == 1 and config.engine.tensor_parallel == 1,
            "weights.kind",
            "cuda_ipc is for a learner and engines on one GPU, with one rank each",
        )
        named = sorted({*config.launch.gpus.learner, *config.launch.gpus.actors})
        require(
            len(named) <= 1,
            "weights.kind",
            f"cuda_ipc is for a learner and engines on one GPU, and launch.gpus names {named}",
        )
    if not weights.address:
        return
    require(kind == "collective", "weights.address", f"is for weights.kind=collective, not {kind}")
    require(
        re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+):\d{1,5}", weights.address) is not None,
        "weights.address",
        f"must be tcp://host:port, is {weights.address!r}",
    )
    host, port = host_and_port(weights.address)
    require(0 < port < 1 << 16, "weights.address", f"{port} is not a port (1 to 65535)")
    require(
        host not in ("*", "0.0.0.0", "::"),
        "weights.address",
        "must name the interface through which actors reach the learner's host",
    )
    require(
        weights.trusted_network or _is_loopback(host),
        "weights.trusted_network",
        f"{host} is not a loopback address, and weights travel neither encrypted nor authenticated:"
        " set it where only hosts that you trust can reach that network",
    )


def leaves_host(config: Config) -> bool:
    """Whether weights travel to other hosts."""
    address = config.weights.address
    return bool(address) and not _is_loopback(host_and_port(address)[0])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def versions_kept(config: Config) -> int:
    """How many of the newest versions a channel keeps: actors that hold weights back need older
    ones."""
    return max(2, 1 + config.actors.weight_lag)
