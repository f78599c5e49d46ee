"""The actor's loops: what ends them, what is given back, which weights they hold."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import COMMAND, DEADLINE_S
from msgspec.structs import replace
from openai_server import closed_url
from rollouts import Corridor, Hanging, corridor
from workers import Buffer, Walker, granted, run, version, worker_of

from actors.adapters.service_client import drain
from actors.engines.engine import Generation, Request
from actors.postprocess import ActorComponents
from actors.reporter import ENGINE, Reporter
from actors.rollout import episode
from actors.ticket_progress import TicketProgress, renewal
from actors.weights.arrival import ArrivalCheck
from actors.worker import ActorReplaced
from evolver_async.buffer.state.leases import Leases
from evolver_async.config import StageConfig
from evolver_async.config.load import dump, load
from evolver_async.errors import Unrecoverable
from evolver_async.launch.serial import VirtualLoop
from evolver_async.model.tokenizer import ModelError, tokenizer_hash
from evolver_async.schema import Task, Ticket, WeightId
from evolver_async.weights.channel.interface import WeightsCorrupt
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
from evolver_async.wire import messages
from evolver_async.wire.client import Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.in_process import LocalClient, LocalServer
from evolver_async.wire.server import Server

__all__ = ["run"]  # the fixture


class Unsolvable(Corridor):
    """Its solver fails."""

    def actions(self) -> list[str]:
        return ["left", "right"]

    def solve(self) -> list[str]:
        raise KeyError("no way")


def test_credit_is_in_members_whatever_the_size_of_a_stages_groups(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    buffer = Buffer((0.0, granted()), (0.0, granted({"group_id": 1})))
    run(buffer, Walker(pause_s=1.0), 60.0, groups=3)
    assert buffer.credits[:2] == [6, 2] and set(buffer.credits) == {6, 2}
    publisher = ShmPublisher(tmp_path / "stages", background=False)
    stages = [
        StageConfig(kind="sft", steps=1),
        StageConfig(kind="sft", steps=1, override={"rollout": {"group_size": 32}}),
    ]
    for groups, members in ((1, 32), (8, 64)):  # the base size is 8; one group of any stage fits
        client = LocalClient(LocalServer(buffer, "run"), "actor-0")
        worker = worker_of(client, Walker(), publisher, groups=groups, stages=stages)
        assert worker.free() == members
        asyncio.run(worker.source.close())
    publisher.close()


def test_the_credit_follows_the_group_size_of_the_stage_in_training(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path / "stages", background=False)
    stages = [
        StageConfig(kind="sft", steps=1),
        StageConfig(steps=1, override={"rollout": {"group_size": 8}}),
    ]
    worker = worker_of(None, Walker(), publisher, groups=4, group_size=1, stages=stages)
    assert worker.free() == 8, "one group of the second stage fits"

    async def credits() -> AsyncIterator[int]:
        for group, kind, stage in ((0, "demo", 0), (1, "rollout", 1), (2, "eval", 0)):
            worker.start(granted({"group_id": group, "kind": kind, "stage": stage}))
            yield worker.free()
        await worker.drain()
        await worker.source.close()

    async def found() -> list[int]:
        return [credit async for credit in credits()]

    assert asyncio.run(found()) == [8 - 2, 32 - 4, 32 - 6]
    publisher.close()


def test_a_rejected_trajectory_ends_the_worker_and_the_ticket_is_given_back(
    run: Callable[..., None],
) -> None:
    buffer = Buffer((0.0, granted()), refuses="tokens: wrong")
    with pytest.raises(Rejected, match="tokens: wrong"):
        run(buffer, Walker(), 60.0)
    (release,) = buffer.seen(messages.Release)
    assert release.reason == "error" and release.members == [0, 1]


def test_a_failing_engine_ends_the_worker_and_other_tickets_are_given_back(
    run: Callable[..., None],
) -> None:
    other = granted({"kind": "demo", "group_id": 1}, length=10**6)
    buffer = Buffer((0.0, granted()), (0.0, other))
    with pytest.raises(ExceptionGroup) as caught:
        run(buffer, Walker(FloatingPointError("logits"), pause_s=0.0), 60.0)
    assert caught.group_contains(FloatingPointError)
    reasons = {release.group_id: release.reason for release in buffer.seen(messages.Release)}
    assert reasons[0] == "error"


def test_an_engine_that_no_restart_would_mend_ends_the_worker_with_its_own_error(
    run: Callable[..., None],
) -> None:
    with pytest.raises(Unrecoverable, match=r"^engine\.kind: "):
        run(Buffer((0.0, granted())), Walker(Unrecoverable("engine.kind: died"), pause_s=0.0), 60.0)


def test_use_and_restarts_of_an_engine_in_processes_of_its_own_are_reported() -> None:
    sent = list[messages.Counters]()

    class Client:
        async def request(self, message: messages.Counters, timeout_s: float | None) -> None:
            sent.append(message)

    class InProcesses(Walker):
        def stats(self) -> dict[str, float]:
            return super().stats() | dict.fromkeys(ENGINE, 2.0)

    for engine in (Walker(), InProcesses()):
        reporter = Reporter(Client(), engine, ActorComponents(), ArrivalCheck(engine, "float32"))  # type: ignore[arg-type]
        asyncio.run(reporter.send(None))
    assert [one.values for one in sent] == [{f"engine/{name}": 2.0 for name in ENGINE}]


def test_what_was_sampled_never_falls_while_the_policy_judges(tmp_path: Path) -> None:
    """A judge's words are known to be its own only when they are complete."""

    class Counting(Walker):
        sampled = 100.0

        def stats(self) -> dict[str, float]:
            return {"generated": self.sampled, "busy_s": 0.0}

    class Own:
        generated = 0

    engine, judge = Counting(), Own()
    publisher = ShmPublisher(tmp_path / "w", background=False)
    components = ActorComponents(judge=judge)  # type: ignore[arg-type]
    worker = worker_of(None, engine, publisher, components=components)
    assert worker.reporter.generated() == 100
    engine.sampled, judge.generated = 110.0, 60
    assert worker.reporter.generated() == 100
    engine.sampled = 200.0
    assert worker.reporter.generated() == 140


