"""Full-text search over products: SQLite's FTS5 with stemming, ranked by BM25.

WebShop searches with Lucene's BM25; both rank by the same formula with other constants.
"""

import re
import sqlite3
import threading
from collections.abc import Iterable

MOST_WORDS = 64  # of a query
# What Lucene's English analyser leaves out.
STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there
these they this to was will with
"""
_STOP_WORDS = frozenset(STOP_WORDS.split())


class FullTextIndex:
    """Index of texts by number, in memory; usable from any thread."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._one_at_a_time = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE found USING fts5"
            "(text, content='', detail=full, tokenize='porter unicode61')"
        )
        rows = ((number, _sound(text)) for number, text in enumerate(texts))
        self._database.executemany("INSERT INTO found (rowid, text) VALUES (?, ?)", rows)
        self._database.commit()

    def search(self, query: str, limit: int) -> list[int]:
        """Return the numbers of the texts that contain any word of the query, best first.

        Any text is a query; one without words finds nothing.
        """
        words = words_of(query)
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        with self._one_at_a_time:
            rows: list[tuple[int]] = self._database.execute(
                "SELECT rowid FROM found WHERE found MATCH ? ORDER BY bm25(found), rowid LIMIT ?",
                (match, limit),
            ).fetchall()
        return [number for (number,) in rows]


def words_of(query: str) -> list[str]:
    """Return the distinct words to search for; stop words only if there are no others."""
    words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))
    return ([word for word in words if word not in _STOP_WORDS] or words)[:MOST_WORDS]


def _sound(text: str) -> str:
    """Return the text without characters that SQLite cannot store."""
    return text.encode("utf-8", "ignore").decode()
