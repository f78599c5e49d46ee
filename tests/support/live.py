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
from invariants import Story, story_of, told
from launches import Launch, wait_for
from safetensors.torch import load_file

from evolver_async.buffer.state import records
from evolver_async.buffer.state.position import Position
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import valid
from evolver_async.wire.client import Rejected

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


def check_updates(run_dir: Path, told: Story, reports_lost: bool = False) -> None:
    """The newest checkpoint has one optimizer update for each take before it, none lost or twice.

    Every take of these runs trains one minibatch. `reports_lost`: the buffer's host was lost for
    good with reports on their way; their takes may have trained, too.
    """
    newest, _ = valid(run_dir / "checkpoints")[-1]
    take = json.loads((newest / "state.json").read_text())["take"]
    adam = load_file(newest / "optimizer.safetensors")
    updates = {int(tensor) for name, tensor in adam.items() if name.startswith("step/")}
    trained = {number for takes in told.trained.values() for number in takes if number < take}
    unreported = {number for number in told.takes if number < take} - told.reported
    most = len(trained) + (len(unreported) if reports_lost else 0)
    wanted = set(range(len(trained), most + 1))
    assert len(updates) == 1 and updates <= wanted, f"{updates} updates, wanted {wanted}"


class Repeats:
    """The takes that a journal says were repeated, by lineage; AssertionError for one that has
    other groups than before without a recorded reason."""

    def __init__(self, directory: Path) -> None:
        self.lineage = 0
        self.groups: dict[int, list[int]] = {}  # by take of the present line, and to be repeated
        self.by: dict[int, list[int]] = {}  # the lineages that took these groups
        self.undone: set[int] = set()
        self.compared: list[tuple[int, int, int]] = []  # take, earlier lineage, later lineage
        self.drop_repeats: dict[str, int] = {}  # takes that were not repeated, by reason
        for index, record in enumerate(told(directory)):
            if isinstance(record, records.StateSnapshot) and index == 0:
                self._begin(record.position)
            self._follow(record)

    def _begin(self, at: Position) -> None:
        self.lineage = at.lineage
        for number, taken in at.takes.items():
            self.groups[number], self.by[number] = taken.groups, [taken.lineage]
            if taken.lineage != at.lineage and number >= at.next_take:
                self.undone.add(number)

    def _follow(self, record: records.AnyRecord) -> None:
        match record:
            case records.LineageStarted():
                self.lineage = record.lineage
                self.undone = {take for take in self.groups if take >= record.take}
                if record.discard:
                    self._forget(self.undone)
            case records.RepeatsDropped():
                gone = {take for take in self.undone if take >= record.take}
                self.drop_repeats[record.reason] = self.drop_repeats.get(record.reason, 0) + len(
                    gone
                )
                self._forget(gone)
            case records.GroupsTaken() if record.take in self.undone:
                before = self.groups[record.take]
                words = f"take {record.take} of lineage {self.lineage} has groups {record.groups}"
                assert record.groups == before, f"{words}, not {before} as before"
                self.undone.discard(record.take)
                earlier = self.by[record.take]
                self.compared += [(record.take, one, self.lineage) for one in earlier]
                earlier.append(self.lineage)
            case records.GroupsTaken():
                self.groups[record.take], self.by[record.take] = record.groups, [self.lineage]

    def _forget(self, takes: set[int]) -> None:
        self.groups = {take: ids for take, ids in self.groups.items() if take not in takes}
        self.undone = self.undone - takes


def check_repeats(run_dir: Path) -> int:
    """Every repeated take had the same groups in order, and trained bitwise the same.

    Compares loss and gradient norm of the rows, and weights and optimizer where two lineages have a
    checkpoint of the step. Returns how many pairs of rows were compared; a row is missing where the
    learner died before it was written. AssertionError names take and lineages.
    """
    repeats = Repeats(run_dir / "journal")
    rows = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a killed learner's last line
            row = json.loads(line)
            if "stage_kind" in row:
                rows[int(row["lineage"]), row["step"]] = row
    saved = {}
    for path, manifest in valid(run_dir / "checkpoints"):
        files = {n: f.sha256 for n, f in manifest.files.items() if n.endswith(".safetensors")}
        saved[history.numbers(path)["lineage"], manifest.step] = files
    compared = 0
    for take, earlier, later in repeats.compared:
        words = f"take {take} of lineages {earlier} and {later}"
        pair = [rows.get((lineage, take + 1)) for lineage in (earlier, later)]
        if pair[0] and pair[1]:
            compared += 1
            for name in ("loss/policy", "loss/grad_norm", "version"):
                first, second = (row.get(name) for row in pair if row)
                assert first == second, f"{words}: {name} {first!r} and {second!r}"
        files = [saved.get((lineage, take + 1)) for lineage in (earlier, later)]
        assert None in files or files[0] == files[1], f"{words}: checkpoints {files}"
    print(
        f"{run_dir.name}: {compared} repeated takes compared, not repeated: {repeats.drop_repeats}"
    )
    return compared


def wait_until(seconds: float, due: float) -> None:
    """Sleep until `seconds` after `due`, on the monotonic clock."""
    time.sleep(max(0.0, due + seconds - time.monotonic()))
