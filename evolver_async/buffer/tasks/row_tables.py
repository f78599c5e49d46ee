"""Tables of rows: Parquet, data sets that `datasets` saved, and those of the Hugging Face hub.

Home of `datasets` and of Arrow, both of the extra `data`; only the process that reads the files
imports them, and `datasets` (1.7 s, 130 MiB) only for a data set. Rows come as plain Python values.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evolver_async.config import ConfigError, DataConfig, TasksConfig, hub

BATCH = 4096  # rows that become Python objects at once
SAVED = ("dataset_dict.json", "state.json")  # in what save_to_disk writes
Batches = Iterator[list[dict[str, Any]]]


def is_saved(path: Path) -> bool:
    """True for a directory that `save_to_disk` wrote."""
    return any((path / name).is_file() for name in SAVED)


def parquet(where: str, path: Path) -> Batches:
    """Yield the rows of a Parquet file in batches. Raises ConfigError, beginning with `where`."""
    _require("pyarrow", where)
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(path, "rb") as file:
        if file.read(4) != b"PAR1":
            raise ConfigError(
                f"{where} is no Parquet file: JSON lines have a name ending in .jsonl"
            )
    try:
        with pq.ParquetFile(path) as file:
            _check_schema(where, file.schema_arrow)
            for batch in file.iter_batches(BATCH, use_threads=False):
                yield batch.to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None


def data_set(at: str, path: Path, revision: str, subset: str) -> dict[str, Batches]:
    """Return the rows of a data set by split, under "" if it has no splits.

    `path`: of a saved one, or the id of one of the hub, which is downloaded at this `revision`.
    """
    _require("datasets", f"{at}: {path}")
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.exists():
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), subset or None, revision=revision)
    except Exception as error:  # of the files, the network or a library below
        raise ConfigError(f"{at}: {path}: {' '.join(str(error).split())[:300]}") from None
    parts = {str(k): v for k, v in found.items()} if isinstance(found, dict) else {"": found}
    return {name: _batches(f"{at}: {path}", one) for name, one in parts.items()}


def revision_of(at: str, named: str, tasks: TasksConfig | DataConfig) -> str:
    """Return the commit of a data set of the hub. ConfigError if it must not be downloaded."""
    if not hub.is_id(named):
        raise ConfigError(f"{at}: {named}: No such file or directory")
    if not tasks.download:
        raise ConfigError(
            f"{at}: {named} is no file or directory here;"
            f" {at.partition('.')[0]}.download=true downloads the data set of this"
            " name from the Hugging Face hub"
        )
    _require("datasets", f"{at}: {named}")
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().dataset_info(named, revision=tasks.revision or None)
    except Exception as error:  # of the network or a library below
        raise ConfigError(f"{at}: {named}: {' '.join(str(error).split())[:300]}") from None
    assert found.sha is not None
    return found.sha


def _batches(where: str, found: Any) -> Batches:
    _check_schema(where, found.features.arrow_schema)
    for table in found.with_format("arrow").iter(BATCH):
        yield table.to_pylist()


def _require(package: str, where: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{where}: is read by {package}, which is not installed: run"
            " pip install 'evolver-async[data]'"
        )


def _check_schema(where: str, schema: Any) -> None:
    """Raise ConfigError for a column of images, sounds or bytes, which JSON does not have."""
    for field in schema:
        if re.search(r"\b(large_|fixed_size_)?binary(_view)?\b", str(field.type)):
            raise ConfigError(
                f"{where}: column {field.name}: holds bytes ({str(field.type)[:80]}), such as an"
                " image; rows have text, numbers, truth values, lists and objects: remove it"
            )
