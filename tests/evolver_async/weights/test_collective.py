"""The collective channel over gloo: whole versions only, whoever joins, dies or falls silent."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import fair_time, wait_for
from network import needs_ipv6
from receivers import filled, remotes

from evolver_async.schema import WeightId
from evolver_async.weights.channel.checksums import BLOCK, summed
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.collective import receiver as receiving
from evolver_async.weights.collective import sender
from evolver_async.weights.collective.channel import (
    RETRY_S,
    CollectivePublisher,
    CollectiveReceiver,
)
from evolver_async.weights.collective.process_group import (
    block_sums,
    checksum,
    on_distinct_gpus,
)
from evolver_async.weights.collective.versions import ReceivedVersions

DEADLINE_S = 2.0
LONG_S = 60.0  # a deadline that no test may reach
LOST_S = 30.0  # far from it; the loss of an actor costs less than five on a quiet machine
NUMBERS = 1 << 20  # of one of three tensors: 12 MiB in 48 buckets
BUCKET = 1 << 18
PUBLISHER = """
import sys, torch
from evolver_async.weights.collective.channel import CollectivePublisher
from evolver_async.schema import WeightId
torch.set_num_threads(1)
publisher = CollectivePublisher(sys.argv[1], bucket_bytes=int(sys.argv[2]))
step = 0
while True:
    step += 1
    tensors = {name: torch.full((int(sys.argv[3]),), float(step)) for name in "abc"}
    publisher.publish(WeightId(lineage=1, step=step), tensors)
    publisher.wait()
    print(step, flush=True)
"""


def version(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


@pytest.fixture
def publish_at(tmp_path: Path) -> Iterator[Callable[..., CollectivePublisher]]:
    started: list[CollectivePublisher] = []

    def start(
        address: str = "", keep: int = 2, deadline_s: float = DEADLINE_S
    ) -> CollectivePublisher:
        publisher = CollectivePublisher(
            address or str(tmp_path / "w"),
            keep,
            deadline_s=deadline_s,
            bucket_bytes=BUCKET,
        )
        started.append(publisher)
        return publisher

    yield start
    for publisher in started:
        publisher.close()


@pytest.fixture
def receive(tmp_path: Path) -> Iterator[Callable[..., CollectiveReceiver]]:
    started: list[CollectiveReceiver] = []

    def start(
        address: str = "", name: str = "", deadline_s: float = DEADLINE_S, keep: int = 2
    ) -> CollectiveReceiver:
        address = address or str(tmp_path / "w")
        receiver = CollectiveReceiver(address, keep, deadline_s=deadline_s, name=name)
        started.append(receiver)
        return receiver

    yield start
    for receiver in started:
        receiver.close()


def test_what_is_published_is_what_every_receiver_fetches(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    tensors = {
        "matrix": torch.randn(70_000, 5),
        "transposed": torch.randn(4, 6).t(),
        "bf16": torch.randn(3, 3).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
    }
    publisher, receivers = publish_at(), [receive(), receive()]
    assert receivers[0].head() is None and receivers[0].available() == []
    publisher.publish(version(3), tensors)
    changed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    publisher.copied()
    for tensor in tensors.values():  # the caller may change them: a copy is on its way
        tensor.zero_() if tensor.dtype.is_floating_point else None
    wait_for(lambda: all(one.head() == version(3) for one in receivers), "the first version")
    for receiver in receivers:
        fetched = receiver.fetch(version(3))
        assert list(fetched) == list(changed)
        assert fetched["matrix"].abs().sum() > 0 and fetched["mask"].tolist() == [True, False, True]
        assert fetched["bf16"].dtype == torch.bfloat16 and fetched["empty"].shape == (0, 4)
        assert fetched["transposed"].shape == (6, 4) and fetched["scalar"].item() == 3
        assert torch.equal(fetched["matrix"], receivers[0].fetch(version(3))["matrix"])
        with pytest.raises(WeightsGone, match=r"1\.4"):
            receiver.fetch(version(4))


def test_waiting_means_that_those_who_take_part_have_it(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    publisher, receiver = publish_at(keep=3), receive()
    publisher.publish(version(1), filled(1, NUMBERS))
    publisher.wait()
    wait_for(lambda: receiver.head() == version(1), "the first version")
    for step in range(2, 6):
        publisher.publish(version(step), filled(step, NUMBERS))
        publisher.wait()
        assert receiver.head() == version(step)
        assert float(receiver.fetch(version(step))["c"].sum()) == step * NUMBERS
    assert receiver.available() == [version(3), version(4), version(5)]


def test_a_learner_without_actors_does_not_wait_and_late_joiners_catch_up(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    publisher = publish_at()
    for step in range(1, 6):
        publisher.publish(version(step), filled(step, 100), retain=step == 2)
        publisher.wait()
    first = receive()
    wait_for(lambda: first.head() == version(5), "an idle learner to see who joined")
    assert first.available() == [version(2), version(4), version(5)]
    assert float(first.fetch(version(2))["a"][0]) == 2, "what was retained for an evaluation"
    publisher.release(version(2))
    publisher.publish(version(6), filled(6, 100))
    publisher.wait()
    assert first.available() == [version(5), version(6)]
    second = receive()
    wait_for(lambda: second.head() == version(6), "the second to catch up")
    assert first.available() == second.available() == [version(5), version(6)]


def test_a_receiver_has_memory_for_one_version_and_gets_others_again_on_request(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As around an evaluation of a version that is no longer the newest."""
    places: list[int] = []
    buffer = ReceivedVersions.buffer

    def noted(self: ReceivedVersions, size: int) -> torch.Tensor:
        found = buffer(self, size)
        places.append(found.data_ptr())
        return found

    monkeypatch.setattr(ReceivedVersions, "buffer", noted)

    def adopt(step: int) -> None:
        assert bool((receiver.fetch(version(step))["c"] == step).all())

    publisher, receiver = publish_at(keep=1), receive(keep=1, deadline_s=LONG_S)
    for step in range(1, 5):
        publisher.publish(version(step), filled(step, NUMBERS), retain=step == 3)
        wait_for(lambda step=step: receiver.head() == version(step), "the version")
        adopt(step)
    assert receiver.available() == [version(3), version(4)]
    late = receive(keep=1, deadline_s=LONG_S)
    wait_for(lambda: late.head() == version(4), "another receiver")
    came = len(places)
    assert came == 5, "not a second time to the first one, and only the newest to the other one"
    for step in (3, 4):
        adopt(step)
    assert len(places) == came + 2, "the other receiver lets them pass"
    assert len(set(places)) == 2, "one for each receiver"
    publisher.release(version(3))
    publisher.publish(version(5), filled(5, NUMBERS))
    publisher.wait()
    with pytest.raises(WeightsGone):
        receiver.fetch(version(3))
    adopt(5)


