"""SQLite file of the experience pool, written as the pool changes.

A killed process loses at most its uncommitted changes. Every row has a checksum: rows that the disk
has changed are left out, and a file that is no database any more is moved aside. Both leave a copy
of the file as it was found. The name of the embedder is stored with its vectors.
"""

import itertools
import json
import logging
import sqlite3
import zlib
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evolver_async.config import ConfigError
from evolver_async.files import remove

FILE = "experience.db"
KEPT_GROUPS = 10_000  # among which a repeated contribution is recognised
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER);
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    when_to_use TEXT NOT NULL, content TEXT NOT NULL, state TEXT NOT NULL, score REAL NOT NULL,
    source TEXT NOT NULL, teacher TEXT NOT NULL, trajectories TEXT NOT NULL,
    created INTEGER NOT NULL,
    uses INTEGER NOT NULL, utility REAL NOT NULL, retired INTEGER NOT NULL,
    when_vector BLOB NOT NULL, content_vector BLOB NOT NULL, crc INTEGER
);
CREATE TABLE IF NOT EXISTS contributed (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, crc INTEGER
);
CREATE TABLE IF NOT EXISTS solved (
    number INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL, query TEXT NOT NULL UNIQUE,
    episodes BLOB NOT NULL, crc INTEGER
);
"""
COLUMNS = (  # of an entry that is inserted
    *("when_to_use", "content", "state", "score", "source", "teacher", "trajectories", "created"),
    *("uses", "utility", "retired", "when_vector", "content_vector"),
)
VECTORS = ("when_vector", "content_vector")
# The checksum of a row by table; a text is read as bytes, which may be none of UTF-8 any more.
CHECKED = {
    table: f"checksum({', '.join(f'CAST({column} AS BLOB)' for column in columns)})"
    for table, columns in (
        ("facts", ("name", "value")),
        ("entries", COLUMNS),
        ("solved", ("source", "query", "episodes")),
        ("contributed", ("number", "name")),
    )
}

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ExperienceEntry:
    """One entry of the pool.

    `when_to_use`: the text that queries are compared with. `state`: the state of a task in which
    the entry applies; "" for every state. `teacher`: contributors of other groups, one a line,
    whose success it tells; "" if there is none. `created`: number of groups contributed before.
    `utility`: successful episodes among the `uses` that it guided. Vectors are float32[d].
    """

    when_to_use: str
    content: str
    state: str
    score: float
    source: str
    trajectories: list[str]
    created: int
    when_vector: np.ndarray
    content_vector: np.ndarray
    id: int = 0
    uses: int = 0
    utility: float = 0.0
    retired: bool = False
    teacher: str = ""
    worth: float = field(init=False)  # success per use, smoothed by one success in two uses

    def __post_init__(self) -> None:
        self.rate()

    def rate(self) -> None:
        """Update `worth` after a change of `uses` or `utility`."""
        self.worth = (self.utility + 1.0) / (self.uses + 2.0)


class Store:
    """Entries on disk, for one thread at a time. `damage`: a sentence, "" if there was none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.damage = ""
        opened: sqlite3.Connection | None = None
        try:
            self._database = opened = _open(path)
            self._leave_out_damaged()
        except sqlite3.OperationalError:  # locked, unreadable or disk full: the file is intact
            raise
        except sqlite3.DatabaseError as error:
            aside = self._aside()
            self.damage = (
                f"{path} is damaged ({error}) and moved to {aside.name}; the pool is empty"
            )
            if opened is not None:
                opened.close()
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._database = _open(path)
        if self.damage:
            log.error("%s", self.damage)
        (newest,) = self._database.execute("SELECT max(number) FROM contributed").fetchone()
        self.groups: int = newest or 0  # contributed so far

    def _aside(self) -> Path:
        """Return an unused name for a copy of the file."""
        names = (f"{self.path.name}.damaged{f'-{n}' * (n > 1)}" for n in itertools.count(1))
        return next(one for name in names if not (one := self.path.with_name(name)).exists())

    def drop_copies(self) -> int:
        """Delete the copies of damaged files; return their number.

        The contributions of one source cannot be removed from them.
        """
        copies = [*self.path.parent.glob(f"{self.path.name}.damaged*")]
        for copy in copies:
            remove(copy)
        return len(copies)

    def _leave_out_damaged(self) -> None:
        """Delete the rows with a wrong checksum, after copying the file.

        Raise sqlite3.IntegrityError if a damaged row has become like another one: no index can be
        made of both.
        """
        found = {}
        for table, checksum in CHECKED.items():
            wrong = f"SELECT rowid FROM {table} WHERE crc IS NOT {checksum}"
            found[table] = self._database.execute(wrong).fetchall()
        (indexes,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if indexes == "ok" and not any(found.values()):
            return
        aside = self._aside()
        with closing(sqlite3.connect(aside)) as copy:
            self._database.backup(copy)
        self._database.execute("REINDEX")
        for table, rows in found.items():
            self._database.executemany(f"DELETE FROM {table} WHERE rowid = ?", rows)
        self._database.commit()
        counts = ", ".join(f"{len(rows)} {table}" for table, rows in found.items() if rows)
        lost = f"lost rows: {counts}" if counts else "an index was made anew"
        self.damage = f"{self.path} is damaged; {lost}; {aside.name} is a copy"

    def _seal(self, table: str, key: str, value: int | str) -> None:
        """Write the checksum of a row as it now is."""
        change = f"UPDATE {table} SET crc = {CHECKED[table]} WHERE {key} = ?"
        self._database.execute(change, (value,))

    def load(self) -> tuple[str, list[ExperienceEntry]]:
        """Load the embedder's name ("" if there is none) and all entries, also retired ones."""
        rows = self._database.execute(f"SELECT id, {', '.join(COLUMNS)} FROM entries ORDER BY id")
        entries = []
        for row in rows:
            values = dict(zip(("id", *COLUMNS), row, strict=True))
            values["trajectories"] = json.loads(values["trajectories"])
            values["retired"] = bool(values["retired"])
            values |= {name: np.frombuffer(values[name], np.float32) for name in VECTORS}
            entries.append(ExperienceEntry(**values))
        return self._fact("embedder"), entries

    def adopt(self, embedder: str, entries: list[ExperienceEntry]) -> None:
        """Set the embedder's name and rewrite the vectors of `entries`."""
        write = self._database.execute
        self._set_fact("embedder", embedder)
        change = "UPDATE entries SET when_vector = ?, content_vector = ? WHERE id = ?"
        for entry in entries:
            write(change, (entry.when_vector.tobytes(), entry.content_vector.tobytes(), entry.id))
            self._seal("entries", "id", entry.id)

    def unguided(self) -> tuple[int, float]:
        """Load the number of unguided members that count, and their success rate."""
        count, rate = json.loads(self._fact("unguided") or "[0, 0.0]")
        return count, rate

    def set_unguided(self, count: int, rate: float) -> None:
        self._set_fact("unguided", json.dumps([count, rate]))

    def stage(self) -> int:
        """Load the stage for which the pool was emptied last, 0 if none."""
        return int(self._fact("stage") or 0)

    def set_stage(self, stage: int) -> None:
        self._set_fact("stage", str(stage))

    def load_solved(self) -> list[tuple[str, str, bytes]]:
        """Load source, query and encoded episodes of the solved groups, oldest first."""
        order = "SELECT source, query, episodes FROM solved ORDER BY number"
        return self._database.execute(order).fetchall()

    def put_solved(self, source: str, query: str, episodes: bytes) -> None:
        """Insert a solved group as the newest; it replaces an older one of the same query."""
        self._database.execute(
            "INSERT OR REPLACE INTO solved (source, query, episodes) VALUES (?, ?, ?)",
            (source, query, episodes),
        )
        self._seal("solved", "query", query)

    def remove_solved(self, queries: list[str]) -> None:
        rows = [(query,) for query in queries]
        self._database.executemany("DELETE FROM solved WHERE query = ?", rows)

    def add(self, entry: ExperienceEntry) -> None:
        """Insert an entry and set its id; ids are never reused."""
        values = {name: getattr(entry, name) for name in COLUMNS}
        values["trajectories"] = json.dumps(entry.trajectories)
        values |= {name: values[name].tobytes() for name in VECTORS}
        marks = ", ".join("?" for _ in COLUMNS)
        cursor = self._database.execute(
            f"INSERT INTO entries ({', '.join(COLUMNS)}) VALUES ({marks})", tuple(values.values())
        )
        assert cursor.lastrowid is not None
        entry.id = cursor.lastrowid
        self._seal("entries", "id", entry.id)

    def update(self, entry: ExperienceEntry) -> None:
        """Write the fields of an entry that can change."""
        self._database.execute(
            "UPDATE entries SET uses = ?, utility = ?, retired = ? WHERE id = ?",
            (entry.uses, entry.utility, entry.retired, entry.id),
        )
        self._seal("entries", "id", entry.id)

    def remove(self, entries: list[ExperienceEntry]) -> None:
        """Delete entries; `shrink` then removes their texts from the disk."""
        ids = [(entry.id,) for entry in entries]
        self._database.executemany("DELETE FROM entries WHERE id = ?", ids)

    def shrink(self) -> None:
        """Commit and truncate the write-ahead log."""
        self.commit()
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def take_group(self, name: str) -> bool:
        """Register a group; False if it was registered before."""
        number = self.groups + 1
        added = self._database.execute(
            "INSERT OR IGNORE INTO contributed (number, name) VALUES (?, ?)", (number, name)
        )
        if added.rowcount == 0:
            return False
        self._seal("contributed", "number", number)
        self.groups = number
        oldest = self.groups - KEPT_GROUPS
        self._database.execute("DELETE FROM contributed WHERE number <= ?", (oldest,))
        return True

    def _fact(self, name: str) -> str:
        """Load a fact, "" if it was never set."""
        found = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,))
        return (found.fetchone() or ("",))[0]

    def _set_fact(self, name: str, value: str) -> None:
        change = "INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)"
        self._database.execute(change, (name, value))
        self._seal("facts", "name", name)

    def commit(self) -> None:
        self._database.commit()

    def close(self) -> None:
        self._database.commit()
        self._database.close()


