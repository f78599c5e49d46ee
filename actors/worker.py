"""The rollout process: follows the weights, leases tickets, runs their groups, hands them in.

Small loops on one asyncio loop. A ticket is run to its end or given back with the reason; a
finished trajectory is kept until the buffer has it on disk, also while the actor drains. Which
weights the engine holds is the matter of `adoption`.
"""

import asyncio
import contextlib
import logging
from collections import Counter

from actors.endpoint.runner import JudgementMissing
from actors.engines.base import Engine
from actors.engines.weight_sync import WeightsLate, WeightSync
from actors.envs.adapters import service_client
from actors.envs.base import EnvironmentFailure
from actors.failures import unread
from actors.formats.chat import Chat
from actors.formats.turns import FORMATS
from actors.outbox import Outbox
from actors.postprocess import Aftermath, Mechanisms, Ungraded
from actors.progress import Progress
from actors.rollout.episode import Deliver, EpisodeLate, Finished
from actors.rollout.episode_config import setting_of
from actors.rollout.group import run_group
from actors.scripted.branching import branch_group
from actors.scripted.expert import demonstrate_group
from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.protocol import messages
from evolver_async.schema import Ticket
from evolver_async.transport.sockets import Client, Rejected
from evolver_async.weights.channel.base import Receiver

log = logging.getLogger(__name__)

OFFERED = 16  # tasks in one message
REPORT_S = 1.0  # between two reports of failures
REST_S = 1.0  # in which a room stays empty while nothing but failures comes of it
Place = tuple[int, int]  # group and attempt of a ticket


