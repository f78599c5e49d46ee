"""A real local run under fire: what the fault tests and the soak do to it and see of it."""

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from invariants import Story, story_of
from launches import Launch, wait_for
from safetensors.torch import load_file

from evolver_async.checkpoint import valid
from evolver_async.transport import Rejected

REUSE = 1
RECIPE = """
env:
  name: moody:Moody
  params: {{directory: {0}}}
  latency: {{kind: fixed, median_s: 0.2}}
  step_timeout_s: 5
tasks: {{train: 16}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 2, groups: 2}}
advantage: {{kind: reinforce}}
learner: {{groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}}
buffer: {{lease_s: 2, stall_s: 6, straggler: wait, archive: all, segment_bytes: 65536}}
stages: [{{kind: rl, hours: 1}}]
eval: {{every: 0, episodes: 4}}
checkpoint: {{every: 5}}
metrics: {{panel: none}}
launch: {{restarts: 1000, backoff_s: 0, drain_s: 30}}
run: {{dir: {0}}}
weights: {{dir: {1}}}
"""


def write_recipe(directory: Path) -> Path:
    """Its weights travel through the temporary directory, where leaks are looked for."""
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(directory, tempfile.gettempdir()))
    return path


def story(run: Launch) -> Story:
    """What the journal of the run says now."""
    return story_of(run.run_dir / "journal", REUSE)


def status(run: Launch) -> dict[str, Any]:
    """STATUS, as soon as there is a buffer to say it."""

    def ask() -> dict[str, Any] | None:
        with contextlib.suppress(TimeoutError, Rejected):
            return run.status()
        return None

    return wait_for(ask, "STATUS")


def child(run: Launch, name: str) -> psutil.Process:
    """The process that plays this role now, as soon as there is one."""
    return wait_for(lambda: run.children().get(name), name)


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def check_ledger(ledger: dict[str, Any]) -> None:
    """I3, from the numbers that STATUS shows: received = held + trained + filtered + evicted."""
    for kind, received in ledger["received"].items():
        parts = list(ledger["held"].get(kind, {}).values())
        for fate in ("trained", "filtered", "evicted"):
            parts += ledger[fate].get(kind, {}).values()
        found = {unit: sum(part[unit] for part in parts) for unit in received}
        assert found == received, f"{kind}: received {received}, found {found}"


def check_updates(run_dir: Path, told: Story) -> None:
    """The newest checkpoint has one optimizer update for each take before it, none lost or twice.

    Every take of these runs trains one minibatch.
    """
    newest, _ = valid(run_dir / "checkpoints")[-1]
    take = json.loads((newest / "state.json").read_text())["take"]
    adam = load_file(newest / "optimizer.safetensors")
    updates = {int(tensor) for name, tensor in adam.items() if name.startswith("step/")}
    trained = {number for takes in told.trained.values() for number in takes if number < take}
    assert updates == {len(trained)}, f"{updates} updates after {len(trained)} takes"


def wait_until(seconds: float, due: float) -> None:
    """Sleep until `seconds` after `due`, on the monotonic clock."""
    time.sleep(max(0.0, due + seconds - time.monotonic()))