def copy_pool(source: Path, target: Path) -> None:
    """Copy the pool in directory `source` to the new directory `target` of another run.

    A service may be writing to it meanwhile; else its directory need not be writable. The copy
    knows no contributed groups: another run numbers its groups from 0 again. Raise ConfigError,
    which names the file, if it is damaged.
    """
    target.mkdir()
    if not (source / FILE).exists():
        return
    address = (source / FILE).absolute().as_uri()
    if not (source / f"{FILE}-wal").exists():  # no process has it open, nor was killed with it open
        address += "?immutable=1"
    try:
        with (
            closing(sqlite3.connect(address, uri=True, timeout=10.0)) as old,
            closing(sqlite3.connect(target / FILE)) as copy,
        ):
            old.backup(copy)
        with closing(_open(target / FILE)) as copy:
            copy.execute("DELETE FROM contributed")
            copy.execute("DELETE FROM facts WHERE name = 'stage'")  # it can go on in an earlier one
            copy.commit()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{source / FILE}: {error}") from error


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, timeout=10.0)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        # With a write-ahead log a power cut then costs the newest commits, never the file.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")  # purged texts must not remain in the file
        (result,) = database.execute("PRAGMA quick_check").fetchone()
        if result != "ok":
            raise sqlite3.DatabaseError(result)
        database.executescript(SCHEMA)
        database.create_function("checksum", -1, _checksum, deterministic=True)
        database.commit()
    except BaseException:
        database.close()
        raise
    return database


def _checksum(*values: bytes) -> int:
    """Return the CRC32 of a row's values and of their lengths."""
    crc = 0
    for value in values:
        crc = zlib.crc32(value, zlib.crc32(len(value).to_bytes(8, "little"), crc))
    return crc
