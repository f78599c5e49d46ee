"""Reader of a JSONL file that another process appends to."""

import json
from pathlib import Path
from typing import Any


class Tail:
    """Position in a JSONL file; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows that were written since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
