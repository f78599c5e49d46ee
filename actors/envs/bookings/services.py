"""Services, the secret conventions in which each reads a call, and the requests for bookings."""

import random
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from itertools import product
from typing import NamedTuple

import msgspec

from evolver_async.randomness import key
from evolver_async.splits import split_of

OFFERS = {  # by service
    "harbour_restaurant": "a table at the Harbour Restaurant",
    "lake_boats": "a boat at Lake Boats",
    "hill_tennis": "a court at Hill Tennis",
    "old_library": "a room in the Old Library",
    "east_garage": "a lift at East Garage",
    "blue_studio": "the stage of Blue Studio",
    "park_barber": "a chair at Park Barber",
    "city_sauna": "a cabin in the City Sauna",
    "north_cinema": "a box at the North Cinema",
    "west_kitchen": "the oven of the West Kitchen",
}
FIRST_DAY, DAYS = date(2027, 1, 1), 365
CUSTOMERS = 400
DURATIONS = tuple(range(30, 241, 15))  # minutes; no value is one of another unit too
MOST_DRAWS = 10_000
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)


class BookingRequest(NamedTuple):
    """Booking that a task asks for."""

    service: str
    customer: int
    day: date
    minutes: int

    @property
    def text(self) -> str:
        day = f"{self.day.day} {MONTHS[self.day.month - 1]} {self.day.year}"
        return (
            f"Book {OFFERS[self.service]} for customer {self.customer} on {day}"
            f" for {self.minutes} minutes."
        )


class BookingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of a booking as a service reads them. `duration` is in the service's unit."""

    service: str
    customer: str
    date: str
    duration: float


class Convention(NamedTuple):
    """Ways in which a service writes the arguments, by their names in the tables below."""

    customer: str
    date: str
    duration: str


# Each way has a name that shows it. No two ways of a table write anything alike.
CUSTOMER_WAYS: Mapping[str, Callable[[int], str]] = {
    "17": str,
    "C-0017": lambda number: f"C-{number:04}",
    "customer/17": lambda number: f"customer/{number}",
}
DATE_WAYS: Mapping[str, str] = {
    "2027-12-24": "%Y-%m-%d",
    "24.12.2027": "%d.%m.%Y",
    "12/24/2027": "%m/%d/%Y",
    "20271224": "%Y%m%d",
}
DURATION_WAYS: Mapping[str, Callable[[int], float]] = {
    "minutes": lambda minutes: minutes,
    "hours": lambda minutes: minutes / 60,
    "seconds": lambda minutes: minutes * 60,
}
CONVENTIONS = tuple(Convention(*ways) for ways in product(CUSTOMER_WAYS, DATE_WAYS, DURATION_WAYS))


def convention_of(secret: int, service: str) -> Convention:
    """Return the convention of a service, drawn by `secret`."""
    return CONVENTIONS[key(secret, "bookings", service) % len(CONVENTIONS)]


def written(request: BookingRequest, convention: Convention) -> BookingCall:
    """Write a request as a call."""
    return BookingCall(
        service=request.service,
        customer=CUSTOMER_WAYS[convention.customer](request.customer),
        date=request.day.strftime(DATE_WAYS[convention.date]),
        duration=DURATION_WAYS[convention.duration](request.minutes),
    )


def accepted(call: BookingCall, convention: Convention) -> bool:
    """Return True if a service with this convention can read the call, whatever it books."""
    customer, duration = CUSTOMER_WAYS[convention.customer], DURATION_WAYS[convention.duration]
    days = (FIRST_DAY + timedelta(number) for number in range(DAYS))
    return (
        any(call.customer == customer(number) for number in range(1, CUSTOMERS + 1))
        and any(call.date == day.strftime(DATE_WAYS[convention.date]) for day in days)
        and any(call.duration == duration(minutes) for minutes in DURATIONS)
    )


def draw_request(split: str, map_seed: int) -> BookingRequest:
    """Return the request of (split, map_seed): the first draw whose content hashes into the split.

    ValueError for a split that does not exist.
    """
    rng = random.Random(key(map_seed, "bookings", split))
    for _ in range(MOST_DRAWS):
        request = BookingRequest(
            service=rng.choice(list(OFFERS)),
            customer=rng.randint(1, CUSTOMERS),
            day=FIRST_DAY + timedelta(rng.randrange(DAYS)),
            minutes=rng.choice(DURATIONS),
        )
        if split_of(request.text) == split:
            return request
    raise ValueError(f"split: no request belongs to {split!r}")