def test_a_failing_solver_is_the_environments_failure(run: Callable[..., None]) -> None:
    ticket = granted({"kind": "demo"})
    ticket = replace(ticket, task=replace(ticket.task, env=f"{__name__}:Unsolvable"))
    buffer = Buffer((0.0, ticket))
    run(buffer, Walker(), 5.0)
    (release,) = buffer.seen(messages.Release)
    assert release.reason == "environment" and release.members == [0, 1]


def test_a_group_granted_anew_replaces_its_older_attempt(run: Callable[..., None]) -> None:
    again = granted({"attempt": 1}, length=1)
    buffer = Buffer((0.0, granted(length=1)), (1.0, again))
    run(buffer, Walker(pause_s=3.0), 10.0)
    pushed = [push.trajectory for push in buffer.seen(messages.Push)]
    assert sorted((one.attempt, one.member) for one in pushed) == [(1, 0), (1, 1)]
    assert buffer.seen(messages.Release) == []


@pytest.mark.parametrize("kind", ["rollout", "explore"])
def test_a_forced_lag_never_goes_behind_what_tickets_allow(tmp_path: Path, kind: str) -> None:
    publisher = ShmPublisher(tmp_path / "w", keep=9, background=False)
    for step in range(3):
        publisher.publish(version(step), {"w": torch.zeros(1)})
    worker = worker_of(None, Walker(), publisher, lag=2)
    assert worker.adoption.target() == version(0)

    async def start() -> None:
        worker.start(granted({"kind": kind}))  # allows any weights
        assert worker.adoption.target() == version(0)
        worker.start(granted({"kind": kind, "weights": version(1)}))
        assert worker.adoption.target() == version(1)
        publisher.publish(version(4), {"w": torch.zeros(1)})  # 3 was overtaken
        assert worker.adoption.target() == version(2)
        worker.start(granted({"kind": kind, "weights": version(3)}))
        assert worker.adoption.target() == version(4)
        worker.start(granted({"kind": "eval", "weights": version(5)}))
        assert worker.adoption.target() == version(4)
        for _, _, task in worker.running.values():
            task.cancel()

    asyncio.run(start())
    publisher.close()


