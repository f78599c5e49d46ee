"""Reader of the records that W&B writes to its directory of an offline run."""

import json
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

BLOCK, HEADER = 32768, 7  # LevelDB's log format, behind seven bytes of W&B's own


def records(file: Path) -> list[Record]:
    """What W&B wrote: the records of its file, whole ones only."""
    content, at, found, partial = file.read_bytes(), HEADER, [], b""
    while at + HEADER <= len(content):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0 or at + HEADER + size > len(content):
            break
        partial += content[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(partial)
            found.append(record)
            partial = b""
    return found


def history(file: Path) -> list[dict]:
    """The rows that W&B wrote, those of gauges too."""
    return [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in records(file)
        if record.HasField("history")
    ]


def step_rows(file: Path) -> list[dict]:
    """The rows that belong to a step."""
    return [row for row in history(file) if "step" in row]


def files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def definitions(file: Path) -> dict[str, str]:
    """The axis of every metric that was defined, by name."""
    found = [record.metric for record in records(file) if record.HasField("metric")]
    return {metric.name: metric.step_metric for metric in found}


def run_record(file: Path) -> Any:
    """The run's own record: its keys and its config."""
    (run,) = [record.run for record in records(file) if record.HasField("run")]
    return run


def summary_of(file: Path) -> dict[str, Any]:
    """The last summary of every metric."""
    found = {}
    for record in records(file):
        if record.HasField("summary"):
            for item in record.summary.update:
                found[".".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found
