"""Sync of files and directories to the disk, so that they survive a power cut."""

import mmap
import os
from pathlib import Path

CHUNK_BYTES = 64 << 20  # synced to disk between two signs of progress


def sync_file(path: Path, touched: Path) -> None:
    """Sync a file chunk by chunk. The modification time of `touched` shows the progress."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        for offset in range(0, size, CHUNK_BYTES):
            try:
                part = mmap.mmap(file.fileno(), min(CHUNK_BYTES, size - offset), offset=offset)
            except OSError:  # a file system without shared mappings syncs the file at once
                break
            with part:
                part.flush()
            os.utime(touched)
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
