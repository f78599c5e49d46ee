"""File of one actor's conversations: what was answered, what was rated, and what was delivered.

    conversations   one row each, with everything that its session continues from
    answers         the messages after each answer
    groups          prompts of groups, as hashes, for tickets of their missing members
    delivered       whose conversations the buffer has: numbers and names alone, and for good

Writing blocks the actor's loop, so memory and file never differ, and a call is answered after its
row is written: a kill loses nothing of it. Only ratings are synced, which are few: a power cut
loses none that was acknowledged, but perhaps the newest answers.

A deletion on demand overwrites its pages with zeros and empties the write-ahead log, so the text is
in neither file when the call is answered.
"""

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from actors.endpoint.external import End
from actors.endpoint.request import ChatMessage
from actors.endpoint.session import StoredSession
from evolver_async.config import ConfigError

FORMAT = 1
LOCK_S = 10.0  # for an earlier process of the actor, which may be ending
SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    place INTEGER PRIMARY KEY, id TEXT UNIQUE, user TEXT, state TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS answers (place INTEGER PRIMARY KEY, id TEXT, body BLOB);
CREATE INDEX IF NOT EXISTS answers_by_id ON answers (id);
CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY, prompt BLOB);
CREATE TABLE IF NOT EXISTS delivered (id TEXT PRIMARY KEY, user TEXT);
"""
State = Literal["open", "rated", "delivered"]
Messages = tuple[ChatMessage, ...]
Prompt = tuple[str, Messages]  # tools, and messages of a conversation's first call


class StoredAnswer(NamedTuple):
    """The messages after an answer, of which the first `instructed` are of its call alone."""

    name: str
    instructed: int
    messages: Messages


class StoredConversation(NamedTuple):
    """A conversation apart from its answers. `lasted_s`: from its beginning to its last answer."""

    prompt: Prompt
    lasted_s: float
    rating: End | None
    session: StoredSession


class Row(NamedTuple):
    """A conversation as it is in the file."""

    id: str
    user: str
    state: State
    body: StoredConversation
    answers: list[StoredAnswer]


_encoder = msgspec.msgpack.Encoder(enc_hook=dict)  # of read-only mappings
_bodies = msgspec.msgpack.Decoder(StoredConversation)
_answers = msgspec.msgpack.Decoder(StoredAnswer)


class ConversationFile:
    """Conversations of one actor in SQLite; in memory without a `path`.

    Raises ConfigError for a file that it cannot use, and sqlite3.Error where it cannot write.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # texts of people
            self._database = sqlite3.connect(path or ":memory:", timeout=LOCK_S)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def _open(self) -> None:
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "secure_delete = ON"):
            self._database.execute(f"PRAGMA {setting}")
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise sqlite3.DatabaseError(f"has format {found}, this program reads {FORMAT}")
        (result,) = self._database.execute("PRAGMA quick_check").fetchone()
        if result != "ok":
            raise sqlite3.DatabaseError(result)
        self._database.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")

    def _unusable(self, error: Exception) -> ConfigError:
        advice = "the conversations of an actor; without it the actor begins with none"
        return ConfigError(f"{self._path}: {error} ({advice})")

    def rows(self) -> list[Row]:
        """Return all conversations, the oldest first."""
        answers: dict[str, list[StoredAnswer]] = {}
        try:
            for id, body in self._database.execute("SELECT id, body FROM answers ORDER BY place"):
                answers.setdefault(id, []).append(_answers.decode(body))
            found = self._database.execute(
                "SELECT id, user, state, body FROM conversations ORDER BY place"
            )
            return [
                Row(id, user, state, _bodies.decode(body), answers.get(id, []))
                for id, user, state, body in found
            ]
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self._unusable(error) from error

    def save(
        self,
        id: str,
        user: str,
        state: State,
        body: StoredConversation,
        answers: Iterable[StoredAnswer] = (),
        *,
        synced: bool = False,
    ) -> None:
        """Write a conversation, and `answers` that are new. `synced`: survives a power cut, as does
        everything before it."""
        self._database.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        with self._database:
            self._database.execute(
                "INSERT INTO conversations (id, user, state, body) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET state = excluded.state, body = excluded.body",
                (id, user, state, _encoder.encode(body)),
            )
            self._database.executemany(
                "INSERT INTO answers (id, body) VALUES (?, ?)",
                ((id, _encoder.encode(one)) for one in answers),
            )

    def deliver(self, id: str, user: str) -> None:
        """Note that the buffer has a conversation."""
        with self._database:
            self._database.execute(
                "UPDATE conversations SET state = 'delivered' WHERE id = ?", (id,)
            )
            self._database.execute("INSERT OR IGNORE INTO delivered VALUES (?, ?)", (id, user))

    def delivered(self, *, user: str = "", id: str = "") -> list[tuple[str, str]]:
        """Return id and user of the conversations that the buffer has: of a user, or of this id."""
        query = "SELECT id, user FROM delivered WHERE user = ? OR id = ?"
        return self._database.execute(query, (user, id)).fetchall()

    def delete(self, ids: Iterable[str], *, scrub: bool = False) -> None:
        """Delete conversations; with `scrub` no copy of their text is left in the files."""
        gone = [(id,) for id in ids]
        with self._database:
            self._database.executemany("DELETE FROM conversations WHERE id = ?", gone)
            self._database.executemany("DELETE FROM answers WHERE id = ?", gone)
        if scrub and gone:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def groups(self) -> dict[int, bytes]:
        """Return the hashed prompts of groups, the oldest first."""
        return dict(self._database.execute("SELECT id, prompt FROM groups ORDER BY id"))

    def note_group(self, group: int, prompt: bytes, most: int) -> None:
        """Note the prompt of a group, and keep those of the `most` newest ones."""
        with self._database:
            self._database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?)", (group, prompt))
            self._database.execute(
                "DELETE FROM groups WHERE id <= (SELECT max(id) FROM groups) - ?", (most,)
            )

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()
