"""Asynchronous actor-learner reinforcement learning for language-model agents.

              ┌────────────── learner ───────────────────────────┐
  SAMPLE/DONE │ groups → strip → advantage → loss → step → v+1   │ publish(v+1)
              └──────▲───────────────────────────────────┬───────┘
                     │                                   │ weights (shared memory)
              ┌──────┴──────── buffer ────────────┐      ▼
              │ tasks · tickets · journal · replay│   actor × N : engine + episodes + judge
              └──▲──────────────▲─────────────────┘      │   ▲
      LEASE/RENEW│     PUSH     │ ACK after fsync        │   │ RETRIEVE / CONTRIBUTE
                 └──────────────┴────────────────────────┘   experience (0 or 1)
  launcher (serial | local | ray) starts them, supervises them, restarts them, ends them

| loop | process | produces | consumes | waits for | unblocked by |
|---|---|---|---|---|---|
| rollout | actor | trajectories | tickets, weights | a ticket | buffer granting credit |
| ingest | buffer | acks, complete groups | trajectories | the fsync | the disk |
| train | learner | weight versions | complete groups | B groups fresh enough | actors |
| weights | actor | – | weight versions | a newer version | learner publishing |
| experience | experience | guidance, entries | finished episodes | – | – |

As a library: `from evolver_async import Config, load_run, train`. Each is imported when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evolver_async.config import Config
    from evolver_async.library import train
    from evolver_async.runs.results.loaded_run import load_run

__all__ = ["Config", "load_run", "train"]
__version__ = "0.1.0"

_HOMES = {
    "Config": "evolver_async.config",
    "load_run": "evolver_async.runs.results.loaded_run",
    "train": "evolver_async.library",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