class Displaced(RuntimeError):
    """Another process has the name of this actor; says which."""


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
        mechanisms: Mechanisms | None = None,
    ) -> None:
        self.config = config
        self.mechanisms = mechanisms or Mechanisms()
        self.failures = self.mechanisms.failures
        stages = [stage_config(config, index) for index in range(len(config.stages))]
        self.settings = [
            setting_of(stage, chat, name, incarnation, self.failures) for stage in stages
        ]
        self.sizes = [stage.rollout.group_size for stage in stages]
        self.size = self.sizes[0]  # members of a group of the stage that is trained now
        # Members at a time. One group of any stage fits, else that stage could not be played.
        self.capacity = max(config.actors.groups * config.rollout.group_size, *self.sizes)
        self.client = client
        self.receiver = receiver
        self.engine = engine
        self.name = name
        self.adoption = WeightSync(receiver, engine, config.actors, config.run.seed, name)
        self.turnover = self.adoption.turnover  # notified whenever a ticket ends
        self.running: dict[Place, tuple[Ticket, Progress, asyncio.Task[None]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # of these, and of those being given back
        self.fenced: set[Place] = set()
        self.failure: BaseException | None = None  # of a ticket, for `run` to raise
        self.failed = asyncio.Event()
        self.lost = 0  # tickets in a row that failed with nothing to hand in
        self.resting = 0  # their members, whose room stays empty for a while
        self.sampled = 0  # ACTION tokens, as last told
        self.troubles: Counter[str] = Counter()  # with environment services
        # A buffer that is silent for longer finds the leases expired; leaving takes three such.
        self.patience_s = config.launch.drain_s / 4
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` is set; gives back what is not finished.

        What one of the loops or a ticket raises ends the work and is raised here.
        """
        loops = [
            asyncio.create_task(loop())
            for loop in (self.lease, self.renew, self.report, self.adoption.follow)
        ]
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
            await self.mechanisms.close()
            await self.adoption.close()
            await self.engine.close()
            self.receiver.close()

    async def lease(self) -> None:
        """Keep as many members running as the configuration allows.

        Ask only where a whole group fits: the credit of a parked LEASE does not grow.
        """
        while True:
            async with self.turnover:
                await self.turnover.wait_for(lambda: self.free() >= self.size)
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
            if isinstance(reply, messages.Fenced):
                raise Displaced(reply.reason)
            for ticket in reply.tickets:
                self.start(ticket)

    def start(self, ticket: Ticket) -> None:
        """Run a ticket in a task of its own."""
        for place in [place for place in self.running if place[0] == ticket.group_id]:
            self.fence(place, "granted anew")
        if ticket.kind != "eval":
            self.size = self.sizes[ticket.stage]
        self.adoption.expect(ticket)
        progress = Progress()
        task = asyncio.create_task(self.work(ticket, progress), name=f"g{ticket.group_id}")
        self.tasks.add(task)
        task.add_done_callback(self.ended)
        self.running[_place(ticket)] = (ticket, progress, task)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Keep the first error that a ticket ends with; nobody awaits its task."""
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            self.failed.set()

    def fence(self, place: Place, reason: str) -> None:
        """End a ticket that the buffer counts as lost; nothing of it is given back."""
        if place in self.fenced:
            return
        log.warning("group %d, attempt %d is fenced: %s", *place, reason)
        self.fenced.add(place)
        self.running[place][2].cancel()

    def generated(self) -> int:
        """ACTION tokens sampled by this process; a judge's words are none once they are complete.

        Never falls, which would look like a new process.
        """
        judge = self.mechanisms.judge
        sampled = int(self.engine.stats()["generated"]) - (judge.generated if judge else 0)
        self.sampled = max(self.sampled, sampled)
        return self.sampled

    def free(self) -> int:
        """Members that still fit beside the episodes that are being played: the credit."""
        members = sum(
            len(ticket.members) - progress.played for ticket, progress, _ in self.running.values()
        )
        return self.capacity - members - self.resting

    async def renew(self) -> None:
        """Show progress, so that the leases last; drop what the buffer has given to another."""
        buffer = self.config.buffer
        while True:
            await asyncio.sleep(min(buffer.lease_s, buffer.warn_s) / 4)
            await self.tell(None)
            if not self.running:
                continue
            shown = set(self.running)
            reply = await self.client.request(self.shown())
            if isinstance(reply, messages.Fenced):
                if not reply.groups:
                    raise Displaced(reply.reason)
                for place in self.running.keys() & shown:  # not what was granted meanwhile
                    if place[0] in reply.groups:
                        self.fence(place, reply.reason)

    async def report(self) -> None:
        """Tell of failures as they come, but not more often than every REPORT_S."""
        while True:
            await self.failures.noted.wait()
            await self.tell(None)
            await asyncio.sleep(REPORT_S)

    async def tell(self, within_s: float | None) -> None:
        """Send what judge, guide, questioner and environment services count, and all failures."""
        self.failures.noted.clear()
        self.troubles.update(service_client.drain())
        counted = self.mechanisms.counters() | self.troubles
        failures = self.failures.totals()
        if counted or failures:
            told = messages.Counters(values=counted, failures=failures)
            await self.client.request(told, timeout_s=within_s)

    def shown(self) -> messages.Renew:
        """How far every ticket has come, and what holds it up."""
        done = {place[0]: progress for place, (_, progress, _) in self.running.items()}
        everything = sum(progress.count for progress in done.values())
        slowest = {group: progress.slowest() for group, progress in done.items()}
        return messages.Renew(
            progress={g: everything if p.queued else p.count for g, p in done.items()},
            doing={group: words for group, (words, _) in slowest.items()},
            still_s={group: seconds for group, (_, seconds) in slowest.items()},
            weights=self.engine.weights,
        )

    async def work(self, ticket: Ticket, progress: Progress) -> None:
        """Run one ticket to its end; whatever is left of it then is given back, with the reason."""
        outbox = Outbox(self.client)
        reason = "drain"
        try:
            if ticket.kind == "explore":
                await self.explore(ticket, progress, outbox)
            else:
                await self.play(ticket, progress, outbox)
        except Exception as error:
            reason = self.reason_of(error, ticket)
            if reason == "error":
                raise
        finally:
            await outbox.settle(self.patience_s)
            self.running.pop(_place(ticket), None)
            missing = sorted(set(ticket.members) - outbox.delivered)
            if missing and _place(ticket) not in self.fenced:
                await self.give_back(ticket.group_id, missing, reason)
            self.fenced.discard(_place(ticket))
            await self.rest(ticket, reason in messages.LOSING and not outbox.delivered)
            await self.has_room()

    async def rest(self, ticket: Ticket, lost: bool) -> None:
        """Leave a ticket's room empty for REST_S where as many tickets in a row failed as run at
        once: what fails at once would be tried, journalled and logged thousands of times."""
        self.lost = self.lost + 1 if lost else 0
        if self.lost < self.config.actors.groups:
            return
        self.resting += len(ticket.members)
        try:
            await asyncio.sleep(REST_S)
        finally:
            self.resting -= len(ticket.members)

    async def play(self, ticket: Ticket, progress: Progress, outbox: Outbox) -> None:
        """The episodes of a ticket and what comes after each; whatever goes wrong, of those that
        are over nothing is lost."""
        aftermath = Aftermath(ticket, progress, outbox, self.mechanisms)
        try:
            async with self.adoption.weights_for(ticket, progress):
                await self.roll_out(ticket, progress, aftermath.begin)
            self.look_at(ticket, aftermath.begun)
        except asyncio.CancelledError:
            aftermath.cancel()
            raise
        finally:
            try:
                await self.has_room()
            finally:
                await aftermath.settle()

    def look_at(self, ticket: Ticket, finished: list[Finished]) -> None:
        """Count a group of which no turn could be read; single members may well be like that."""
        if ticket.kind != "rollout" or (len(finished) == 1 and ticket.attempt > 0):
            return
        setting = self.settings[ticket.stage]
        if error := unread([one.trajectory for one in finished], setting.chat):
            log.warning("group %d: %s", ticket.group_id, error)
            styles = (name for name, kind in FORMATS.items() if isinstance(setting.format, kind))
            agent = self.config.rollout.agent
            name = f"rollout.agent={agent}" if agent else f"rollout.format={next(styles)}"
            self.failures.note("policy", name, error)

    async def explore(self, ticket: Ticket, progress: Progress, outbox: Outbox) -> None:
        """Episodes without a task, then the tasks that they suggest, then the episodes are handed
        in: so the ticket is under way, and its lease renewed, until its tasks are in the pool."""
        questioner, finished = self.mechanisms.questioner, list[Finished]()
        assert questioner is not None, "exploration is granted where questioning.kind is not none"
        setting = self.settings[ticket.stage]
        engine = self.adoption.weights_for(ticket, progress)
        if self.config.questioning.kind == "llm":
            engine = contextlib.nullcontext()  # not needed: no evaluation waits for an endpoint
        try:
            async with engine:
                await questioner.explore(ticket, setting, self.engine, progress, finished.append)
            await self.has_room()
            tasks = await questioner.questions(ticket, finished, progress)
            for start in range(0, len(tasks), OFFERED):
                await self.client.request(messages.Offer(tasks=tasks[start : start + OFFERED]))
        finally:
            sending = [outbox.send(one.trajectory) for one in finished]
        await asyncio.gather(*map(asyncio.shield, sending))

    async def has_room(self) -> None:
        """Say that there may be room for other groups."""
        async with self.turnover:
            self.turnover.notify_all()

    def reason_of(self, error: Exception, ticket: Ticket) -> str:
        """The reason to release a ticket with; "error" for what no ticket should meet."""
        match error:
            case WeightsLate():
                log.warning("group %d: weights %s did not come", ticket.group_id, ticket.weights)
                return "weights"
            case EnvironmentFailure():
                return "environment"
            case EpisodeLate():
                return "engine"
            case Ungraded() | JudgementMissing():
                return "grade"
        return "error"

    async def give_back(self, group_id: int, members: list[int], reason: str) -> None:
        release = messages.Release(group_id=group_id, members=members, reason=reason)
        try:
            await self.client.request(release, timeout_s=self.patience_s)
        except TimeoutError as error:
            log.warning("group %d is left to its lease: %s", group_id, error)

    async def roll_out(self, ticket: Ticket, progress: Progress, deliver: Deliver) -> None:
        """The episodes of a ticket, by script or by the engine."""
        setting = self.settings[ticket.stage]
        stage = self.config.stages[ticket.stage]
        if ticket.kind == "demo":
            await demonstrate_group(ticket, setting, stage.expert_fraction, progress, deliver)
        elif ticket.kind == "branch":
            reflector = self.mechanisms.reflector
            await branch_group(ticket, setting, stage, progress, deliver, reflector)
        elif self.mechanisms.agents is not None:
            await self.mechanisms.agents.run(ticket, setting, progress, deliver)
        else:
            guide = self.mechanisms.guide
            await run_group(ticket, setting, self.engine, progress, deliver, guide)

    async def drain(self) -> None:
        """Give back everything that is running; what is finished of it is handed in before."""
        for _, _, task in self.running.values():
            if not task.cancelling():  # else it is being given back already
                task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Ask for nothing any more: a LEASE that is still parked is not granted after this."""
        try:
            await self.tell(self.patience_s)
            await self.client.request(
                messages.Lease(credit=0, generated=self.generated()),
                timeout_s=self.patience_s,
            )
        except (TimeoutError, Rejected) as error:
            log.warning("left without a word: %s", error)


def _place(ticket: Ticket) -> Place:
    return ticket.group_id, ticket.attempt
