"""Addresses host:port that a process of the run serves HTTP at."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from evolver_async.config import ConfigError
from evolver_async.config.sections.weight_channel import host_and_port


@contextmanager
def naming(key: str, address: str) -> Iterator[None]:
    """Raise ConfigError, which names the key and the address, instead of the error of a socket."""
    try:
        yield
    except (OSError, OverflowError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: {address}: {cause}") from None


def check_free(key: str, address: str) -> None:
    """Raise ConfigError, which names the key, if nothing could be served at an address now."""
    with naming(key, address):
        host, port = host_and_port(address)
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((place[0], port, *place[2:]))  # the resolver cuts a port that is too large
