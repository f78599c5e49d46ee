"""Names of hosts in addresses. libzmq looks them up again and again, and reports no failure."""

import socket
import threading
from ipaddress import ip_address

from evolver_async.config.sections.weight_channel import host_and_port
from evolver_async.wire.addresses import from_here


def require_place(address: str) -> None:
    """Raise ValueError if a tcp address has no host or no port."""
    if not address.startswith("tcp://"):
        return
    try:
        host, port = host_and_port(address)
    except ValueError:
        host, port = "", 0
    bare_ipv6 = ":" in host and not address.startswith("tcp://[")
    if not host or bare_ipv6 or not 0 < port < 1 << 16:
        form = "must be tcp://host:port with a port from 1 to 65535, an IPv6 address in brackets"
        raise ValueError(f"{address}: no address to connect to ({form})")


def unresolved(address: str) -> str:
    """Say that the host of a tcp address has no address here; "" if it has. May take seconds.

    As libzmq does, this asks for IPv6 where the host is in brackets.
    """
    if not (name := _name_in(address)):
        return ""
    ipv6 = address.startswith("tcp://[")
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        return f"the name {name} does not resolve to an IPv{6 if ipv6 else 4} address ({cause})"
    return ""


class NameLookup:
    """Lookups of the host of an address, each in a thread, since one can take many seconds."""

    def __init__(self, address: str) -> None:
        self.problem = ""  # what the newest lookup found
        self._address = address
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a lookup, unless one is under way or the host is no name."""
        if _name_in(self._address) and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        self.problem = unresolved(self._address)


def _name_in(address: str) -> str:
    """Return the name of the host in a tcp address; "" for a number, and for every interface."""
    if not address.startswith("tcp://"):
        return ""
    host, _ = host_and_port(from_here(address))
    try:
        ip_address(host)
    except ValueError:
        return host
    return ""
