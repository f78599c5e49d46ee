"""Agreement of the ranks of a learner, before they share anything, on code and settings.

Ranks that differ would train a mixture of both, or end in a collective that says nothing.
"""

from collections.abc import Iterator, Mapping

import msgspec
from torch._C._distributed_c10d import Store

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import to_dict
from evolver_async.config.rerun_changes import changed_values
from evolver_async.launch.own_code import digests, own_code
from evolver_async.process.package_versions import versions

FACTS = "facts"  # of rank 0, in the store in which the ranks meet
NOTHING = "nothing"


def facts_of(config: Config) -> dict[str, dict[str, object]]:
    """Return the versions, own files and settings of this rank, each by its name."""
    return {
        "versions": dict(versions()),
        "files": dict(digests(own_code([config]))),
        "settings": to_dict(config),
    }


def agree(store: Store, rank: int, facts: Mapping[str, dict[str, object]]) -> None:
    """Raise ConfigError, with the rank and what differs, on a rank that differs from rank 0.

    RuntimeError if rank 0 does not come within the deadline of the store.
    """
    if rank == 0:
        return store.set(FACTS, msgspec.json.encode(facts).decode())
    theirs = msgspec.json.decode(store.get(FACTS))
    ours = msgspec.json.decode(msgspec.json.encode(facts))
    if found := list(_differences(theirs, ours)):
        raise ConfigError(
            f"learner.ranks: rank {rank} was started with other code or settings than rank 0:"
            f" {'; '.join(found[:3])}; all ranks need the same: start the run again"
        )
    return None


def _differences(theirs: Mapping[str, dict], ours: Mapping[str, dict]) -> Iterator[str]:
    for kind in ("versions", "files"):
        for name in sorted(theirs[kind].keys() | ours[kind].keys()):
            before, now = theirs[kind].get(name, NOTHING), ours[kind].get(name, NOTHING)
            if before != now:
                yield f"{name} is {now[:12]}, that of rank 0 {before[:12]}"
    for key, value in changed_values(theirs["settings"], ours["settings"]):
        yield f"{key} is {value}, that of rank 0 {_at(theirs['settings'], key)}"


def _at(tree: object, key: str) -> object:
    """Return the value at a key such as `stages.0.steps`; None where there is none."""
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() and int(part) < len(tree) else len(tree)
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
