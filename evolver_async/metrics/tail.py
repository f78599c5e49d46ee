"""Reader of a JSONL file that another process appends to."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Tail:
    """Position in a JSONL file; the file may not exist yet."""

    path: Path
    offset: int = 0

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
