"""Files that a power cut or a full disk leaves whole."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that exists completely or, after a power cut too, as it was before."""
    part = path.with_name(f".{path.name}")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