def test_receivers_that_come_and_go_leave_nothing_in_the_store(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "ROLL_S", 0.5)
    publisher, counts = publish_at(), list[int]()

    def stored() -> int:
        server = publisher._sender.served._server
        return sum("/event/" not in key for key in server.list_keys())

    for step in range(1, 5):
        publisher.publish(version(step), filled(step, 100))
        receiver = receive()
        wait_for(lambda one=receiver, step=step: one.head() == version(step), "it to join")
        publisher.wait()
        counts.append(stored())
        wait_for(lambda: stored() <= counts[0], "answers to be taken out of the store")
        receiver.close()


def test_weights_that_are_overtaken_before_their_turn_are_not_sent(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    publisher, receiver = publish_at(), receive()
    publisher.publish(version(0), filled(0, NUMBERS))
    wait_for(lambda: receiver.head() == version(0), "the first version")
    for step in range(1, 30):
        publisher.publish(version(step), filled(step, NUMBERS), retain=step == 7)
    publisher.wait()
    assert receiver.head() == version(29)
    assert receiver.available() == [version(7), version(28), version(29)]
    assert publisher.casts < 29


@pytest.mark.process
def test_damaged_bytes_are_not_taken_in_and_are_sent_again(
    publish_at: Callable[..., CollectivePublisher], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish_at()
    with remotes(publisher.address, 1, deadline_s=DEADLINE_S, damage="damage") as (one,):
        publisher.publish(version(1), filled(1, 1000))
        wait_for(lambda: one.holds(version(1)), "the version to come again")
        assert one.seen == ["1.1"]
    assert "damage-0 received other bytes" in caplog.text


@pytest.mark.process
def test_an_actor_with_filtered_ports_is_left_out_and_named_and_tried_again(
    publish_at: Callable[..., CollectivePublisher],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "PAUSE_S", 1.0)
    publisher = publish_at()
    named = "filtered-0 cannot be reached at its data ports"
    with (
        remotes(publisher.address, 1, deadline_s=DEADLINE_S, damage="filtered") as (filtered,),
        remotes(publisher.address, 1, deadline_s=DEADLINE_S) as (one,),
    ):
        publisher.publish(version(1), filled(1, 1000))
        wait_for(lambda: one.holds(version(1)), "the version to reach the other one")
        wait_for(lambda: caplog.text.count(named) > 1, "another attempt without a new version")
        publisher.publish(version(2), filled(2, 1000))
        wait_for(lambda: one.holds(version(2)), "the next version")
        assert filtered.seen == []


@pytest.mark.process
def test_an_actor_that_is_late_when_a_group_fails_is_asked_to_join_again(
    publish_at: Callable[..., CollectivePublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ROLL_S", 0.5)
    publisher = publish_at()
    with (
        remotes(publisher.address, 1, deadline_s=DEADLINE_S, damage="late") as (late,),
        remotes(publisher.address, 1, deadline_s=DEADLINE_S) as (one,),
    ):
        wait_for(lambda: publisher._sender.served.store.add("numbers", 0) == 2, "both to join")
        publisher.publish(version(1), filled(1, 1000))
        wait_for(lambda: one.holds(version(1)) and late.holds(version(1)), "the version")


@pytest.mark.process
def test_a_version_that_was_given_up_is_tried_again(
    publish_at: Callable[..., CollectivePublisher],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "PAUSE_S", 0.1)
    monkeypatch.setattr(sender, "ATTEMPTS", 1)
    publisher = publish_at()
    with remotes(publisher.address, 1, deadline_s=DEADLINE_S, damage="damage") as (one,):
        publisher.publish(version(1), filled(1, 1000))
        wait_for(lambda: one.holds(version(1)), "the version to come again")
    assert "weights 1.1 are given up after 1 attempts" in caplog.text


def test_an_actor_that_leaves_in_a_broadcast_is_not_waited_for(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = publish_at(deadline_s=LONG_S)
    stays, *leave = [receive(deadline_s=LONG_S) for _ in range(3)]
    publisher.publish(version(1), filled(1, NUMBERS))
    wait_for(lambda: all(r.head() == version(1) for r in (stays, *leave)), "the first version")
    for step, leaves in enumerate(leave, 2):
        began, casts = fair_time(), publisher.casts
        publisher.publish(version(step), filled(step, NUMBERS))
        wait_for(lambda before=casts: publisher.casts > before, "the broadcast to begin")
        leaves.close()
        publisher.wait()
        assert fair_time() - began < LOST_S
        assert stays.head() == version(step)
    assert "is silent" not in caplog.text, "no roll call waits for it"


def test_an_actor_that_leaves_in_a_roll_call_is_not_waited_for(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = receiving.BroadcastReceiver._answer

    def answer(self: receiving.BroadcastReceiver, roll: dict[str, Any]) -> None:
        self._presence.close() if self.name == "leaves" else answers(self, roll)

    monkeypatch.setattr(receiving.BroadcastReceiver, "_answer", answer)
    publisher = publish_at(deadline_s=LONG_S)
    stays, _ = [joined(receive, publisher, name) for name in ("stays", "leaves")]
    publisher.publish(version(1), filled(1, 100))
    publisher.wait()
    assert stays.head() == version(1)
    assert "is silent" not in caplog.text


def test_of_two_actors_that_cannot_reach_each_other_one_is_left_out_and_named(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers, other = receiving.BroadcastReceiver._answer, {"one": "2", "two": "1"}

    def answer(self: receiving.BroadcastReceiver, roll: dict[str, Any]) -> None:
        if other.get(self.name) in roll["addresses"]:
            roll["addresses"][other[self.name]] = ["127.0.0.1", 1]  # nothing is there
        answers(self, roll)

    monkeypatch.setattr(receiving.BroadcastReceiver, "_answer", answer)
    publisher, told = publish_at(deadline_s=LONG_S), list[str]()
    publisher.heed(lambda: False, lambda _: None, told.append)
    first, second, third = [joined(receive, publisher, name) for name in ("one", "two", "three")]
    began = fair_time()
    for step in (1, 2):
        publisher.publish(version(step), filled(step, 100))
        publisher.wait()
        assert first.head() == third.head() == version(step)
    assert fair_time() - began < LOST_S
    assert second.head() is None
    assert len(told) == 1 and "two" in told[0] and "one" in told[0] and "three" not in told[0]
    assert caplog.text.count("two cannot reach") == 1, "it is not asked again with every version"


def joined(
    receive: Callable[..., CollectiveReceiver], publisher: CollectivePublisher, name: str
) -> CollectiveReceiver:
    """A receiver that has taken its number, before there is a version."""
    before = publisher._sender.served.store.add("numbers", 0)
    made = receive(name=name, deadline_s=LONG_S)
    wait_for(lambda: publisher._sender.served.store.add("numbers", 0) > before, "it to join")
    return made


def test_an_actor_that_two_failures_name_is_left_out_and_told_of(
    publish_at: Callable[..., CollectivePublisher],
    receive: Callable[..., CollectiveReceiver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receives = receiving.BroadcastReceiver._receive

    def fails(self: receiving.BroadcastReceiver, parts: list[torch.Tensor]) -> list[int]:
        sums = receives(self, parts)
        return [0, *sums] if self.name == "bad" else sums

    monkeypatch.setattr(receiving.BroadcastReceiver, "_receive", fails)
    publisher, told = publish_at(), list[str]()
    publisher.heed(lambda: False, lambda _: None, told.append)
    good, bad = joined(receive, publisher, "good"), joined(receive, publisher, "bad")
    for step in (1, 2):
        publisher.publish(version(step), filled(step, 100))
        publisher.wait()
        assert good.head() == version(step)
    assert bad.head() is None and publisher.casts == 4
    assert len(told) == 1 and told[0].startswith("bad failed twice")


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "deadline_s", "limit_s"),
    [(signal.SIGKILL, LONG_S, LOST_S), (signal.SIGSTOP, DEADLINE_S, DEADLINE_S + 30)],
)
def test_an_actor_lost_in_the_middle_costs_a_moment_and_a_silent_one_the_deadline(
    publish_at: Callable[..., CollectivePublisher],
    number: signal.Signals,
    deadline_s: float,
    limit_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = publish_at(deadline_s=deadline_s)
    with remotes(publisher.address, 3, deadline_s=deadline_s) as (lost, *others):
        publisher.publish(version(1), filled(1, NUMBERS))
        wait_for(lambda: all(r.holds(version(1)) for r in (lost, *others)), "the first version")
        began = fair_time()
        publisher.publish(version(2), filled(2, NUMBERS))
        time.sleep(0.01)
        lost.process.send_signal(number)
        publisher.wait()
        assert fair_time() - began < limit_s
        assert ("is silent" in caplog.text) == (number == signal.SIGSTOP)
        wait_for(lambda: all(r.holds(version(2)) for r in others), "the others to go on")
        for step in range(3, 6):
            began = fair_time()
            publisher.publish(version(step), filled(step, NUMBERS))
            publisher.wait()
            assert fair_time() - began < DEADLINE_S, "only the first one pays for it"
        if number == signal.SIGSTOP:
            lost.process.send_signal(signal.SIGCONT)
            wait_for(lambda: lost.holds(version(5)), "it to join again by itself")


@pytest.mark.process
def test_a_learner_killed_in_the_middle_leaves_whole_weights_and_is_followed(
    tmp_path: Path, publish_at: Callable[..., CollectivePublisher]
) -> None:
    address = tmp_path / "w"
    learner = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(address), str(BUCKET), str(NUMBERS)],
        stdout=subprocess.PIPE,
    )
    try:
        with remotes(str(address), 2, deadline_s=DEADLINE_S) as both:
            wait_for(lambda: all(len(one.seen) >= 3 for one in both), "some versions")
            learner.kill()
            learner.wait()
            time.sleep(0.2)
            last = [one.seen[-1] for one in both]
            successor = publish_at()  # of a learner that resumed further back
            successor.publish(version(1, lineage=2), filled(1, NUMBERS))
            wait_for(lambda: all(one.holds(version(1, lineage=2)) for one in both), "its weights")
            assert all(line.startswith("1.") for line in last)
    finally:
        learner.kill()
        learner.communicate()


@pytest.mark.parametrize("size", [0, 64, BLOCK, 3 * BLOCK + 128])
def test_a_gpu_sums_to_the_checksum_of_the_host(size: int) -> None:
    bytes_N = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator())
    assert summed(*block_sums(bytes_N)) == checksum(bytes_N)


@needs_ipv6
def test_an_ipv6_address_serves(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        address = f"tcp://[::1]:{free.getsockname()[1]}"
    receiver, publisher = receive(address), publish_at(address)
    publisher.publish(version(1), filled(1, 100))
    wait_for(lambda: receiver.head() == version(1), "the first version")


def test_an_actor_says_once_that_nobody_serves_its_weights(
    receive: Callable[..., CollectiveReceiver], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    receive(address)
    wait_for(lambda: address in caplog.text, "a word about it")
    time.sleep(3 * RETRY_S)
    assert caplog.text.count(f"{address}: [Errno 111] Connection refused") == 1


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["a", "b", "c"], True),
        (["a", "a"], False),  # an actor on the learner's GPU
        (["a", "b", "b"], False),
        (["a", ""], False),
        (["", "b"], False),
    ],
)
def test_nccl_is_for_ends_with_a_gpu_each(gpus: list[str], expected: bool) -> None:
    assert on_distinct_gpus(gpus) == expected


def test_an_address_serves_and_serves_again(
    publish_at: Callable[..., CollectivePublisher], receive: Callable[..., CollectiveReceiver]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    receiver = receive(address)
    first = publish_at(address)
    first.publish(version(1), filled(1, 100))
    wait_for(lambda: receiver.head() == version(1), "the first version")
    with pytest.raises(OSError, match=r"weights\.address"):
        publish_at(address)
    assert receiver.fetch(version(1))["b"].tolist() == [1.0] * 100
