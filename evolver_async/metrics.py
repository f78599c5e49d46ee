"""Where measurements go: JSONL always, Weights & Biases when asked; timers.

numpy only: whoever has tensors turns them into arrays first. The JSONL file is the source of truth.
"""

import importlib
import json
import logging
import math
import netrc
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.config.secrets import without_secrets

log = logging.getLogger(__name__)

WANDB_HOST = "api.wandb.ai"
WANDB_TIMEOUT_S = 15.0  # with a key but no network wandb would stall for 100 s


class JsonlWriter:
    """Appends one JSON object a line and flushes it; opening cuts off a line torn by a kill."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "ab+")  # noqa: SIM115 (closed by close)
        self.file.seek(0)
        whole = self.file.read().rfind(b"\n") + 1
        self.file.truncate(whole)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row of numbers and strings.

        JSON has no NaN: non-finite numbers are written as null and named under `non_finite`.
        """
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in row.items()
        }
        bad = [name for name, value in plain.items() if _non_finite(value)]
        plain |= dict.fromkeys(bad)
        if bad:
            plain["non_finite"] = bad
        self.file.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _non_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def wandb_mode(mode: str) -> str:
    """`auto` means online where a key is present (environment or ~/.netrc), else offline."""
    if mode != "auto":
        return mode
    return "online" if os.environ.get("WANDB_API_KEY") or _in_netrc(WANDB_HOST) else "offline"


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (OSError, netrc.NetrcParseError) as error:
        log.warning("%s: %s", Path.home() / ".netrc", error)
        return False


def wandb_id(directory: Path) -> str:
    """The id of the W&B run that belongs to a run directory, made at the first call."""
    file = directory / "wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()


class WandbSink:
    """One Weights & Biases run. `auto` goes on offline when the server cannot be reached.

    Raises wandb's own error when `online` was asked for and is not possible.
    """

    def __init__(
        self, mode: str, *, project: str, name: str, directory: Path, config: Mapping[str, Any]
    ) -> None:
        self.wandb = importlib.import_module("wandb")  # slow to import, so only when enabled
        start = {
            "project": project,
            "name": name,
            "id": wandb_id(directory),
            "resume": "allow",  # restarts go on with the same run
            "dir": str(directory),
            "config": without_secrets(config),
        }
        try:
            self.run = self._init(wandb_mode(mode), **start)
        except self.wandb.Error as error:
            if mode != "auto":
                raise
            log.warning("wandb: %s; going on offline", error)
            self.run = self._init("offline", **start)
        self.run.define_metric("*", step_metric="step")  # a resumed run may repeat steps

    def _init(self, mode: str, **start: Any) -> Any:
        settings = self.wandb.Settings(init_timeout=WANDB_TIMEOUT_S, silent=True, console="off")
        return self.wandb.init(mode=mode, settings=settings, **start)

    def write(self, row: Mapping[str, Any]) -> None:
        self.run.log(dict(row))

    def alert(self, title: str, text: str) -> None:
        self.run.alert(title=title, text=text)

    def close(self) -> None:
        self.run.finish()


class Metrics:
    """The one place a process logs to: <directory>/metrics.jsonl, and W&B unless disabled."""

    def __init__(
        self,
        directory: Path,
        *,
        wandb: str = "disabled",
        project: str = "",
        name: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.sinks: list[JsonlWriter | WandbSink] = [JsonlWriter(directory / "metrics.jsonl")]
        if wandb != "disabled":
            self.sinks.append(
                WandbSink(
                    wandb, project=project, name=name, directory=directory, config=config or {}
                )
            )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one row; `step` counts takes, the version is a column of its own."""
        row = {"step": step, **values}
        for sink in self.sinks:
            sink.write(row)

    def alert(self, title: str, text: str) -> None:
        """Has W&B notify people, where it is on."""
        for sink in self.sinks:
            if isinstance(sink, WandbSink):
                sink.alert(title, text)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class Timers:
    """Wall seconds by phase: `with timers("train"): …` adds to `time/train_s`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def drain(self) -> dict[str, float]:
        """The seconds since the last call, as metrics."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}
