"""A request acts once, in the name of one process, however often and from wherever it arrives."""

from pathlib import Path
from typing import Any

import pytest
from buffer_world import HEAD, World, config, trajectory

from evolver_async.wire import messages
from evolver_async.wire.envelope import SCHEMA_HASH, Envelope, pack, unpack
from evolver_async.wire.router import Postponed, RequestRouter
from evolver_async.wire.sessions import ANSWERS, EXPIRY_S, NAMES

HELLO = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, host="alpha", pid=7)
RESUME = messages.Resume(lineage=0, take=0, version=0, process="one", incarnation=1)


class RoutedWorld:
    """The router of a world's service; a route is the name of a connection."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.world = World(directory, config(max_staleness=9, **settings))
        self.gone: set[str] = set()  # connections that were closed
        self.open()

    def open(self) -> None:
        connected = lambda route: route not in self.gone  # noqa: E731
        self.router = RequestRouter(
            self.world.service, "run", 5.0, silent_s=30.0, connected=connected
        )

    def restart(self) -> None:
        self.world.kill()
        self.open()

    def send(
        self,
        request: messages.Request,
        number: int = 1,
        sender: str = "actor-0",
        incarnation: int = 0,
        nonce: str = "n",
    ) -> list[Any]:
        """Send one message; the replies that go back to its sender."""
        envelope = Envelope("run", sender, incarnation, number, request, nonce)
        route = f"{sender}/{incarnation}/{nonce}"
        self.router.receive(route, [bytes(frame) for frame in pack(envelope)], self.world.now)
        sent = self.router.settle(self.world.now)
        self.world.store.state.check()
        return [unpack(frames).message for to, frames in sent if to == route]

    def one(self, *args: Any, **sender: Any) -> Any:
        (reply,) = self.send(*args, **sender)
        return reply

    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.router.tick(self.world.now)
        self.router.settle(self.world.now)

    def journal(self) -> int:
        return self.world.store.journal.size


@pytest.fixture
def routed(tmp_path: Path) -> RoutedWorld:
    made = RoutedWorld(tmp_path)
    made.one(RESUME, sender="learner", incarnation=1, nonce="one")
    return made


# ---- messages that come again


def test_a_repeated_lease_grants_nothing_more_also_after_later_ones(routed: RoutedWorld) -> None:
    lease = messages.Lease(credit=2, weights=HEAD)
    first = routed.one(lease, 1)
    second = routed.one(lease, 2)
    assert first.tickets[0].group_id != second.tickets[0].group_id
    size = routed.journal()
    assert routed.one(lease, 2).tickets[0].group_id == second.tickets[0].group_id
    assert isinstance(routed.one(lease, 1), messages.Wait)
    assert routed.journal() == size
    assert len(list(routed.world.store.leases)) == 2


def test_a_repeated_lease_that_was_told_to_wait_waits(routed: RoutedWorld) -> None:
    held = routed.one(messages.Lease(credit=1000, weights=HEAD), 1)
    assert len(held.tickets) == 20
    assert routed.send(messages.Lease(credit=2, weights=HEAD), 2) == []  # parked
    routed.pass_time(6.0)
    assert isinstance(routed.one(messages.Lease(credit=2, weights=HEAD), 2), messages.Wait)
    routed.send(messages.Lease(credit=0), 3)  # leaves; its groups can be granted again
    assert isinstance(routed.one(messages.Lease(credit=2, weights=HEAD), 2), messages.Wait)
    assert list(routed.world.store.leases) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_resume_begins_no_lineage(routed: RoutedWorld, restarted: bool) -> None:
    """Neither from the learner of the present lineage nor from an earlier one."""
    if restarted:
        routed.restart()
    reply = routed.one(RESUME, sender="learner", incarnation=1, nonce="one")
    assert isinstance(reply, messages.Resumed) and reply.lineage == 1
    later = messages.Resume(lineage=1, take=0, version=0, process="two", incarnation=2)
    assert routed.one(later, sender="learner", incarnation=2, nonce="two").lineage == 2
    if restarted:
        routed.restart()
    for number in (1, 2):
        reply = routed.one(RESUME, number, sender="learner", incarnation=1, nonce="one")
        assert isinstance(reply, messages.Fenced)
    late = messages.Resume(lineage=1, take=0, version=0, process="late", incarnation=1)
    reply = routed.one(late, sender="learner", incarnation=1, nonce="late")
    assert isinstance(reply, messages.Fenced)
    assert routed.one(later, sender="learner", incarnation=2, nonce="two").lineage == 2
    assert routed.world.replay.at.lineage == 2


def test_a_parked_lease_may_come_again_after_many_later_answers(routed: RoutedWorld) -> None:
    routed.world.service.store.replay.at.head = None  # nothing can be granted
    lease = messages.Lease(credit=2, weights=HEAD)
    assert routed.send(lease, 1) == []
    for number in range(2, ANSWERS + 4):
        assert type(routed.one(messages.Renew(progress={}), number)) is messages.Ok
    assert routed.send(lease, 1) == [], "it is still parked"
    routed.pass_time(6.0)
    assert type(routed.one(lease, 1)) is messages.Wait
    for number in range(ANSWERS + 4, 2 * ANSWERS + 8):
        routed.one(messages.Renew(progress={}), number)
    assert type(routed.one(lease, 1)) is messages.Reject, "answered, and too old to know"


def test_whatever_is_repeated_changes_nothing(routed: RoutedWorld) -> None:
    """Every kind of request twice: state, leases and counters stay; the answer is the same."""
    (ticket,) = routed.one(messages.Lease(credit=2, weights=HEAD), 1).tickets
    progress = {ticket.group_id: 1}
    requests = [
        messages.Renew(progress=progress),
        messages.Counters(values={"judge/labelled": 3.0}),
        messages.Release(group_id=ticket.group_id, members=[1], reason="environment"),
        messages.Lease(credit=2, weights=HEAD, generated=5),
        messages.Offer(tasks=[]),
        messages.Kept(take=0, bytes=9),
    ]
    first = [routed.one(request, number) for number, request in enumerate(requests, 2)]
    routed.world.service.activity.peers["actor-0"].counters["judge/labelled"] = 4.0  # since then
    size, leases = routed.journal(), [vars_of(lease) for lease in routed.world.store.leases]
    again = [routed.one(request, number) for number, request in enumerate(requests, 2)]
    assert [type(reply) for reply in again] == [type(reply) for reply in first]
    assert routed.journal() == size
    assert [vars_of(lease) for lease in routed.world.store.leases] == leases
    assert routed.world.service.activity.counters() == {"judge/labelled": 4.0}


def vars_of(lease: Any) -> tuple[Any, ...]:
    return lease.peer, lease.group_id, lease.attempt, sorted(lease.members), lease.progress


def test_remembered_answers_that_say_nothing_take_no_room(routed: RoutedWorld) -> None:
    """A thousand actors have half a million of them."""
    for number in range(1, 9):
        assert type(routed.one(messages.Renew(progress={}), number)) is messages.Ok
    sessions = routed.router._sessions._by_name
    assert len({id(answer) for answer in sessions["actor-0"].answers.values()}) == 1


def test_a_repeated_push_is_a_duplicate_and_a_message_too_old_to_know_is_refused(
    routed: RoutedWorld,
) -> None:
    (ticket,) = routed.one(messages.Lease(credit=2, weights=HEAD), 1).tickets
    push = messages.Push(trajectory=trajectory(ticket, 0))
    assert isinstance(routed.one(push, 2), messages.Ack)
    for number in range(3, ANSWERS + 5):
        routed.one(messages.Renew(progress={}), number)
    assert isinstance(routed.one(push, 2), messages.Dup)
    reply = routed.one(messages.Lease(credit=2, weights=HEAD), 1)
    assert isinstance(reply, messages.Reject) and "message 1 was answered before" in reply.reason


# ---- processes of one name


def test_a_name_that_is_alive_is_refused_with_its_holder(routed: RoutedWorld) -> None:
    assert isinstance(routed.one(HELLO, nonce="first"), messages.Welcome)
    routed.pass_time(2.0)
    reply = routed.one(HELLO, nonce="second")
    assert isinstance(reply, messages.Reject)
    assert reply.reason == (
        "the name actor-0 is held by process 7 on alpha (incarnation 0, joined 2 s ago, "
        "last heard 2.0 s ago)"
    )
    assert isinstance(
        routed.one(messages.Lease(credit=2, weights=HEAD), 2, nonce="second"), messages.Fenced
    )
    assert isinstance(
        routed.one(messages.Lease(credit=2, weights=HEAD), 2, nonce="first"), messages.Tickets
    )


@pytest.mark.parametrize("how", ["left", "disconnected", "silent"])
def test_a_name_whose_holder_is_gone_is_free(routed: RoutedWorld, how: str) -> None:
    routed.one(HELLO, nonce="first")
    (ticket,) = routed.one(messages.Lease(credit=2, weights=HEAD), 2, nonce="first").tickets
    if how == "left":
        routed.one(messages.Lease(credit=0), 3, nonce="first")
    elif how == "disconnected":
        routed.gone.add("actor-0/0/first")
    else:
        routed.pass_time(31.0)
    assert isinstance(routed.one(HELLO, nonce="second"), messages.Welcome)
    (again,) = routed.one(messages.Lease(credit=2, weights=HEAD), 2, nonce="second").tickets
    assert again.group_id == ticket.group_id, "the holder's tickets wait for no lease to run out"
    late = messages.Release(group_id=again.group_id, members=[0, 1], reason="drain")
    assert isinstance(routed.one(late, 9, nonce="first"), messages.Fenced)
    assert len(list(routed.world.store.leases)) == 1


def test_a_process_that_the_service_refuses_holds_no_name(routed: RoutedWorld) -> None:
    other = messages.Hello(role="actor", schema_hash="other", host="alpha", pid=7)
    for _ in range(2):  # and so when its message comes again
        assert "schema" in routed.one(other, 1, nonce="refused").reason
    assert isinstance(routed.one(HELLO, 1, nonce="next"), messages.Welcome)


def test_a_restarted_process_gets_its_name_at_once_and_the_old_one_is_fenced(
    routed: RoutedWorld,
) -> None:
    routed.one(HELLO, nonce="old", incarnation=1)
    (ticket,) = routed.one(
        messages.Lease(credit=2, weights=HEAD), 2, nonce="old", incarnation=1
    ).tickets
    assert isinstance(routed.one(HELLO, nonce="new", incarnation=2), messages.Welcome)
    (again,) = routed.one(
        messages.Lease(credit=2, weights=HEAD), 2, nonce="new", incarnation=2
    ).tickets
    assert again.group_id == ticket.group_id
    old = {"nonce": "old", "incarnation": 1}
    assert isinstance(routed.one(HELLO, 3, **old), messages.Reject)
    for request in (
        messages.Lease(credit=2, weights=HEAD),
        messages.Renew(progress={ticket.group_id: 5}),
    ):
        assert isinstance(routed.one(request, 4, **old), messages.Fenced)
    # its data is as good as any: the first copy of a granted member wins
    push = messages.Push(trajectory=trajectory(ticket, 0))
    assert isinstance(routed.one(push, 5, **old), messages.Ack)


def test_a_parked_request_of_a_process_that_was_replaced_gets_nothing(routed: RoutedWorld) -> None:
    routed.one(messages.Lease(credit=1000, weights=HEAD), 1, sender="other")
    routed.one(HELLO, nonce="old", incarnation=1)
    assert routed.send(messages.Lease(credit=2, weights=HEAD), 2, nonce="old", incarnation=1) == []
    routed.one(HELLO, nonce="new", incarnation=2)
    routed.send(messages.Lease(credit=0), 2, sender="other")
    routed.pass_time(1.0)
    assert list(routed.world.store.leases) == []


# ---- bounds


def test_names_are_bounded_and_expire(routed: RoutedWorld) -> None:
    for number in range(NAMES + 500):
        routed.router.receive("x", pack(hello_of(f"a-{number}")), routed.world.now)
    sessions = routed.router._sessions
    assert len(sessions) == NAMES
    routed.pass_time(EXPIRY_S + 1)
    assert len(sessions) == 0


def test_as_many_requests_wait_as_there_are_names(routed: RoutedWorld) -> None:
    """One that made room for another would come again at once, and make another one come."""
    routed.one(messages.Lease(credit=1000, weights=HEAD), sender="other")
    lease = messages.Lease(credit=2, weights=HEAD, visible=HEAD)
    for number in range(1500):
        envelope = Envelope("run", f"a-{number}", 0, 1, lease)
        routed.router.receive(f"a-{number}", pack(envelope), routed.world.now)
    assert routed.router.settle(routed.world.now) == []


def hello_of(name: str) -> Envelope:
    return Envelope("run", name, 0, 1, HELLO)


class Collecting:
    """A service that answers all requests of a batch by its commit; `full`: it cannot commit."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[messages.Reply]]] = []
        self.full = False

    def handle(self, peer: str, request: messages.Retrieve, now: float) -> list[messages.Reply]:
        replies: list[messages.Reply] = []
        self.asked.append((request.query, replies))
        return replies

    def commit(self) -> None:
        if self.full:
            raise Postponed
        together = [query for query, _ in self.asked]
        for _, replies in self.asked:
            replies.append(messages.Guidance(ids=[], texts=together))
        self.asked = []

    def tick(self, now: float) -> None: ...


