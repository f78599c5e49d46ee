"""Checks of addresses: sockets, the weight channel and endpoints of models."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from evolver_async.config.sections import Config
from evolver_async.config.sections.agentevolver import EmbeddingConfig, LlmConfig
from evolver_async.config.sections.learner import TeacherConfig
from evolver_async.config.sections.weight_channel import channel, host_and_port, is_loopback

TCP = r"tcp://(\[[^\[\]/]+\]|[^:/\[\]]+):\d{1,5}"


def buffer_address(config: Config) -> Iterator[tuple[str, str]]:
    """Require a buffer socket that is on this host or encrypted."""
    yield from socket_address("buffer.address", config.buffer.address, config.security.keys)


def no_sockets(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse sockets of a serial run, which has none."""
    if config.launch.kind != "serial":
        return
    for key, value in (
        ("buffer.address", config.buffer.address),
        ("experience.address", config.experience.address),
        ("security.keys", config.security.keys),
    ):
        if value:
            yield key, "launch.kind=serial is one process: must be empty"


def socket_address(key: str, address: str, keys: str) -> Iterator[tuple[str, str]]:
    """Require a socket on this host if there are no keys: nothing is encrypted then."""
    if not address or address.startswith("ipc://"):
        return
    if not re.fullmatch(TCP, address):
        yield key, f"must be ipc://path or tcp://host:port, is {address!r}"
    host, port = host_and_port(address)
    if not keys and not is_loopback(host):
        needed = "security.keys (`evolver-async keys DIR`)"
        yield key, f"{host} is not a loopback address, so it needs {needed}"
    yield from _port(key, port)


def weight_channel(config: Config) -> Iterator[tuple[str, str]]:
    """Require a weight channel that works with these processes and excludes strangers."""
    weights, kind = config.weights, channel(config)
    if config.launch.kind == "serial" and kind != "shm":
        yield "weights.kind", f"must be shm: launch.kind=serial is one process, is {kind}"
    if kind == "cuda_ipc":
        yield from _one_gpu(config)
    if not weights.address:
        return
    if kind != "collective":
        yield "weights.address", f"needs weights.kind=collective, which is {kind}"
    yield from open_address("weights", weights.address, weights.trusted_network, "actors")


def open_address(
    section: str, address: str, trusted: bool, guests: str
) -> Iterator[tuple[str, str]]:
    """Require an address of the learner's host at which `guests` meet it without encryption."""
    key = f"{section}.address"
    if not re.fullmatch(TCP, address):
        yield key, f"must be tcp://host:port, is {address!r}"
        return
    host, port = host_and_port(address)
    yield from _port(key, port)
    if host in ("*", "0.0.0.0", "::"):
        interface = f"the interface by which {guests} reach the learner's host"
        yield key, f"must name {interface}, is {host}"
    if not trusted and not is_loopback(host):
        yield (
            f"{section}.trusted_network",
            f"{host} is not a loopback address, and weights travel neither encrypted nor"
            " authenticated: set it to true only if you trust all hosts of that network",
        )


def _one_gpu(config: Config) -> Iterator[tuple[str, str]]:
    for section in ("learner", "engine"):
        if getattr(config, section).device == "cpu":
            yield f"{section}.device", "must be cuda with weights.kind=cuda_ipc, is cpu"
    named = sorted({*config.launch.gpus.learner, *config.launch.gpus.actors})
    purpose = "cuda_ipc is for a learner and engines on one GPU"
    if config.learner.ranks > 1 or config.engine.tensor_parallel > 1:
        yield "weights.kind", f"{purpose}, with one rank each"
    if len(named) > 1:
        yield "weights.kind", f"{purpose}, and launch.gpus names {named}"


def _port(key: str, port: int) -> Iterator[tuple[str, str]]:
    if not 0 < port < 1 << 16:
        yield key, f"{port} is not a port (1 to 65535)"


def endpoint(
    key: str, llm: LlmConfig | EmbeddingConfig | TeacherConfig
) -> Iterator[tuple[str, str]]:
    """Require a model and its URL, without login or query, because files will hold it."""
    for name in ("url", "model"):
        if not getattr(llm, name):
            yield f"{key}.{name}", "must be set for calls of this model"
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", llm.url):
        form = "http:// or https://, a host, and a path without login or query"
        yield f"{key}.url", f"must be {form}"
    try:
        named = urlsplit(llm.url).port != 0
    except ValueError:
        named = False
    if not named:
        yield f"{key}.url", "must have a port from 1 to 65535, or none"
