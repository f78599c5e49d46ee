"""Tensors of a checkpoint in safetensors files: whole in one file, or one file a rank.

`<name>.safetensors` holds whole tensors; `<name>.<rank>of<ranks>.safetensors` the rows of a rank,
and the first file also tensors that only one rank holds. Any number of ranks can read the files of
any other number.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.files import follow_umask

PART = re.compile(r"(\d+)of(\d+)")


def rows(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and end of the rows, of `count`, that a rank holds: blocks of equal size, then less."""
    size = -(-count // ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


def write(
    directory: Path, name: str, tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1
) -> None:
    """Write the tensors of this rank."""
    part = "" if ranks == 1 else f".{rank}of{ranks}"
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    path = directory / f"{name}{part}.safetensors"
    save_file(plain, path)
    follow_umask(path)


def exists(directory: Path, name: str) -> bool:
    """True if tensors were written under this name."""
    return bool(_files(directory, name))


def read(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors, whole."""
    with Shards(directory, name) as shards:
        return {key: shards.rows(key) for key in shards.names()}


class Shards:
    """Tensors of one name, read on demand."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._held = ExitStack()
        files = _files(directory, name)
        if not files:
            raise FileNotFoundError(f"{self.path}.safetensors: not in this checkpoint")
        self._parts: list[Any] = [self._held.enter_context(_opened(file)) for file in files]
        self._names = [set(part.keys()) for part in self._parts]

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def names(self) -> list[str]:
        return sorted(self._names[0])

    def rows(self, name: str, rank: int = 0, ranks: int = 1) -> torch.Tensor:
        """The rows of a tensor that a rank of so many holds: with one rank all of it."""
        parts = [
            part for part, names in zip(self._parts, self._names, strict=True) if name in names
        ]
        if len(parts) == 1 and ranks == 1:
            return parts[0].get_tensor(name)
        slices = [part.get_slice(name) for part in parts]
        lengths = [one.get_shape()[0] for one in slices]
        start, end = rows(sum(lengths), rank, ranks)
        taken, before = [], 0
        for one, length in zip(slices, lengths, strict=True):
            low, high = max(start - before, 0), min(end - before, length)
            if low < high:
                taken.append(one[low:high])
            before += length
        return torch.cat(taken) if taken else slices[0][0:0]


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:  # no OSError nor ValueError
        raise CheckpointError(f"{file}: is no file of tensors: {error}") from None


def _files(directory: Path, name: str) -> list[Path]:
    """List the files in the order of their ranks. Raises ValueError if one is missing."""
    whole = directory / f"{name}.safetensors"
    if whole.exists():
        return [whole]
    found: dict[int, Path] = {}
    count = 0
    for path in directory.glob(f"{name}.*of*.safetensors"):
        match = PART.fullmatch(path.name[len(name) + 1 : -len(".safetensors")])
        if match is not None:
            found[int(match[1])], count = path, int(match[2])
    if sorted(found) != list(range(count)):
        raise ValueError(f"{directory / name}: shards {sorted(found)} of {count}")
    return [found[rank] for rank in range(count)]
