"""Rollout process: follows the weights, leases tickets, runs their groups, delivers the results.

Small loops on one asyncio loop. A ticket is run to its end or released with a reason; a finished
trajectory is kept until the buffer has stored it, also during the drain. `engines/weight_sync.py`
decides which weights the engine holds.
"""

import asyncio
import contextlib
import logging

from actors.backoff import FailureBackoff
from actors.engines.engine import Engine
from actors.engines.weight_sync import WeightSync
from actors.envs.tool_server import close_tool_servers
from actors.formats.chat import Chat
from actors.lease_request import ActorReplaced, LeaseRequest
from actors.postprocess import (
    ActorComponents,
    Outbox,
    TicketPostprocessing,
    release_reason,
)
from actors.reporter import Reporter
from actors.rollout.environment import abandoned_closed
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Deliver, Finished
from actors.rollout.group import run_group
from actors.scripted.branching import branch_group
from actors.scripted.demonstrations import demonstrate_group
from actors.scripted.recorded import ConversationRenderer, deliver_row
from actors.ticket_progress import TicketProgress, renewal
from actors.weights.arrival import ArrivalCheck
from actors.weights.source import VersionSource
from evolver_async.config import Config
from evolver_async.config.load import concurrent_members, stage_config
from evolver_async.errors import Unrecoverable
from evolver_async.metrics.activity import ACTOR_LEVELS, ActivityClock, wall_clock
from evolver_async.schema import Ticket
from evolver_async.wire import messages
from evolver_async.wire.client import Client, Rejected

log = logging.getLogger(__name__)

OFFERED = 16  # tasks in one message
TicketId = tuple[int, int]  # group and attempt of a ticket


