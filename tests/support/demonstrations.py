"""Scripted episodes as tests want them."""

import asyncio

from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.scripted.demonstrations import demonstrate_group
from actors.ticket_progress import TicketProgress
from evolver_async.schema import Ticket, Trajectory


def demonstrated(ticket: Ticket, setting: Setting, expert_fraction: float) -> list[Trajectory]:
    done: list[Trajectory] = []

    def deliver(finished: Finished) -> None:
        done.append(finished.trajectory)

    asyncio.run(demonstrate_group(ticket, setting, expert_fraction, TicketProgress(), deliver))
    return sorted(done, key=lambda trajectory: trajectory.member)
