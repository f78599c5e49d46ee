"""Key files: identity of the buffer and of the clients that it admits.

    DIR/                   stays where the buffer runs
      server.secret        the buffer's identity
      server.public        the same, as its clients know it
      client.secret        of the run's own processes, of `status` and of `watch`
      allowed/NAME.public  one file per admitted client; deleting it revokes the right
      NAME/                files of client NAME: copy them to its host, then delete them here
        server.public
        client.secret

A file is one line: the 40 characters of a CurveZMQ key in Z85. Files have mode 0600, directories
0700. `curve` gives the keys to the sockets.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

ALLOWED = "allowed"
OWN = "run"  # the name of `client.secret` in the list
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
CHARACTERS = 40


class KeysError(ValueError):
    """A key file that cannot be used or would be overwritten; the message omits its content."""


@dataclass(frozen=True)
class ClientKeys:
    """Keys of a client, in Z85."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


def make(directory: Path, names: Iterable[str]) -> list[Path]:
    """Make the keys of a run and of the clients `names`; return the directories for the clients.

    A directory that holds keys already only gets further clients. Nothing is ever overwritten:
    raises KeysError before anything is written.
    """
    names = list(names)
    for name in names:
        if not NAME.fullmatch(name) or name in (ALLOWED, OWN):
            raise KeysError(f"{name!r}: is no name for a client (letters, digits, - and _)")
    if len(set(names)) < len(names):
        raise KeysError("names: one is given twice")
    for name in names:
        for path in (directory / name, directory / ALLOWED / f"{name}.public"):
            if path.exists():
                raise KeysError(f"{path}: exists, and keys are not overwritten")
    if not directory.exists():
        _make_server(directory)
    elif not names:
        raise KeysError(f"{directory}: exists, and keys are not overwritten")
    server = read_key(directory / "server.public")
    for name in names:
        (directory / name).mkdir(mode=0o700)
        public, secret = zmq.curve_keypair()
        _write(directory / name / "server.public", server)
        _write(directory / name / "client.secret", secret)
        _write(directory / ALLOWED / f"{name}.public", public)
    return [directory / name for name in names]


def server_secret(directory: Path) -> bytes:
    """The buffer's own key. Raises KeysError, also if everybody may add a client to its list."""
    _mode_of(directory / ALLOWED)
    return read_key(directory / "server.secret")


def client_keys(directory: Path) -> ClientKeys:
    """Read the keys of a client from a run's directory or its own. Raises KeysError."""
    secret = read_key(directory / "client.secret")
    return ClientKeys(read_key(directory / "server.public"), zmq.curve_public(secret), secret)


def listed(directory: Path) -> list[Path]:
    """List the public key files of the admitted clients."""
    return sorted((directory / ALLOWED).glob("*.public"))


def check_keys(directory: Path) -> None:
    """Raise KeysError if a run cannot start with these keys."""
    if not directory.is_dir():
        raise KeysError(f"{directory}: is not a directory; `evolver-async keys` makes one")
    own = zmq.curve_public(server_secret(directory))
    keys = client_keys(directory)
    if own != keys.server:
        raise KeysError(f"{directory}: server.public does not belong to server.secret")
    if keys.public not in map(read_key, listed(directory)):
        raise KeysError(f"{directory / ALLOWED}: does not list the run's own client.secret")


def _mode_of(path: Path) -> int:
    """Return the mode of a list or a key. Raises KeysError if all users may change it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None
    if mode & 0o002:
        raise KeysError(f"{path}: must not be writable for all users, has mode {mode:04o}")
    return mode


def _unreadable(path: Path, error: OSError) -> KeysError:
    return KeysError(f"{path}: {(error.strerror or 'cannot be read').lower()}")


def _make_server(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True)
    (directory / ALLOWED).mkdir(mode=0o700)
    for secret_name, public_name in (
        ("server.secret", "server.public"),
        ("client.secret", f"{ALLOWED}/{OWN}.public"),
    ):
        public, secret = zmq.curve_keypair()
        _write(directory / secret_name, secret)
        _write(directory / public_name, public)


def _write(path: Path, key: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key + b"\n")


def read_key(path: Path) -> bytes:
    """Read the key in a file, in Z85. Raises KeysError, also if others may read a secret one."""
    mode = _mode_of(path)
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise _unreadable(path, error) from None
    if path.suffix == ".secret" and mode & 0o077:
        raise KeysError(f"{path}: must have mode 0600, has {mode:04o}")
    try:
        whole = len(key) == CHARACTERS and len(z85.decode(key)) == 32
    except (ValueError, KeyError):
        whole = False
    if not whole:
        raise KeysError(f"{path}: is no key (one line of {CHARACTERS} characters in Z85)")
    return key