def test_an_actor_goes_on_while_new_weights_are_fetched(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(1), {"w": torch.zeros(1)})
    worker = worker_of(None, Walker(), publisher)
    adoption, begun, go_on = worker.adoption, threading.Event(), threading.Event()
    receiver = ShmReceiver(publisher.address)
    fetch, adoption.source._receiver = receiver.fetch, receiver

    def slow(weights: WeightId) -> dict[str, torch.Tensor]:
        begun.set()
        assert go_on.wait(DEADLINE_S), "the loop stands still meanwhile"
        return fetch(weights)

    receiver.fetch = slow

    async def play() -> None:
        adopting = asyncio.create_task(adoption.adopt())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        await adopting

    worker.engine.weights = None
    asyncio.run(play())
    assert worker.engine.weights == version(1)
    publisher.close()


@pytest.mark.parametrize("error", [WeightsCorrupt("a tensor differs"), ModelError("no such one")])
def test_an_engine_keeps_its_weights_if_newer_ones_are_unusable(
    tmp_path: Path, error: ValueError
) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(2), {"w": torch.zeros(1)})
    worker, loop = worker_of(None, Walker(), publisher), VirtualLoop()
    worker.engine.weights = version(1)
    adoption, receiver, fetched = worker.adoption, ShmReceiver(publisher.address), []
    fetch, adoption.source._receiver = receiver.fetch, receiver

    def damaged(weights: WeightId) -> dict[str, torch.Tensor]:
        fetched.append(weights)
        if weights == version(2):
            raise error
        return fetch(weights)

    receiver.fetch = damaged

    async def play() -> None:
        following = asyncio.create_task(adoption.follow())
        await asyncio.sleep(1.0)
        assert worker.engine.weights == version(1) and fetched == [version(2)]
        (total,) = worker.components.failures.totals()
        assert str(total) == f"weights update failed once, last: 1.2: {error}"
        await asyncio.sleep(worker.config.actors.weights_timeout_s)
        assert fetched == [version(2)] * 2
        publisher.publish(version(3), {"w": torch.zeros(1)})
        await asyncio.sleep(1.0)
        assert worker.engine.weights == version(3) and fetched[2:] == [version(3)]
        following.cancel()
        worker.engine.weights = None
        publisher.publish(version(2), {"w": torch.zeros(1)})
        adoption._retry_at = 0.0
        with pytest.raises(type(error)):
            await adoption.adopt()

    loop.run_until_complete(play())
    publisher.close()
    loop.close()


def test_weights_that_a_cancelled_ticket_was_waiting_for_are_fetched_once(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(1), {"w": torch.zeros(1)})
    worker = worker_of(None, Walker(), publisher)
    adoption, go_on, fetched = worker.adoption, threading.Event(), []
    receiver = ShmReceiver(publisher.address)
    fetch, adoption.source._receiver = receiver.fetch, receiver

    def slow(weights: WeightId) -> dict[str, torch.Tensor]:
        fetched.append(weights)
        assert go_on.wait(DEADLINE_S)
        return fetch(weights)

    receiver.fetch = slow

    async def play() -> None:
        fenced = asyncio.create_task(adoption.adopt())
        async with asyncio.timeout(DEADLINE_S):
            while not fetched:
                await asyncio.sleep(0.001)
        fenced.cancel()
        await asyncio.wait([fenced])
        other = asyncio.create_task(adoption.adopt())
        await asyncio.sleep(0.05)
        go_on.set()
        await other
        assert worker.engine.weights == version(1)
        await adoption.close()

    worker.engine.weights = None
    asyncio.run(play())
    assert fetched == [version(1)]
    publisher.close()


