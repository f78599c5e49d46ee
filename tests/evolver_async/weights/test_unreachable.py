"""An actor whose data ports are filtered, where NCCL connects only when it first broadcasts."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor

from evolver_async.schema import WeightId
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.channel.weight_source import source_of
from evolver_async.weights.collective import sender
from evolver_async.weights.collective.event_log import EventReader, ServedStore
from evolver_async.weights.collective.presence import Member, Presence
from evolver_async.weights.collective.sender import BroadcastSender

DEADLINE_S = 5.0
FILTERED = 2  # the number of the receiver that nobody reaches


class LateGroup:
    """A group as of NCCL, or of gloo without a device: who can be reached shows late, or early."""

    built: ClassVar[list[list[int]]] = []

    def __init__(self, store: Any, *_: int, device: str, **__: object) -> None:
        self.connected = not device
        newest = json.loads(store.get(f"event/{int(store.get('tail')) - 1}"))
        self.members: list[int] = newest["members"]
        self.built.append(self.members)
        if self.connected:
            self.broadcast(torch.empty(0))

    def broadcast(self, _: Tensor) -> "LateGroup":
        if FILTERED in self.members:
            raise RuntimeError("no connection")
        return self

    def done(self, _: float) -> bool:
        return True

    def checksum(self) -> int:
        return 0

    def abandon(self) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    """A store with two receivers that answer roll calls and confirm what their group gets."""
    made, ended = ServedStore(str(tmp_path), DEADLINE_S), threading.Event()
    made.store.set("tail", "0")
    reader, members = EventReader(made.store), list[int]()

    def answer() -> None:
        while not ended.is_set():
            event = reader.wait(0.05) or {"kind": ""}
            if event["kind"] == "roll":
                for number in (1, FILTERED):
                    made.store.set(f"here/{event['number']}/{number}", "[]")
            elif event["kind"] == "epoch":
                members[:] = event["members"]
            elif event["kind"] == "sums":
                for number in members:
                    made.store.set(f"ack/{event['number']}/{number}", "ok")

    presence = Presence("127.0.0.1", ended.is_set)
    for number, name in ((1, "near"), (FILTERED, "filtered")):
        about = msgspec.json.encode(Member(name, f"GPU-{number}", "127.0.0.1", presence.port))
        made.store.set(f"member/{made.store.add('numbers', 1)}", about.decode())
    thread = threading.Thread(target=answer)
    thread.start()
    yield made
    ended.set()
    thread.join()
    presence.close()
    made.close()


def test_nccl_leaves_out_an_actor_with_filtered_ports_too(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "BroadcastGroup", LateGroup)
    monkeypatch.setattr(sender, "gpu_id", lambda device: device)
    weights, snapshot = WeightId(lineage=1, step=1), WeightSnapshot()
    snapshot.stage(weights, source_of({"a": torch.zeros(1000)}), 1)
    sending = BroadcastSender(served, DEADLINE_S, 4096, "GPU-0", lambda: False)
    both, near, alone = [1, FILTERED], [1], [FILTERED]
    for times, groups in ((1, [both, near, alone, near]), (2, [alone, near])):  # tried again alone
        LateGroup.built.clear()
        monkeypatch.setattr(sending, "due", lambda times=times: times == 2)
        sending.send({weights: snapshot}, weights, [weights])
        assert caplog.text.count("filtered cannot be reached at its data ports") == times
        assert caplog.text.count("did not reach every actor") == 1
        assert [sorted(members) for members in LateGroup.built] == groups
        assert list(sending._members) == [1] and "given up" not in caplog.text
