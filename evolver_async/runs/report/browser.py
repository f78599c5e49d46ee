"""Data of the trajectory browser: one index, and parts that hold the tokens.

A part is zlib-compressed JSON in base64, which a browser unpacks when it shows one of its
trajectories. Ratios and advantages come from samples/, where the learner writes a few of them.
"""

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from evolver_async.metrics.tail import Tail
from evolver_async.runs.report.tokens import TokenTable
from evolver_async.runs.results.loaded_run import RunResults
from evolver_async.runs.results.trajectories import RecordedTrajectory, TrajectoryGone
from evolver_async.schema import Role

PART = 200  # trajectories of a part, which also ends after
PART_BYTES = 2_000_000  # of the journal: a browser unpacks a part for one trajectory
STEPS = 8  # whose samples are held at a time
DIGITS = 4  # of rewards, ratios and advantages
SEARCHED = 200  # characters of what the policy wrote that the list shows and searches
CODED = ("kind", "env", "task", "version", "fate")  # columns of text, as places in a table


@dataclass
class TrajectoryPages:
    """Trajectories as the browser reads them.

    `columns` are those of the index; text is a place in the table of `texts` of that column.
    `parts` are packed lists of bodies. `total` counts what the journal has, `size` bytes of parts.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    texts: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in CODED})
    parts: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    total: int = 0
    size: int = 0

    @property
    def count(self) -> int:
        """Trajectories in the index."""
        return len(self.columns.get("group", ()))

    def index(self) -> str:
        """Return everything but the parts, packed."""
        texts = {name: list(table) for name, table in self.texts.items()}
        return pack(
            {
                "columns": self.columns,
                "texts": texts,
                "pieces": self.pieces,
                "versions": self.versions,
            }
        )


def pack(value: Any) -> str:
    """Return a value as base64 of compressed JSON: text that no HTML parser can misread."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(value), 6)).decode()