def test_a_service_may_answer_a_batch_by_its_commit() -> None:
    service = Collecting()
    router = RequestRouter(service, "run", 5.0)

    def receive(sender: str, number: int) -> None:
        request = messages.Retrieve(query=f"{sender} {number}")
        frames = pack(Envelope("run", sender, 0, number, request, "n"))
        router.receive(sender, [bytes(frame) for frame in frames], 0.0)

    def settle() -> list[tuple[str, int, list[str]]]:
        found = [(route, unpack(frames)) for route, frames in router.settle(0.0)]
        return [(route, reply.message_id, reply.message.texts) for route, reply in found]

    for sender, number in (("a", 1), ("a", 2), ("b", 1)):
        receive(sender, number)
    together = ["a 1", "a 2", "b 1"]
    assert settle() == [("a", 1, together), ("a", 2, together), ("b", 1, together)]
    assert settle() == []
    service.full = True
    receive("a", 3)
    assert settle() == [] == settle()
    receive("a", 3)  # the client asks again
    service.full = False
    assert settle() == [("a", 3, ["a 3", "a 3"])]
    assert settle() == []


class Full:
    """A service whose disk is full: nothing is done, and what it says of that promises nothing."""

    full = True

    def handle(self, peer: str, request: messages.Lease, now: float) -> list[messages.Reply]:
        waits = request.credit and self.full
        return [messages.Retry(seconds=1.0) if waits else messages.Tickets(tickets=[])]

    def commit(self) -> None:
        if self.full:
            raise Postponed

    def tick(self, now: float) -> None: ...


def test_what_promises_nothing_is_said_before_there_is_room() -> None:
    service = Full()
    router = RequestRouter(service, "run", 5.0)

    def asked(sender: str, credit: int) -> list[tuple[str, type]]:
        frames = pack(Envelope("run", sender, 0, 1, messages.Lease(credit=credit), "n"))
        router.receive(sender, [bytes(frame) for frame in frames], 0.0)
        told = router.settle(0.0)
        return [(route, type(unpack(frames).message)) for route, frames in told]

    assert asked("b", 0) == []
    assert asked("a", 1) == [("a", messages.Retry)]
    assert router.settle(0.0) == []
    service.full = False
    again = sorted(asked("a", 1))
    assert again == [("a", messages.Tickets), ("b", messages.Tickets)], "it is no answer"