class Busy(Buffer):
    """Has no room for trajectories before a certain time."""

    def __init__(self, *tickets: tuple[float, Ticket], until: float) -> None:
        super().__init__(*tickets)
        self.until = until
        self.taken: list[int] = []

    def handle(self, peer: str, request: Any, now: float) -> list[messages.Reply]:
        if isinstance(request, messages.Push) and now < self.until:
            return [messages.Retry(seconds=0.5)]
        if isinstance(request, messages.Push):
            self.taken.append(request.trajectory.member)
        return super().handle(peer, request, now)


class OneWalks(Walker):
    """Only the first member gets anywhere."""

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(0.0 if "/0/" in request.session else 1000.0)
        return await super().generate(request)


def test_a_drained_actor_hands_in_what_is_finished_and_gives_back_the_rest(
    run: Callable[..., None],
) -> None:
    buffer = Busy((0.0, granted(length=1)), until=3.0)
    run(buffer, OneWalks(), 1.0)
    assert buffer.taken == [0]
    release, leave = buffer.requests[-2:]
    assert isinstance(release, messages.Release) and isinstance(leave, messages.Lease)
    assert buffer.leases[0].groups == [] and buffer.leases[-1].groups == [release.group_id]
    assert (release.members, release.reason) == ([1], "drain")


def test_a_drained_actor_does_not_wait_for_ever(run: Callable[..., None]) -> None:
    buffer = Busy((0.0, granted(length=1)), until=1e9)
    run(buffer, Walker(), 1.0)
    (release,) = buffer.seen(messages.Release)
    assert (release.members, release.reason) == ([0, 1], "drain")


class Leaving(Corridor):
    """Closes over the network."""

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(2.0)
        type(self).closed += 1


def test_a_drained_actor_closes_the_environments_of_cancelled_episodes(
    run: Callable[..., None],
) -> None:
    Leaving.closed = 0
    run(Buffer((0.0, corridor(members=2, env=Leaving))), Walker(pause_s=1000.0), 10.0)
    assert Leaving.closed == 2


def test_renewals_say_what_holds_up_each_ticket(run: Callable[..., None]) -> None:
    evaluation = granted({"kind": "eval", "group_id": 1, "weights": version(1)})
    buffer = Buffer((0.0, granted(length=100)), (1.0, evaluation))
    run(buffer, Walker(pause_s=20.0), 60.0)
    first, *others = [renewal for renewal in buffer.seen(messages.Renew) if 1 in renewal.progress]
    assert first.doing[0] == "member 0: generation of turn 0 for 7.5 s"
    assert first.still_s[0] == pytest.approx(7.5) and first.weights == version(1)
    assert first.doing[1] == "waiting for other tickets to leave the engine for 6.5 s"
    shown = [(one.progress[0], one.progress[1]) for one in others]
    assert len(set(shown)) > 2
    assert all(waiting == running for running, waiting in shown), "it moves as they do"


def test_a_long_turn_is_progress_while_the_engine_samples() -> None:
    long, idle = TicketProgress(count=3, generating=1), TicketProgress(count=5)

    async def told(generated: int) -> list[int]:
        progresses = {0: long, 1: idle, 2: TicketProgress(queued=True)}
        renewed = renewal(progresses, generated, None, None, long.clock, 0)
        return [renewed.progress[group] for group in range(3)]

    first, second = asyncio.run(told(100)), asyncio.run(told(160))
    assert (first, second) == ([103, 5, 100], [163, 5, 160])