def unpack(text: str) -> Any:
    """Invert `pack`."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def pages(
    run: RunResults, limit_bytes: float = float("inf"), limit: float = float("inf")
) -> TrajectoryPages:
    """Return the trajectories of a run whose tokens are kept, whole groups only.

    Beyond `limit` trajectories or `limit_bytes` the groups are spread evenly over the run.
    """
    kept = [one for one in run.trajectories if one.kept]
    groups = [list(members) for _, members in groupby(kept, key=lambda one: one.group)]
    found = TrajectoryPages(total=len(kept))
    table, measured = TokenTable(run.tokenizer), Measurements(run.path / "samples")
    order = spread(len(groups)) if len(kept) > limit or limit_bytes < float("inf") else None
    for part in batches(groups if order is None else (groups[index] for index in order)):
        if found.count + len(part) > limit or found.size >= limit_bytes:
            break
        bodies = []
        for one in part:
            try:
                bodies.append(_body(one, table, measured))
            except TrajectoryGone:  # a live run has just removed its segment
                continue
            _add_facts(found, one, bodies[-1], len(found.parts), len(bodies) - 1)
            text = beginning_of_text(bodies[-1], table)
            found.columns.setdefault("said", []).append(text)
            found.size += len(text) // 2  # packed
        found.parts.append(pack(bodies))
        found.size += len(found.parts[-1])
        run.progress("trajectories packed", found.count, min(limit, found.total))
    found.pieces, found.versions = table.pieces, list(table.versions)
    places = zip(found.columns.get("group", ()), found.columns.get("member", ()), strict=True)
    rows = [row for _, row in sorted(zip(places, range(found.count), strict=True))]
    found.columns = {name: [one[row] for row in rows] for name, one in found.columns.items()}
    return found


def batches(groups: Iterable[list[RecordedTrajectory]]) -> Iterator[list[RecordedTrajectory]]:
    """Join groups to parts."""
    part: list[RecordedTrajectory] = []
    for group in groups:
        part += group
        if len(part) >= PART or sum(one.size for one in part) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def spread(count: int) -> list[int]:
    """Order 0 … count - 1 so that every beginning is spread evenly: by their reversed bits."""
    bits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda number: int(f"{number:0{bits or 1}b}"[::-1], 2))


class Measurements:
    """Rows of samples/. Those of a step are read when one of its trajectories is asked for: all of
    a long run are more than a memory holds.
    """

    def __init__(self, directory: Path) -> None:
        self._paths = {_step_of(path): path for path in directory.glob("step_*.jsonl")}
        self._rows = lru_cache(STEPS)(self._read)

    def of(self, one: RecordedTrajectory) -> dict[str, dict[str, Any]]:
        """Return the rows of the newest step that measured a trajectory by player, with the step:
        one "" where there is a single player, {} if none measured it."""
        for use in reversed(one.trainings):
            if rows := self._rows(use.step).get(one.id):
                return {player: row | {"step": use.step} for player, row in rows.items()}
        return {}

    def _read(self, step: int) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in Tail(self._paths[step]).rows() if step in self._paths else []:
            found.setdefault(row["trajectory"], {})[row.get("player", "")] = row
        return found


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _body(one: RecordedTrajectory, table: TokenTable, measured: Measurements) -> dict[str, Any]:
    whole = one.load()
    encoded = [table.encode(sequence) for sequence in whole.sequences]
    players = [whole.player_of(sequence) for sequence in whole.sequences]
    body = {
        "s": encoded,
        "guided": any(role == Role.EXPERIENCE for part in encoded for role, _, _ in part["r"]),
        "rewards": _rounded(whole.turn_rewards.tolist()),
        "terms": {name: round(value, DIGITS) for name, value in whole.terms.items()},
        "labels": whole.labels.tolist(),
        "flags": whole.turn_flags.tolist(),
        "source": whole.label_source,
        "actor": whole.actor,
        "policy": whole.policy,
        "players": [[one.name, round(one.reward, DIGITS)] for one in whole.players],
        "of": players,
        "end": "terminated" if whole.terminated else "truncated" if whole.truncated else "open",
        "experience": whole.experience_ids,
        "seconds": round(whole.timing.get("total_s", 0.0), 3),
        "uses": [
            [use.step, use.lineage, use.lag, use.fate, use.abandoned] for use in one.trainings
        ],
    }
    rows = measured.of(one)
    sizes = Counter[str]()
    for player, part in zip(players, encoded, strict=True):
        sizes[player] += len(part["p"])
    if rows and all(len(row["ratios"]) == sizes[player] for player, row in rows.items()):
        names = ("ratios", "advantages", "anchor_logprobs")
        body["measured"] = {name: _merged(rows, players, encoded, name) for name in names}
        row = next(iter(rows.values()))
        body["measured"] |= {"step": row["step"], "stripped": row["stripped"]}
    return body


def _merged(
    rows: dict[str, dict[str, Any]], players: list[str], encoded: list[dict[str, Any]], name: str
) -> list[float | None]:
    """Return a number of every ACTION token in the order of the sequences, each of one of
    `players`; None for those of a player without a row."""
    values = {player: iter(_rounded(row[name])) for player, row in rows.items()}
    return [
        next(values[player]) if player in values else None
        for player, part in zip(players, encoded, strict=True)
        for _ in part["p"]
    ]


def beginning_of_text(body: dict[str, Any], table: TokenTable) -> str:
    """Return the beginning of what the policy wrote, which the list shows and searches."""
    text = ""
    for sequence in body["s"]:
        place = 0
        for role, _, length in sequence["r"]:
            if role == Role.ACTION:
                text += table.text(sequence, place, place + min(length, SEARCHED)) + " "
            place += length
            if len(text) > SEARCHED:
                return text[:SEARCHED]
    return text.strip()


def _add_facts(
    found: TrajectoryPages, one: RecordedTrajectory, body: dict[str, Any], part: int, slot: int
) -> None:
    """Add a trajectory to the index."""
    uses = [use for use in one.trainings if use.fate == "trained" and not use.abandoned]
    facts = {
        "group": one.group,
        "member": one.member,
        "attempt": one.attempt,
        "kind": one.kind,
        "env": one.env,
        "task": one.task.task_id,
        "stage": one.stage,
        "reward": round(one.reward, DIGITS),
        "success": int(one.success),
        "tokens": one.tokens,
        "turns": len(body["rewards"]),
        "version": "" if one.oldest is None else str(one.oldest),
        "steps": [use.step for use in uses],
        "lag": -1 if one.lag is None else one.lag,
        "fate": f"{one.fate}: {one.reason}" if one.reason else one.fate,
        "guided": int(body["guided"]),
        "measured": int("measured" in body),
        "part": part,
        "slot": slot,
    }
    for name, value in facts.items():
        if name in CODED:
            texts = found.texts[name]
            value = texts.setdefault(str(value), len(texts))
        found.columns.setdefault(name, []).append(value)


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round, with None for what is not finite: JSON has no NaN."""
    return [
        round(value, DIGITS) if value is not None and abs(value) < float("inf") else None
        for value in values
    ]
