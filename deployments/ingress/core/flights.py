"""The ingress's book: every input that has no answer yet, and what is sent next. Pure; `dispatcher.py` sends."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from earlyexit.errors import InputError, OfframpError, OverloadedError
from earlyexit.signature import Encoded
from earlyexit.wire import Answer, WirePiece, entering

Settle = Callable[["Flight", Answer | OfframpError], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One input from its arrival to its answer; it keeps its tokens, so that it can start again."""

    key: str
    """The caller's id of the input, or an empty string."""
    request_id: str
    """The request it came with, for the log."""
    book: str
    """The book that holds it: sample ids of different ingresses meet in one batch."""
    serial: int
    encoded: Encoded
    arrived_s: float
    ahead: int
    """Inputs that had no answer when it arrived."""
    deadline_s: float
    settle: Settle
    attempt: int = 0
    epoch: int = 0
    """The plan by which it was sent."""
    settled: bool = False

    @property
    def sample_id(self) -> str:
        """Unique in the service and per attempt, so that a late answer of an earlier attempt is known as such."""
        return f"{self.key}#{self.book}.{self.serial}.{self.attempt}"


def serial_and_attempt(sample_id: str) -> tuple[int, int]:
    """Of a flight, from the id that it travels by."""
    _, serial, attempt = sample_id.rpartition("#")[2].split(".")
    return int(serial), int(attempt)


class FlightBook:
    """Inputs without an answer: those that wait to be sent, and those under way by sample id."""

    def __init__(self, max_queued: int, name: str) -> None:
        self._name = name
        self._max_queued = max_queued
        self._waiting: OrderedDict[int, Flight] = OrderedDict()  # by serial
        self._under_way: dict[str, Flight] = {}
        self._serial = 0

    @property
    def num_unanswered(self) -> int:
        return len(self._waiting) + len(self._under_way)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float,
        retry_after_s: float,
        request_id: str = "",
    ) -> list[Flight]:
        """Take all inputs of a request, or none.

        Raises OverloadedError beyond `max_queued`, InputError for a request that could never fit.
        """
        if len(inputs) > self._max_queued:
            raise InputError(f"{len(inputs)} inputs in one request; at most {self._max_queued} wait here at a time")
        if self.num_unanswered + len(inputs) > self._max_queued:
            raise OverloadedError(
                f"{self.num_unanswered} inputs wait for their answers here, at most {self._max_queued} are taken",
                retry_after_s=retry_after_s,
            )
        ahead = self.num_unanswered
        flights: list[Flight] = []
        for key, encoded in inputs:
            self._serial += 1
            flight = Flight(
                key=key,
                request_id=request_id,
                book=self._name,
                serial=self._serial,
                encoded=encoded,
                arrived_s=arrived_s,
                ahead=ahead + len(flights),
                deadline_s=deadline_s,
                settle=settle,
            )
            self._waiting[flight.serial] = flight
            flights.append(flight)
        return flights

    def depart(self, batch: int, epoch: int) -> list[Flight]:
        """The next inputs for the first stage, at most `batch`, in the order of their arrival."""
        flights = [self._waiting.popitem(last=False)[1] for _ in range(min(batch, len(self._waiting)))]
        for flight in flights:
            flight.epoch = epoch
            self._under_way[flight.sample_id] = flight
        return flights

    def find(self, sample_id: str) -> Flight | None:
        """The input under way with that id; None if it was answered, given up or sent again since."""
        return self._under_way.get(sample_id)

    def settle(self, sample_id: str, outcome: Answer | OfframpError) -> Flight | None:
        """Give an input its outcome, once; None for a duplicate or a stranger."""
        flight = self._under_way.pop(sample_id, None)
        if flight is None or flight.settled:
            return None
        flight.settled = True
        flight.settle(flight, outcome)
        return flight

    def settle_waiting(self, outcome: OfframpError) -> int:
        """Give every input that waits to be sent this outcome; how many there were."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for flight in waiting.values():
            flight.settled = True
            flight.settle(flight, outcome)
        return len(waiting)

    def give_up(self, flights: Sequence[Flight]) -> None:
        """Forget inputs whose owner no longer waits; answers that still come for them are duplicates."""
        for flight in flights:
            flight.settled = True
            self._waiting.pop(flight.serial, None)
            self._under_way.pop(flight.sample_id, None)

    def send_again(self, sample_ids: Sequence[str]) -> int:
        """Put unanswered inputs back to the front, to start from block 0; how many there were."""
        flights = [self._under_way.pop(sample_id) for sample_id in sample_ids if sample_id in self._under_way]
        for flight in reversed(flights):
            flight.attempt += 1
            self._waiting[flight.serial] = flight
            self._waiting.move_to_end(flight.serial, last=False)
        return len(flights)


def departure(flights: Sequence[Flight]) -> WirePiece:
    """The inputs as a piece that waits for block 0."""
    return entering([flight.sample_id for flight in flights], [flight.encoded for flight in flights])


LONGEST_RETRY_S = 30.0
"""A rate measured under little load says little about a full queue; nobody is sent away for longer."""


@dataclass(slots=True)
class AnswerRate:
    """Answers per second, as a moving average over about ten seconds; tells refused callers when to come back."""

    rate_per_s: float = 0.0
    _since_s: float | None = None
    _count: int = 0

    def begin(self, now_s: float) -> None:
        """Count from now on: until now there was nothing to answer."""
        self._since_s, self._count = now_s, 0

    def record(self, count: int, now_s: float) -> None:
        """Count answers."""
        if self._since_s is None:
            self._since_s = now_s
        self._count += count
        elapsed_s = now_s - self._since_s
        if elapsed_s >= 1.0:
            weight = 1 - math.exp(-elapsed_s / 10)
            self.rate_per_s += (self._count / elapsed_s - self.rate_per_s) * (weight if self.rate_per_s else 1.0)
            self._since_s, self._count = now_s, 0

    def seconds_for(self, count: int) -> float:
        """How long `count` answers take, at least 1 s (HTTP's Retry-After counts whole seconds)."""
        return min(max(1.0, count / self.rate_per_s), LONGEST_RETRY_S) if self.rate_per_s else 1.0