class Worker:
    """One actor: an engine and the groups that run on it."""

    def __init__(
        self,
        config: Config,
        client: Client,
        source: VersionSource,
        engine: Engine,
        chat: Chat,
        name: str,
        incarnation: int,
        components: ActorComponents | None = None,
    ) -> None:
        self.config = config
        self.components = components or ActorComponents()
        stages = [stage_config(config, index) for index in range(len(config.stages))]
        failures = self.components.failures
        shared = name, incarnation, failures, self.components.idle
        self.settings = [setting_of(stage, chat, *shared) for stage in stages]
        self.renderers = [
            ConversationRenderer(chat, one) if one.data.path else None for one in stages
        ]
        self.sizes = [stage.rollout.group_size for stage in stages]
        self.capacities = concurrent_members(config)
        self.stage = 0  # in training: the stage of the newest ticket that is of no evaluation
        self.client = client
        self.source = source
        self.engine = engine
        self.name = name
        self.arrival = ArrivalCheck(engine, config.policy.decided_dtype, failures.noted)
        self.reporter = Reporter(client, engine, self.components, self.arrival)
        self.clock = ActivityClock(ACTOR_LEVELS, busy=lambda: engine.stats()["busy_s"])
        ends, identity = (source, engine, self.arrival), (config.run.seed, name)
        self.adoption = WeightSync(*ends, config.actors, *identity, self.clock, failures)
        self.tickets = LeaseRequest(client, self.adoption, self.clock, config.actors.poll_s)
        self.turnover = self.adoption.turnover  # notified whenever a ticket ends
        self.running: dict[TicketId, tuple[Ticket, TicketProgress, asyncio.Task[None]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # of these and of those being released
        self.fenced: set[TicketId] = set()
        self.releasing: set[int] = set()  # groups whose RELEASE has no reply yet
        self.failure: BaseException | None = None  # of a ticket, for `run` to raise
        self.failed = asyncio.Event()
        self.backoff = FailureBackoff(config.actors.groups)
        # After a longer silence of the buffer the leases expire; shutdown takes three such waits.
        self.reply_timeout_s = config.launch.drain_s / 4
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` is set, then release unfinished tickets.

        An error of a loop or a ticket ends the work and is raised here.
        """
        self.clock.begin(wall_clock())
        loops = [
            asyncio.create_task(loop())
            for loop in (
                self.lease,
                self.renew,
                self.tickets.announce,
                self.reporter.run,
                self.adoption.follow,
            )
        ]
        ends = [asyncio.create_task(event.wait()) for event in (self.stop, self.failed)]
        try:
            await asyncio.wait([*loops, *ends], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
            if self.failure is not None:
                raise _final(self.failure)
        finally:
            for task in (*loops, *ends):
                task.cancel()
            await self.drain()
            self.components.idle.close()
            await asyncio.gather(self.leave(), abandoned_closed(self.reply_timeout_s))
            await close_tool_servers()
            await self.components.close()
            await self.adoption.close()
            await self.engine.close()
            await self.source.close()

    async def lease(self) -> None:
        """Keep as many members running as the configuration allows.

        Ask only if a whole group fits: the credit of a parked LEASE does not grow.
        """
        log.info("the engine is ready, asking for tickets")
        first = True
        while True:
            async with self.turnover:
                await self.turnover.wait_for(lambda: self.free() >= self.sizes[self.stage])
            groups = {group for group, _ in self.running} | self.releasing
            reply = await self.tickets.send(self.free(), groups, self.reporter.generated())
            if isinstance(reply, messages.Wait):
                log.info("no ticket: %s", reply.reason)
                continue
            for ticket in reply.tickets:
                if first:
                    log.info("first ticket: group %d", ticket.group_id)
                    first = False
                self.start(ticket)

    def start(self, ticket: Ticket) -> None:
        """Run a ticket in a task of its own."""
        for running in [one for one in self.running if one[0] == ticket.group_id]:
            self.fence(running, "granted anew")
        if ticket.kind != "eval":
            self.stage = ticket.stage
        self.adoption.expect(ticket)
        progress = TicketProgress(clock=self.clock)
        task = asyncio.create_task(self.work(ticket, progress), name=f"g{ticket.group_id}")
        self.tasks.add(task)
        task.add_done_callback(self.ended)
        self.running[_id(ticket)] = (ticket, progress, task)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Keep the first error of a ticket; nothing awaits its task."""
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            self.failed.set()

    def fence(self, ticket_id: TicketId, reason: str) -> None:
        """Cancel a ticket that the buffer counts as lost; nothing of it is released."""
        if ticket_id in self.fenced:
            return
        log.warning("group %d, attempt %d is fenced: %s", *ticket_id, reason)
        self.fenced.add(ticket_id)
        self.running[ticket_id][2].cancel()

    def free(self) -> int:
        """Count the members that fit beside the running episodes: the credit."""
        running = self.running.values()
        members = sum(len(ticket.members) - progress.played for ticket, progress, _ in running)
        return self.capacities[self.stage] - members - self.backoff.held

    async def renew(self) -> None:
        """Report progress to renew the leases; cancel tickets that the buffer has regranted."""
        while True:
            # Two of these can be late before a lease ends or a stall is reported.
            await asyncio.sleep(min(self.config.buffer.lease_s, self.config.buffer.warn_s) / 4)
            await self.reporter.send(None)
            if not self.running:
                continue
            reported = set(self.running)
            progresses = {one[0]: progress for one, (_, progress, _) in self.running.items()}
            known = *self.adoption.seen, self.clock, self.tickets.launch
            work = self.worked()
            reply = await self.client.request(renewal(progresses, work, *known))
            if isinstance(reply, messages.Fenced):
                if not reply.groups:
                    raise ActorReplaced(reply.reason)
                for ticket_id in self.running.keys() & reported:  # not tickets granted meanwhile
                    if ticket_id[0] in reply.groups:
                        self.fence(ticket_id, reply.reason)

    def worked(self) -> int:
        """Count what all tickets share: tokens of the engine, seconds of agents between calls."""
        stats = self.engine.stats()
        tokens = stats.get("generated", 0) + stats.get("prefilled", 0)
        return int(tokens + self.components.worked_s())

    def beat(self) -> messages.Beat:
        """Report the actor's progress; called by another thread than the loop's."""
        stats, running = self.engine.stats(), list(self.running.values())
        tokens = stats.get("generated", 0) + stats.get("prefilled", 0)
        count = int(tokens) + self.clock.changes + sum(progress.count for _, progress, _ in running)
        return messages.Beat(role="actor", phase=self.clock.activity, count=count)

    async def work(self, ticket: Ticket, progress: TicketProgress) -> None:
        """Run one ticket to its end; release undelivered members with the reason."""
        outbox = Outbox(self.client, self.clock, ticket, self.components.failures)
        reason = "drain"
        try:
            if ticket.kind == "explore":
                await self.explore(ticket, progress, outbox)
            else:
                await self.play(ticket, progress, outbox)
        except Exception as error:
            reason = release_reason(error, ticket)
            if reason == "error":
                raise
        finally:
            # Delivery comes first: what is released is granted again and played by another actor.
            await outbox.settle(self.reply_timeout_s)
            self.running.pop(_id(ticket), None)
            if outbox.missing and _id(ticket) not in self.fenced:
                await self.release(ticket.group_id, outbox.missing, reason)
            self.fenced.discard(_id(ticket))
            failed = reason in messages.LOSING and not outbox.delivered
            await self.backoff.after(len(ticket.members), failed)
            self.reporter.ended.set()
            await self.notify()

    async def play(self, ticket: Ticket, progress: TicketProgress, outbox: Outbox) -> None:
        """Run a ticket's episodes and their postprocessing; an error loses no finished episode."""
        setting = self.settings[ticket.stage]
        postprocessing = TicketPostprocessing(ticket, setting, progress, outbox, self.components)
        try:
            async with self.adoption.weights_for(ticket, progress):
                await self.roll_out(ticket, progress, postprocessing.begin)
            postprocessing.note_unread(self.config.rollout.agent)
        except asyncio.CancelledError:
            postprocessing.cancel()
            raise
        finally:
            try:
                await self.notify()
            finally:
                await postprocessing.settle()

    async def explore(self, ticket: Ticket, progress: TicketProgress, outbox: Outbox) -> None:
        """Run episodes without a task, offer the tasks made of them, then deliver the episodes.

        In this order the ticket's lease is renewed until its tasks are in the pool.
        """
        questioner, finished = self.components.questioner, list[Finished]()
        assert questioner is not None, "exploration is granted only with a questioning.kind"
        setting = self.settings[ticket.stage]
        engine = self.adoption.weights_for(ticket, progress)
        if self.config.questioning.kind == "llm":
            engine = contextlib.nullcontext()  # unused: no evaluation waits for an endpoint
        try:
            async with engine:
                await questioner.explore(ticket, setting, self.engine, progress, finished.append)
            await self.notify()
            tasks = await questioner.questions(ticket, finished, progress)
            for start in range(0, len(tasks), OFFERED):
                await self.client.request(messages.Offer(tasks=tasks[start : start + OFFERED]))
        finally:
            sending = [outbox.send(one.trajectory) for one in finished]
        await asyncio.gather(*map(asyncio.shield, sending))

    async def notify(self) -> None:
        """Wake the lease loop: capacity may be free."""
        async with self.turnover:
            self.turnover.notify_all()

    async def release(self, group_id: int, members: list[int], reason: str) -> None:
        """Release members of a group; without a reply in time their lease expires by itself."""
        release = messages.Release(group_id=group_id, members=members, reason=reason)
        self.releasing.add(group_id)
        try:
            await self.client.request(release, timeout_s=self.reply_timeout_s)
        except TimeoutError as error:
            log.warning("could not release group %d, its lease will end: %s", group_id, error)
        finally:
            self.releasing.discard(group_id)

    async def roll_out(self, ticket: Ticket, progress: TicketProgress, deliver: Deliver) -> None:
        """Run a ticket's episodes by script, by an agent or by the engine."""
        setting, stage = self.settings[ticket.stage], self.config.stages[ticket.stage]
        renderer = self.renderers[ticket.stage]
        if ticket.kind == "demo" and renderer is not None and ticket.task.origin == "recorded":
            deliver_row(ticket, setting, renderer, stage.kind, progress, deliver)
        elif ticket.kind == "demo":
            await demonstrate_group(ticket, setting, stage.expert_fraction, progress, deliver)
        elif ticket.kind == "branch":
            reflector = self.components.reflector
            await branch_group(ticket, setting, stage, progress, deliver, reflector)
        elif self.components.agents is not None:
            await self.components.agents.run(ticket, setting, progress, deliver)
        else:
            guide = self.components.guide
            await run_group(ticket, setting, self.engine, progress, deliver, guide)

    async def drain(self) -> None:
        """Cancel all running tickets: finished episodes are delivered, the others released."""
        for _, _, task in self.running.values():
            if not task.cancelling():  # otherwise it is being released already
                task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Ask for no more tickets: a LEASE that is still parked is not granted after this."""
        try:
            await self.reporter.send(self.reply_timeout_s)
            last = messages.Lease(credit=0, generated=self.reporter.generated())
            await self.client.request(last, timeout_s=self.reply_timeout_s)
        except (TimeoutError, Rejected) as error:
            log.warning("could not tell the buffer that this actor is leaving: %s", error)


def _final(error: BaseException) -> BaseException:
    """Return the error that no restart would mend, of a group that holds one, or else `error`."""
    found = error.subgroup(Unrecoverable) if isinstance(error, BaseExceptionGroup) else None
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found or error


def _id(ticket: Ticket) -> TicketId:
    return ticket.group_id, ticket.attempt
