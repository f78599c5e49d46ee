"""Addresses and directories by which the processes of a run find each other."""

import tempfile
from pathlib import Path

from evolver_async.config import Config
from evolver_async.process.private_directories import PREFIX

WEIGHTS = "weights"  # file of the run directory that holds the path of the weights directory


def keys_of(config: Config) -> Path | None:
    """Return the directory of the run's keys, None if it has none."""
    return Path(config.security.keys).expanduser() if config.security.keys else None


def experience_address(config: Config, buffer_address: str) -> str:
    """Return the address of the run's experience service, "" if it has none."""
    if not config.experience.pooled:
        return ""
    return config.experience.address or f"{buffer_address}.experience"


def make_weights_dir(config: Config, run_dir: Path) -> Path:
    """Make a private directory for the weights of this launch and record its path.

    Its name is random, so that no other user can make it first.
    """
    parent = Path(config.weights.dir).resolve()
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{run_dir.name}-", dir=parent))
    part = run_dir / f".{WEIGHTS}"
    part.write_text(str(made), encoding="utf-8")
    part.replace(run_dir / WEIGHTS)
    return made


def weights_dir(config: Config, run_dir: Path) -> Path:
    """Return the recorded directory for the weights of this run on this host.

    Without a record, as in a run without a launcher, the directory is made.
    """
    try:
        return Path((run_dir / WEIGHTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return make_weights_dir(config, run_dir)


def weights_address(config: Config, run_dir: Path) -> str:
    """Return the place where the weights are published: a directory of this host, or tcp://host:port."""
    return config.weights.address or str(weights_dir(config, run_dir))