def test_an_evaluation_that_waited_for_rollouts_moves_once_it_is_played_itself() -> None:
    """The learner waits for an evaluation only while it tells more than ever before."""
    rollouts = {group: TicketProgress(count=40, generating=2) for group in range(3)}
    evaluation = TicketProgress(queued=True)

    async def told(generated: int) -> int:
        progresses = rollouts | {9: evaluation}
        return renewal(progresses, generated, None, None, evaluation.clock, 0).progress[9]

    waited = [asyncio.run(told(generated)) for generated in (1000, 2000)]
    rollouts.clear()
    evaluation.queued, evaluation.generating = False, 2
    assert waited[0] < waited[1] < asyncio.run(told(2001))


def test_an_agent_that_works_between_its_calls_keeps_its_ticket_until_its_deadline() -> None:
    loop, progress = VirtualLoop(), TicketProgress(count=7)
    leases = Leases(lease_s=30.0, stall_s=120.0)
    leases.grant("actor-0", 5, 0, [0], 0.0)

    async def play() -> None:
        progress.run_agents(600.0)
        while leases.held("actor-0", 5) is not None:
            await asyncio.sleep(1.0)
            leases.expire(loop.time())
            work = 100 + int(loop.time())
            renewed = renewal({5: progress}, work, None, None, progress.clock, 0)
            leases.renew("actor-0", renewed.progress, loop.time())

    loop.run_until_complete(play())
    assert 719.0 <= loop.time() <= 722.0
    loop.close()


def test_renewals_count_what_agents_do_between_their_calls(run: Callable[..., None]) -> None:
    class Agents:
        async def run(self, ticket: Ticket, setting: Any, progress: TicketProgress, _: Any) -> None:
            progress.run_agents(600.0)
            await asyncio.sleep(50.0)

        def worked_s(self) -> float:
            return asyncio.get_running_loop().time()

        def counters(self) -> dict[str, float]:
            return {}

        async def close(self) -> None: ...

    buffer = Buffer((0.0, granted()))
    run(buffer, Walker(), 40.0, ActorComponents(agents=Agents()))  # type: ignore[arg-type]
    told = [renewed.progress[0] for renewed in buffer.seen(messages.Renew) if renewed.progress]
    assert told == [7, 15, 22, 30, 37]


def test_troubles_with_an_environment_service_are_told(run: Callable[..., None]) -> None:
    drain()
    params = {"url": closed_url().removesuffix("/v1"), "env_type": "shop", "name": "a"}
    nowhere = Task(
        task_id="t", env="agentevolver", split="train", map_seed=0, params={**params, "retries": 1}
    )
    buffer = Buffer((0.0, granted({"task": nowhere})))
    run(buffer, Walker(), 60.0)
    assert buffer.seen(messages.Release)[0].reason == "environment"
    assert buffer.seen(messages.Counters)[-1].values == {
        "env_service/create/connection": 4.0,  # two members, two attempts each
        "env_service/retries": 2.0,
        "env_service/given_up": 2.0,
    }


def test_an_engine_that_never_answers_is_not_the_tasks_fault(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "HUNG_S", 5.0)  # beyond the limit of an episode
    buffer = Buffer((0.0, granted(length=100)))
    run(buffer, Walker(pause_s=1000.0), 30.0, episode_timeout_s=20.0)
    (release,) = buffer.seen(messages.Release)
    assert (release.members, release.reason) == ([0, 1], "engine")


@pytest.mark.parametrize("kind", ["rollout", "eval", "demo"])
@pytest.mark.parametrize("hangs", ["reset", "step"])
def test_an_environment_that_never_returns_gives_its_ticket_back(
    tmp_path: Path, kind: str, hangs: str
) -> None:
    Hanging.free.clear()
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(1), {"w": torch.zeros(1)})
    ticket = corridor(env=Hanging, hangs=hangs)
    buffer = Buffer((0.0, replace(ticket, kind=kind, weights=version(1))))

    async def play() -> None:
        server = LocalServer(buffer, "run")
        server.start()
        worker = worker_of(LocalClient(server, "actor-0"), Walker(), publisher, step_timeout_s=0.1)
        working = asyncio.create_task(worker.run())
        while not buffer.seen(messages.Release):
            await asyncio.sleep(0.01)
        Hanging.free.set()  # its end waits for the environment to be closed
        worker.stop.set()
        await working
        server.close()

    try:
        asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    finally:
        Hanging.free.set()
        publisher.close()
    (release,) = buffer.seen(messages.Release)
    assert (release.members, release.reason) == ([0], "environment")
    assert buffer.seen(messages.Push) == []


