"""Ids of a hub: their recognition, and for models the snapshot in the cache and its download.

The package `huggingface_hub` keeps the cache and knows the endpoint (HF_HOME, HF_ENDPOINT). It is
imported where it is used, and does not import torch. Only `policy.download` permits a download.
"""

import re
from pathlib import Path
from typing import Any

from evolver_async.config.sections.run import PolicyConfig
from evolver_async.config.values.config_error import ConfigError
from evolver_async.files import is_inside, parsed

ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # organisation/name
# Endings of files, which a path that is not there has: no id
FILE_ENDINGS = (".gguf", ".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")
# Files of a model. Weights in pickles are not loaded from a network.
FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "merges.txt", "vocab.txt"]
NEEDED = ("config.json", "tokenizer.json")
INDEX = "model.safetensors.index.json"  # names the files of weights if there are several


def is_id(path: str) -> bool:
    """Return True for `organisation/name`, unless it is a path of this machine."""
    possible = ID.fullmatch(path) is not None and not path.endswith(FILE_ENDINGS)
    return possible and not Path(path).exists()


def config_of(policy: PolicyConfig) -> dict[str, Any]:
    """Return the `config.json` of the id in `policy.path`, downloaded if that is allowed.

    OSError if the cache has none and it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    place = hf_hub_download(
        *(policy.path, "config.json"),
        revision=policy.revision or None,
        local_files_only=cached(policy) is not None or not policy.download,
    )
    return parsed(Path(place).read_text(encoding="utf-8"))


def cached(policy: PolicyConfig) -> Path | None:
    """Return the directory of a whole snapshot of `policy.path` in the cache; None without one."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = _fetched(policy, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        return None
    return directory if _is_whole(directory) else None


def _fetched(policy: PolicyConfig, local_files_only: bool) -> Path:
    """Return what the cache has of a model, after its download if that is permitted."""
    from huggingface_hub import snapshot_download

    wanted = {"revision": policy.revision or None, "local_files_only": local_files_only}
    return Path(snapshot_download(policy.path, allow_patterns=FILES, **wanted))


def snapshot(policy: PolicyConfig, key: str = "policy.path") -> Path:
    """Return the directory of the id in `policy.path`, named after its commit; download it if it is
    not in the cache and `policy.download` allows that. Raise ConfigError, which names `key`.
    """
    if (found := cached(policy)) is not None:
        return found
    at = f" at revision {policy.revision}" if policy.revision else ""
    if not policy.download:
        raise ConfigError(
            f"{key}: {policy.path} is neither a directory nor, as the id of a hub{at}, whole"
            " in the local cache; policy.download=true downloads it"
        )
    try:
        directory = _fetched(policy, local_files_only=False)
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{key}: cannot download {policy.path}{at}: {said[0]}") from error
    if not _is_whole(directory):
        raise ConfigError(
            f"{key}: {policy.path}{at} has no whole {', '.join(NEEDED)} and *.safetensors,"
            " or its hub cannot be reached"
        )
    return directory


def _is_whole(directory: Path) -> bool:
    """Return True if a snapshot has a configuration, a tokenizer and all files of weights."""
    if not all((directory / name).is_file() for name in NEEDED):
        return False
    if (directory / INDEX).is_file():
        names = parsed((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return all(is_inside(name) and (directory / name).is_file() for name in names)
    return any(directory.glob("*.safetensors"))
