"""Receivers of the collective channel as processes, and what they say of the versions they see."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import torch

from evolver_async.schema import WeightId

PROGRAM = """
import sys, time, torch
from evolver_async.weights.collective.channel import CollectiveReceiver

torch.set_num_threads(1)
address, name, deadline_s, damage = sys.argv[1:]
if damage == "damage":  # one bit of the first bucket that arrives
    from evolver_async.weights.collective.process_group import Broadcast
    done, left = Broadcast.done, [1]

    def damaged(self, seconds):
        complete = done(self, seconds)
        if complete and left:
            left.pop()
            self._part_N[7] ^= 4
        return complete

    Broadcast.done = damaged
if damage == "filtered":  # as if its data ports were: it answers, and enters no group
    from evolver_async.weights.collective.receiver import BroadcastReceiver
    BroadcastReceiver._enter = lambda self, event: None
if damage == "late":  # it waits for its first group, longer than the learner for it
    from evolver_async.weights.collective.receiver import BroadcastReceiver
    enter, left = BroadcastReceiver._enter, [4.0]
    def late(self, event):
        return time.sleep(left.pop()) if left else enter(self, event)
    BroadcastReceiver._enter = late
receiver = CollectiveReceiver(address, deadline_s=float(deadline_s), name=name)
print("ready", flush=True)
shown = None
while True:
    head = receiver.head()
    if head is None or head == shown:
        time.sleep(0.002)
        continue
    tensors = receiver.fetch(head)
    whole = all(bool((tensor == head.step).all()) for tensor in tensors.values())
    print(head if whole else f"mixed {head}", flush=True)
    shown = head
"""


class Remote:
    """A receiver in a process of its own; `seen` are the versions it held, in order."""

    def __init__(self, address: str, name: str, deadline_s: float, damage: str) -> None:
        self.seen: list[str] = []
        arguments = [address, name, str(deadline_s), damage]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def holds(self, weights: WeightId) -> bool:
        return bool(self.seen) and self.seen[-1] == str(weights)

    def end(self) -> None:
        self.process.kill()
        self._thread.join()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line.strip())


@contextlib.contextmanager
def remotes(
    address: str, count: int, *, deadline_s: float = 30.0, damage: str = ""
) -> Iterator[list[Remote]]:
    """Receivers at `address`; none outlives its test, and none may have seen mixed weights.

    `damage`: "damage" of arriving bytes, "filtered" ports, or "late" in its first group.
    """
    started: list[Remote] = []
    try:
        for number in range(count):
            started.append(Remote(address, f"{damage or 'remote'}-{number}", deadline_s, damage))
        yield started
    finally:
        for remote in started:
            remote.end()
        for remote in started:
            assert not any(line.startswith("mixed") for line in remote.seen), remote.seen


def filled(step: int, numbers: int) -> dict[str, torch.Tensor]:
    """Weights all of whose numbers are their step."""
    return {name: torch.full((numbers,), float(step)) for name in "abc"}
