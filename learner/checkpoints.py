"""The checkpoints of one run: written, found again, and what they still need from the journal."""

from collections.abc import Callable
from pathlib import Path

from evolver_async import checkpoint


class Checkpoints:
    """Those in <run>/checkpoints, of which the newest `keep` are kept."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.directory = run_dir / "checkpoints"
        self.run_id = run_dir.name
        self.keep = keep

    def newest(self) -> Path | None:
        """The newest valid one; None in a fresh run. CheckpointError where none is left."""
        if not checkpoint.exists(self.directory):
            return None
        return checkpoint.load_newest(self.directory, self.run_id)[0]

    def write(self, take: int, fill: Callable[[Path], object]) -> None:
        """Let `fill` write one as of `take` into an empty directory, and drop old ones."""
        checkpoint.save(self.directory, take, fill, run_id=self.run_id, keep=self.keep)

    def kept(self) -> tuple[int, int]:
        """The oldest take that one of them may still ask for, and the bytes of the newest."""
        manifests = [manifest for _, manifest in checkpoint.valid(self.directory)]
        oldest = min(manifest.step for manifest in manifests)
        return oldest, sum(file.bytes for file in manifests[-1].files.values())
