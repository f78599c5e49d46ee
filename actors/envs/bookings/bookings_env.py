"""Booking environment: one booking by tool calls, in a convention that the service does not state.

Each service writes customers, dates and durations in ways of its own, the same in all tasks. A call
in another convention is refused without a reason, so that what is learned about a service in one
task helps in all others about it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from actors.envs.base import Env
from actors.envs.bookings.services import (
    CONVENTIONS,
    CUSTOMER_WAYS,
    DATE_WAYS,
    DURATION_WAYS,
    OFFERS,
    BookingCall,
    Convention,
    accepted,
    convention_of,
    draw_request,
    written,
)
from actors.formats.tool_calls import ToolInvocation, called, canonical
from evolver_async.env import Exact, Info, Step
from evolver_async.schema import Task

LIST, LOOK_UP, BOOK = "list_services", "look_up", "book"
INSTRUCTIONS = (
    "make the one call that is asked for . each service has its own format of customer , date and"
    " duration ."
)
PLAIN_INSTRUCTIONS = (
    "You book services for customers by calling tools. Every service has its own conventions for"
    " writing customers, dates and the unit of durations. They never change, and no description"
    " says which service uses which. A service refuses a call in other conventions without saying"
    " why; the task ends with refused call number {}. The first accepted call is the booking, and"
    " it must be exactly what was asked for."
)
WAYS = (
    "{} offers {}. Each service writes a customer in one of the ways {}, a day in one of the ways"
    " {}, and a duration in one of the units {}."
)
PARAMETERS = {
    LIST: ("list the services", {}),
    LOOK_UP: ("describe a service", {"service": "string"}),
    BOOK: (
        "make a booking",
        {"service": "string", "customer": "string", "date": "string", "duration": "number"},
    ),
}
REFUSED = "error: {} refused the call"
UNREADABLE = "error: no such tool, or not the arguments that it takes"
UNKNOWN = "error: there is no service {!r}"


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the tool `look_up`."""

    service: str


class Attempts(NamedTuple):
    """State of an episode: number of refused calls, most arguments right in one call."""

    refused: int = 0
    best: int = 0


@dataclass(kw_only=True, eq=False)
class Bookings(Env):
    """Booking environment. `secret` draws the conventions of the services; an episode ends with
    its refused call number `attempts`. ValueError names the parameter that is out of range.
    """

    turn_format = "tool_call"
    instructions = INSTRUCTIONS

    secret: int = 0
    attempts: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.attempts < len(CONVENTIONS):
            raise ValueError(f"attempts: {self.attempts} is not in 1..{len(CONVENTIONS) - 1}")
        self.plain_instructions = PLAIN_INSTRUCTIONS.format(self.attempts)

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.request = draw_request(task.split, task.map_seed)
        self.right = written(self.request, convention_of(self.secret, self.request.service))
        self.tried = Attempts()
        return self.request.text

    def step(self, action: str) -> Step:
        try:
            asked = _read(called(action))
        except (ValueError, msgspec.ValidationError):
            return _failed(UNREADABLE)
        if asked is None:
            return _told(f"services: {', '.join(OFFERS)}")
        if asked.service not in OFFERS:
            return _failed(UNKNOWN.format(asked.service))
        if isinstance(asked, Service):
            ways = (", ".join(names) for names in (CUSTOMER_WAYS, DATE_WAYS, DURATION_WAYS))
            return _told(WAYS.format(asked.service, OFFERS[asked.service], *ways))
        return self._book(asked)

    def tools(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "description": does, "parameters": _schema(arguments)}
            for name, (does, arguments) in PARAMETERS.items()
        ]

    def actions(self) -> list[str]:
        """Return the tool calls about the request, the booking in every convention."""
        bookings = (self._written(convention) for convention in CONVENTIONS)
        service = {"service": self.request.service}
        return [canonical(LIST, {}), canonical(LOOK_UP, service), *bookings]

    def solve(self) -> list[str]:
        return [canonical(BOOK, asdict(self.right))]

    def state(self) -> str:
        return self.request.service

    def snapshot(self) -> Attempts:
        return self.tried

    def restore(self, snapshot: Attempts) -> None:
        self.tried = snapshot

    def score(self) -> float:
        """Return the share of the conventions that the best call so far has met."""
        return self.tried.best / len(Convention._fields)

    def exact(self, max_turns: int) -> Exact:
        """Compute the chance that uniform choices among `actions` book before they are refused."""
        count = len(self.actions())
        told, refused = (count - len(CONVENTIONS)) / count, (len(CONVENTIONS) - 1) / count
        won, chances = 0.0, [1.0] + [0.0] * (self.attempts - 1)  # by the number of refused calls
        for _ in range(max_turns):
            won += sum(chances) / count
            before = [0.0, *chances]
            chances = [
                told * stay + refused * one for stay, one in zip(chances, before, strict=False)
            ]
        return Exact(won, float(max_turns > 0))

    def _book(self, call: BookingCall) -> Step:
        """Make a booking, or count a refused call."""
        right = 0
        if call.service == self.request.service:
            parts = Convention._fields
            right = sum(getattr(call, part) == getattr(self.right, part) for part in parts)
        best = max(self.tried.best, right)
        if accepted(call, convention_of(self.secret, call.service)):
            self.tried = self.tried._replace(best=best)
            success = call == self.right
            return Step("booked", float(success), True, False, Info(success=success))
        self.tried = Attempts(self.tried.refused + 1, best)
        ended = self.tried.refused == self.attempts
        return Step(REFUSED.format(call.service), 0.0, ended, False, Info(tool_error=True))

    def _written(self, convention: Convention) -> str:
        return canonical(BOOK, asdict(written(self.request, convention)))


def _read(call: ToolInvocation) -> BookingCall | Service | None:
    """Return the arguments of a call, None of `list_services`; ValueError if it cannot be read."""
    if call.name == LIST and not call.arguments:
        return None
    if call.name == LOOK_UP:
        return msgspec.convert(call.arguments, Service)
    if call.name == BOOK:
        return msgspec.convert(call.arguments, BookingCall)
    raise ValueError(f"no tool {call.name} with these arguments")


def _schema(arguments: dict[str, str]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments by their types."""
    properties = {name: {"type": kind} for name, kind in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments)}


def _told(text: str) -> Step:
    return Step(text, 0.0, False, False, Info())


def _failed(text: str) -> Step:
    return Step(text, 0.0, False, False, Info(valid=False, tool_error=True))
