"""The rollout process: follows the weights, leases tickets, runs their groups, hands them in.

Four small loops on one asyncio loop. A ticket is run to its end or given back with the reason; a
finished trajectory is kept until the buffer has it on disk. Rollouts share the engine with newer
weights arriving; evaluations have it to themselves, with exactly the weights that they name.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from actors.chat import Chat
from actors.demonstrate import demonstrate_group
from actors.engines.base import Engine
from actors.engines.load import load_engine
from actors.envs.base import EnvironmentFailure
from actors.rollout import Progress, Setting, run_group
from actors.turns import FORMATS
from evolver_async import messages, policy
from evolver_async.config import Config
from evolver_async.config.check import ConfigError
from evolver_async.config.load import from_dict, stage_config
from evolver_async.launch.roles import RoleArgs, collect_rarely
from evolver_async.schema import Ticket, Trajectory, WeightId, key
from evolver_async.transport import Client, DealerClient, Rejected
from evolver_async.weights.base import Receiver, WeightsGone
from evolver_async.weights.shm import ShmReceiver
from evolver_async.wire import SCHEMA_HASH

log = logging.getLogger(__name__)

Place = tuple[int, int]  # group and attempt of a ticket

RELEASE_TIMEOUT_S = 5.0  # a buffer that does not answer will find the lease expired


class WeightsLate(Exception):
    """The weights that a ticket asks for did not arrive in time."""


class Worker:
    """One actor: an engine, and the groups that are being run on it."""

    def __init__(
        self,
        config: Config,
        client: Client,
        receiver: Receiver,
        engine: Engine,
        chat: Chat,
        name: str,
        incarnation: int,
    ) -> None:
        self.config = config
        self.settings = [
            setting_of(stage_config(config, index), chat, name, incarnation)
            for index in range(len(config.stages))
        ]
        self.client = client
        self.receiver = receiver
        self.engine = engine
        self.name = name
        self.running: dict[Place, tuple[Ticket, Progress, asyncio.Task[None]]] = {}
        self.fenced: set[Place] = set()
        self.oldest: WeightId | None = None  # the newest of the oldest weights that tickets allow
        self.failure: BaseException | None = None  # of a ticket, for `run` to raise
        self.failed = asyncio.Event()
        self.turnover = asyncio.Condition()  # notified whenever a ticket ends
        self.adopting = asyncio.Lock()
        self.rollouts = 0  # tickets that share the engine
        self.evaluations = 0  # tickets that want it, or have it, to themselves
        self.pinned: WeightId | None = None
        self.pins = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` is set; gives back what is not finished.

        What one of the loops or a ticket raises ends the work and is raised here.
        """
        loops = [asyncio.create_task(loop()) for loop in (self.lease, self.renew, self.follow)]
        ends = [asyncio.create_task(event.wait()) for event in (self.stop, self.failed)]
        try:
            await asyncio.wait([*loops, *ends], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
            if self.failure is not None:
                raise self.failure
        finally:
            for task in (*loops, *ends):
                task.cancel()
            await self.drain()
            await self.leave()
            await self.engine.close()
            self.receiver.close()

    async def lease(self) -> None:
        """Keep as many groups running as the configuration allows."""
        while True:
            async with self.turnover:
                await self.turnover.wait_for(lambda: self.free() > 0)
            reply = await self.client.request(
                messages.Lease(
                    credit=self.free(),
                    weights=self.engine.weights,
                    generated=self.generated(),
                )
            )
            if isinstance(reply, messages.Wait):
                log.info("no ticket: %s", reply.reason)
                continue
            for ticket in reply.tickets:
                self.start(ticket)

    def start(self, ticket: Ticket) -> None:
        """Run a ticket in a task of its own."""
        for place in [place for place in self.running if place[0] == ticket.group_id]:
            self.fence(place, "granted anew")
        if ticket.kind == "rollout" and ticket.weights is not None:
            self.oldest = max(ticket.weights, self.oldest or ticket.weights)
        progress = Progress()
        task = asyncio.create_task(self.work(ticket, progress), name=f"g{ticket.group_id}")
        task.add_done_callback(self.ended)
        self.running[_place(ticket)] = (ticket, progress, task)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Keep the first error that a ticket ends with; nobody awaits its task."""
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            self.failed.set()

    def fence(self, place: Place, reason: str) -> None:
        """End a ticket that the buffer counts as lost; nothing of it is given back."""
        log.warning("group %d, attempt %d is fenced: %s", *place, reason)
        self.fenced.add(place)
        self.running[place][2].cancel()

    def generated(self) -> int:
        """ACTION tokens sampled by this process."""
        return int(self.engine.stats()["generated"])

    def free(self) -> int:
        """Groups of the usual size that still fit."""
        size = self.config.rollout.group_size
        members = sum(len(ticket.members) for ticket, _, _ in self.running.values())
        return self.config.actors.groups - -(-members // size)

    async def renew(self) -> None:
        """Show progress, so that the leases last; drop what the buffer has given to another."""
        while True:
            await asyncio.sleep(self.config.buffer.lease_s / 4)
            if not self.running:
                continue
            shown = {place: done.count for place, (_, done, _) in self.running.items()}
            progress = {group: count for (group, _), count in shown.items()}
            reply = await self.client.request(messages.Renew(progress=progress))
            if isinstance(reply, messages.Fenced):
                for place in self.running.keys() & shown.keys():  # not what was granted meanwhile
                    if place[0] in reply.groups:
                        self.fence(place, reply.reason)

    async def follow(self) -> None:
        """Adopt new weights soon after they appear, whatever is being generated."""
        while True:
            await self.adopt()
            await asyncio.sleep(self.config.actors.poll_s)

    async def adopt(self) -> None:
        """Hold what the configuration asks for: the pinned weights, or the head less the lag."""
        async with self.adopting:
            target = self.target()
            if target is None or target == self.engine.weights:
                return
            try:
                tensors = self.receiver.fetch(target)
            except WeightsGone:
                return  # a newer head has replaced them; the next look finds it
            await self.engine.update(target, tensors)

    def target(self) -> WeightId | None:
        """The weights to hold; None where there are none that are new enough for the tickets."""
        if self.pinned is not None:
            return self.pinned
        head = self.receiver.head()
        if head is None:
            return None
        high = self.config.actors.weight_lag
        low = self.config.actors.weight_lag_low
        lag = high
        if low >= 0:
            lag = low + key(self.config.run.seed, "lag", self.name, str(head)) % (high - low + 1)
        wanted = WeightId(lineage=head.lineage, step=max(0, head.step - lag))
        if wanted == head:
            return head
        # After a resume the lineage begins at its checkpoint's step: nothing older exists in it.
        oldest = max(wanted, self.oldest or wanted)
        return min((w for w in self.receiver.available() if oldest <= w <= head), default=None)

    async def work(self, ticket: Ticket, progress: Progress) -> None:
        """Run one ticket to its end; whatever is left of it then is given back, with the reason."""
        missing = set(ticket.members)

        async def hand_in(trajectory: Trajectory) -> None:
            await self.client.request(messages.Push(trajectory=trajectory))
            missing.discard(trajectory.member)

        reason = "drain"
        try:
            async with self.weights_for(ticket):
                await self.roll_out(ticket, progress, hand_in)
        except Exception as error:
            reason = self.reason_of(error, ticket)
            if reason == "error":
                raise
        finally:
            self.running.pop(_place(ticket), None)
            if missing and _place(ticket) not in self.fenced:
                await self.give_back(ticket.group_id, sorted(missing), reason)
            self.fenced.discard(_place(ticket))
            async with self.turnover:
                self.turnover.notify_all()

    def reason_of(self, error: Exception, ticket: Ticket) -> str:
        """The reason to release a ticket with; "error" for what no ticket should meet."""
        match error:
            case WeightsLate():
                log.warning("group %d: weights %s did not come", ticket.group_id, ticket.weights)
                return "weights"
            case EnvironmentFailure():
                log.warning("group %d: %s", ticket.group_id, error)
                return "environment"
        return "error"

    async def give_back(self, group_id: int, members: list[int], reason: str) -> None:
        release = messages.Release(group_id=group_id, members=members, reason=reason)
        try:
            await self.client.request(release, timeout_s=RELEASE_TIMEOUT_S)
        except TimeoutError as error:
            log.warning("group %d is left to its lease: %s", group_id, error)

    async def roll_out(
        self,
        ticket: Ticket,
        progress: Progress,
        hand_in: Callable[[Trajectory], Awaitable[None]],
    ) -> None:
        """The episodes of a ticket, by script or by the engine."""
        setting = self.settings[ticket.stage]
        if ticket.kind == "demo":
            expert = self.config.stages[ticket.stage].expert_fraction
            await demonstrate_group(ticket, setting, expert, progress, hand_in)
        else:
            await run_group(ticket, setting, self.engine, progress, hand_in)

    @contextlib.asynccontextmanager
    async def weights_for(self, ticket: Ticket) -> AsyncIterator[None]:
        """Hold the engine with weights that the ticket allows.

        Rollouts share it. Evaluations wait until no rollout runs, pin their weights and keep new
        rollouts out, so that nothing is sampled by weights that were not asked for.
        """
        if ticket.kind == "demo":
            yield
            return
        if ticket.kind == "eval":
            self.evaluations += 1
            try:
                await self.until(
                    lambda: not self.rollouts and self.pinned in (None, ticket.weights)
                )
                self.pinned = ticket.weights
                self.pins += 1
                try:
                    await self.weights_arrive(lambda held: held == ticket.weights)
                    yield
                finally:
                    self.pins -= 1
                    if not self.pins:
                        self.pinned = None
            finally:
                self.evaluations -= 1
            return
        await self.until(lambda: not self.evaluations)
        self.rollouts += 1
        try:
            await self.weights_arrive(lambda held: ticket.weights is None or held >= ticket.weights)
            yield
        finally:
            self.rollouts -= 1

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; it may change whenever a ticket ends."""
        async with self.turnover:
            await self.turnover.wait_for(condition)

    async def weights_arrive(self, allowed: Callable[[WeightId], bool]) -> None:
        """Wait until the engine holds allowed weights; WeightsLate after the configured time."""
        deadline = asyncio.get_running_loop().time() + self.config.actors.weights_timeout_s
        while True:
            await self.adopt()
            if self.engine.weights is not None and allowed(self.engine.weights):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise WeightsLate
            await asyncio.sleep(self.config.actors.poll_s)

    async def drain(self) -> None:
        """Give back everything that is running."""
        tasks = [task for _, _, task in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Ask for nothing any more: a LEASE that is still parked is not granted after this."""
        try:
            await self.client.request(
                messages.Lease(credit=0, weights=None, generated=self.generated()),
                timeout_s=RELEASE_TIMEOUT_S,
            )
        except (TimeoutError, Rejected) as error:
            log.warning("left without a word: %s", error)


def _place(ticket: Ticket) -> Place:
    return ticket.group_id, ticket.attempt


def setting_of(config: Config, chat: Chat, name: str, incarnation: int) -> Setting:
    """What the episodes of one stage share."""
    rollout, env = config.rollout, config.env
    return Setting(
        chat=chat,
        format=FORMATS[rollout.format](
            think=rollout.think, actions_per_turn=rollout.actions_per_turn
        ),
        actor=name,
        incarnation=incarnation,
        seed=config.run.seed,
        max_turns=rollout.max_turns,
        max_length=config.policy.max_length,
        format_penalty=rollout.format_penalty,
        step_timeout_s=env.step_timeout_s,
        episode_timeout_s=env.episode_timeout_s,
        latency=env.latency.kind,
        latency_median_s=env.latency.median_s,
        latency_sigma=env.latency.sigma,
    )


def build(
    config: Config, client: Client, weights_address: str, name: str, incarnation: int
) -> Worker:
    """A worker for any launcher. Its engine begins without weights: the first head brings them."""
    engine, chat = load_engine(config)
    receiver = ShmReceiver(weights_address)
    return Worker(config, client, receiver, engine, chat, name, incarnation)


async def serve(args: RoleArgs) -> None:
    """Join the run at `args.address`, learn everything else from it, work until told to stop."""
    try:
        client = DealerClient(args.address, "", args.name, args.incarnation)
    except ValueError as error:
        raise ConfigError(f"--connect: {error}") from None
    try:
        welcome = await client.request(messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
        config = from_dict(welcome.config)
        tokenizer = policy.tokenizer_hash(config.policy.path)
        await client.request(
            messages.Hello(role="actor", schema_hash=SCHEMA_HASH, tokenizer=tokenizer)
        )
        worker = build(config, client, welcome.weights_address, args.name, args.incarnation)
        collect_rarely()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop.set)
        await worker.run()
    finally:
        client.close()


def main(args: RoleArgs) -> int:
    """Role `actor`."""
    asyncio.run(serve(args))
    return 0
