"""What tests need of the network: IPv6, and a far host in a namespace behind a virtual cable."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def run(*command: str) -> bool:
    """True if the command succeeds."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass
class FarHost:
    """`here` is this host's address on the cable to it."""

    name: str
    here: str

    @property
    def cable(self) -> str:
        return f"{self.name}h"

    def command(self, *command: str) -> list[str]:
        """The command, to be run there."""
        return ["ip", "netns", "exec", self.name, *command]

    def enter(self) -> None:
        """Move this thread, and those that it starts, there."""
        with open(f"/var/run/netns/{self.name}") as namespace:
            found = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0)
        assert found == 0, os.strerror(ctypes.get_errno())

    def cut(self) -> None:
        assert run("ip", "link", "set", self.cable, "down")

    def heal(self) -> None:
        assert run("ip", "link", "set", self.cable, "up")

    def disturb(self, *how: str) -> bool:
        """Delay and lose packets in both directions; False if this kernel cannot."""
        there = self.command("tc", "qdisc", "replace", "dev", f"{self.name}t", "root", "netem")
        here = ["tc", "qdisc", "replace", "dev", self.cable, "root", "netem"]
        return run(*here, *how) and run(*there, *how)

    def calm(self) -> None:
        run("tc", "qdisc", "del", "dev", self.cable, "root")
        run(*self.command("tc", "qdisc", "del", "dev", f"{self.name}t", "root"))

    def free_port(self) -> int:
        with socket.socket() as one:
            one.bind((self.here, 0))
            return one.getsockname()[1]


@contextlib.contextmanager
def far_host() -> Iterator[FarHost | None]:
    """A far host; None where namespaces cannot be made."""
    number = os.getpid() % 250
    host = FarHost(f"evo{os.getpid()}", f"10.213.{number}.1")
    there = f"10.213.{number}.2"
    made = shutil.which("ip") is not None and run("ip", "netns", "add", host.name)
    steps = (
        ("ip", "link", "add", host.cable, "type", "veth", "peer", "name", f"{host.name}t"),
        ("ip", "link", "set", f"{host.name}t", "netns", host.name),
        ("ip", "addr", "add", f"{host.here}/24", "dev", host.cable),
        ("ip", "link", "set", host.cable, "up"),
        (*host.command("ip", "addr", "add", f"{there}/24", "dev", f"{host.name}t"),),
        (*host.command("ip", "link", "set", f"{host.name}t", "up"),),
        (*host.command("ip", "link", "set", "lo", "up"),),
    )
    try:
        yield host if made and all(run(*step) for step in steps) else None
    finally:
        if made:
            run("ip", "link", "del", host.cable)
            run("ip", "netns", "del", host.name)