@pytest.mark.process
def test_a_second_actor_of_a_name_is_told_who_holds_it_and_ends(tmp_path: Path) -> None:
    """Its connection leaves that of the first alone; who has gone holds its name no longer."""
    sockets, stop = Path(tempfile.mkdtemp()), threading.Event()
    buffer = Buffer()
    server = Server(buffer, f"ipc://{sockets}/s", "run", silent_s=DEADLINE_S)
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    first = DealerClient(server.address, "run", "x")
    later = DealerClient(server.address, "run", "x")

    async def hello(client: DealerClient) -> object:
        request = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, host="alpha", pid=7)
        return await client.request(request, DEADLINE_S)

    async def until_free(client: DealerClient) -> None:
        while True:
            with contextlib.suppress(Rejected):
                await hello(client)
                return
            await asyncio.sleep(0.02)

    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, sockets)
        stack.callback(server.close)
        stack.callback(thread.join)
        stack.callback(stop.set)
        stack.callback(later.close)
        closing = stack.enter_context(contextlib.ExitStack())
        closing.callback(first.close)
        asyncio.run(hello(first))
        command = [*COMMAND, "actor", "--connect", server.address, "--name", "x"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        (line,) = [line for line in done.stderr.splitlines() if " ERROR " in line]
        assert "--connect: the name x is held by process 7 on alpha (incarnation 0," in line
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert isinstance(asyncio.run(hello(first)), messages.Ok), "still connected"
        closing.close()
        asyncio.run(asyncio.wait_for(until_free(later), DEADLINE_S))


def test_an_actor_that_lost_its_name_ends_and_says_to_whom(run: Callable[..., None]) -> None:
    class Taken(Buffer):
        def handle(self, peer: str, request: Any, now: float) -> list[messages.Reply]:
            if isinstance(request, messages.Lease) and request.credit > 0 and now > 1.0:
                return [messages.Fenced(reason="the name actor-0 is held by process 7 on alpha")]
            return super().handle(peer, request, now)

    with pytest.raises(ActorReplaced, match="held by process 7 on alpha"):
        run(Taken(), Walker(), 60.0)


@pytest.mark.process
def test_the_buffer_refuses_the_first_actor_with_another_tokenizer(
    tmp_path: Path,
) -> None:
    policy, sockets = tmp_path / "policy", Path(tempfile.mkdtemp())
    policy.mkdir()
    (tmp_path / "channel").mkdir()
    (policy / "tokenizer.json").write_text("{}")
    settings = ["stages.0.steps=5", f"policy.path={policy}", f"weights.dir={tmp_path}/channel"]
    dump(load(None, settings), tmp_path / "config.yaml")
    address = f"ipc://{sockets}/s"
    command = [*COMMAND, "buffer", "--connect", address, "--run", str(tmp_path)]
    buffer = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    async def join(tokenizer: str) -> object:
        client = DealerClient(address, sender="actor-9")
        try:
            hello = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, tokenizer=tokenizer)
            return await client.request(hello, DEADLINE_S)
        finally:
            client.close()

    try:
        with pytest.raises(Rejected, match="tokenizer: actor-9 has another"):
            asyncio.run(join("another"))
        assert isinstance(asyncio.run(join(tokenizer_hash(policy))), messages.Welcome)
    finally:
        buffer.terminate()
        buffer.wait(DEADLINE_S)
        shutil.rmtree(sockets)
