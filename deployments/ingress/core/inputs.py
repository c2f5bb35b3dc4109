"""Inputs on their way through an ingress, the calls that carry them, and what the core wants done with both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from deployments.ingress.core.chains import Chain
from deployments.ingress.core.routes import KVPlacement, StageRoute, W
from earlyexit.errors import OfframpError
from earlyexit.network.wire import Seen, stacked
from earlyexit.tasks.label import differ
from profiles.records import Loss
from profiles.stream import Observations, SmallArray, StreamShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Of one ingress."""

    max_queued: float = math.inf
    """Inputs without an outcome that it takes."""
    calls_per_replica: int
    """Of the first stage, that nothing has come back from."""
    max_attempts: int
    """Times an input is sent from the start, before its owner is told."""
    slo_s: float | None = None
    slack: float = 0.0
    """Share of the SLO that stages which wait for full batches leave (E3 section 4); without an SLO, of an input's time
    from its arrival to its deadline."""
    num_ingresses: int = 1
    admits: bool = True
    """Whether what cannot be in time is refused; never where there is no SLO."""
    shape: StreamShape | None = None
    """What is seen of probes, and of inputs that stay; None: nothing."""
    loss: Loss = differ
    """The task's, by which early answers are compared with the full model's."""
    probe_share: float = 0.0
    """Of the calls with new inputs, those that are probes; where inputs are steps, of the sequences."""


Watch = Literal["probe", "stay", "whole"]
"""What is to be seen of an input: what every ramp says, or the active ones alone; or what the full model says of the
whole text of a probe that lost words."""


@dataclass(slots=True)
class Entry:
    """One input, and what was seen of it so far."""

    arrived_s: float
    deadline_s: float
    watch: Watch
    stays: bool
    """Whether its plan has it stay; probes go on to the end under any."""
    active: frozenset[int]
    """The active ramps of the plan that it counts for."""
    exit: int | None = None
    said: dict[int, Seen] = field(default_factory=dict)
    """By block; the full model's is the last one's, unless there is a `beside`."""
    beside: Hashable | None = None
    """What goes on with all words, where this one lost some."""
    whole: Seen | None = None
    """What the full model says of that."""

    def has_ended(self, last: int) -> bool:
        """Whether it was answered, and nothing more is to be seen of it; `last`: the model's last block."""
        return self.exit is not None and last in self.said and (self.beside is None or self.whole is not None)

    def full(self, last: int) -> Seen:
        """What the full model said."""
        return self.said[last] if self.whole is None else self.whole


def observations_of(entries: Sequence[Entry], shape: StreamShape, loss: Loss) -> Observations:
    """Entries that were answered, and seen by every ramp that was to see them and by the full model."""
    size = len(entries), len(shape.ramps)
    columns = [(column, ramp) for column, ramp in enumerate(shape.ramps)]
    cells, scores, early = [], [], []
    for row, entry in enumerate(entries):
        said, is_probe = entry.said, entry.watch == "probe"
        for column, ramp in columns:
            if is_probe or ramp in entry.active:
                seen = said[ramp]
                cells.append(row * size[1] + column)
                scores.append(seen.score)
                early.append(seen.value)
    scores_NR = np.full(size, np.nan, dtype=np.float32)
    losses_NR = np.full(size, np.nan, dtype=np.float32)
    if cells:
        scores_NR.flat[cells] = scores
        full = stacked([entry.full(shape.num_blocks - 1).value for entry in entries])  # unpacked once, not per ramp
        losses_NR.flat[cells] = loss(stacked(early), full[np.array(cells) // size[1]])
    active = [ramp in entry.active for entry in entries for ramp in shape.ramps]
    return Observations(
        shape=shape,
        times_s_N=np.array([entry.arrived_s for entry in entries]),
        probe_N=np.array([entry.watch == "probe" for entry in entries], dtype=bool),
        stayed_N=np.array([entry.stays for entry in entries], dtype=bool),
        active_NR=np.array(active, dtype=bool).reshape(size),
        exits_N=np.array([entry.exit for entry in entries], dtype=np.int16),
        scores_NR=scores_NR,
        losses_NR=losses_NR,
        end_losses_N=_end_losses_N(entries, shape.num_blocks - 1, loss),
    )


def _end_losses_N(entries: Sequence[Entry], last: int, loss: Loss) -> SmallArray | None:
    """What the end says of texts that lost words, against what it says of them whole; NaN of others."""
    rows = [(row, entry.said[last].value, entry.whole.value) for row, entry in enumerate(entries) if entry.whole]
    if not rows:
        return None
    losses_N = np.full(len(entries), np.nan, dtype=np.float32)
    at, pruned, whole = zip(*rows, strict=True)
    losses_N[list(at)] = loss(stacked(pruned), stacked(whole))
    return losses_N


def losses_of_answers(seen: Observations) -> float:
    """The sum of what the inputs' answers cost against the full model's, all of which were seen."""
    left_NE = seen.exits_N[:, None] == np.array([*seen.shape.ramps, seen.shape.num_blocks - 1])
    return float(seen.losses_NE[left_NE].sum(dtype=np.float64))


I = TypeVar("I")  # noqa: E741 # an input, as the core's driver knows it


WHOLE: Final = -1
"""The attempt by which whole texts travel beside those that lost words: none that an input has by itself."""


class Flight(Generic[I]):
    """One input until it has its outcome; it keeps what its owner gave, so that it can start again."""

    __slots__ = (
        "ahead",
        "ahead_tokens",
        "arrived_s",
        "attempt",
        "chain",
        "cost",
        "deadline_s",
        "holder",
        "home",
        "input",
        "settled",
        "tokens",
    )

    def __init__(
        self,
        given: I,
        chain: Chain[Flight[I], Any],
        arrived_s: float,
        deadline_s: float,
        *,
        ahead: int = 0,
        tokens: int = 1,
        ahead_tokens: int = 0,
    ) -> None:
        self.input = given
        self.chain = chain
        """The chain that was drawn for it."""
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.tokens = tokens
        """Its length, for the network that it was last encoded for; 1 where inputs have none."""
        self.cost = tokens
        """What it counts among those without an outcome: its length as it came, whatever other networks make of it."""
        self.ahead = ahead
        """Inputs of its chain that had no outcome when it arrived."""
        self.ahead_tokens = ahead_tokens
        """Of these."""
        self.attempt = 0
        self.settled = False
        self.holder: Call[I, Any] | Pause[I] | Due | None = None
        """What has it; None of one that waits to be sent, and of one that is over."""
        self.home: KVPlacement | None = None
        """Of its sequence; None of an input that is none's."""

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        return self.arrived_s

    def whole(self) -> Flight[I]:
        """Returns a copy as it came, to go beside it when it loses words; no request waits for its answer."""
        made = Flight(self.input, self.chain, self.arrived_s, self.deadline_s, tokens=self.cost)
        made.attempt, made.settled = WHOLE, True
        return made

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to be sent."""
        return self.holder is None and not self.settled


class Due:
    """What has the steps of sequences that are sent next."""

    __slots__ = ()


DUE = Due()
Tokens = Sequence[int] | None
"""The lengths of a request's inputs, one each; None where inputs have none."""


Flights = Sequence[Flight[I]]
Answers = Sequence[Any]
"""One for each input, as the core's driver knows them; or none."""


class Call(Generic[I, W]):
    """Inputs that were sent to a stage together."""

    __slots__ = ("epoch", "flights", "heard", "is_first", "leg", "num_inside", "reserve_s", "started_s", "watch")

    def __init__(
        self,
        leg: StageRoute[W],
        flights: Sequence[Flight[I]],
        started_s: float,
        epoch: int,
        reserve_s: float,
        watch: Watch | None,
        is_first: bool,
    ) -> None:
        self.leg = leg
        self.flights = flights
        """All that it began with."""
        self.started_s = started_s
        self.epoch = epoch
        """Of the plan by which its inputs were sent to the first stage."""
        self.reserve_s = reserve_s
        """What the stages after this one are expected to take, and what is kept in hand."""
        self.watch = watch
        """What is to be seen of its inputs, which a book of probes has, or had; None for nothing."""
        self.is_first = is_first
        """Whether it brings new inputs, to the first block."""
        self.heard = False
        """Whether an input has left it; early answers alone make no room."""
        self.num_inside = 0
        """Inputs that it has."""

    @property
    def probe(self) -> bool:
        """Whether its inputs are probes, or go beside some."""
        return self.watch in ("probe", "whole")

    def inside(self) -> list[Flight[I]]:
        """Those that have not left it, answered or not."""
        return [flight for flight in self.flights if flight.holder is self]

    def release(self, flights: Sequence[Flight[I]]) -> list[bool]:
        """Let inputs leave this call; whether it had each one, which it has once however often it is named."""
        had = []
        for flight in flights:
            had.append(flight.holder is self)
            if had[-1]:
                flight.holder = None
        return had


def picked(flights: Sequence[Flight[I]], answers: Answers, keep: Sequence[bool]) -> tuple[Flights[I], Answers]:
    """Those to be kept, with their answers, where there are any."""
    if all(keep):
        return flights, answers
    return list(compress(flights, keep)), list(compress(answers, keep))


class Pause(Generic[I]):
    """Inputs of a call that failed, until they wait to be sent again."""

    __slots__ = ("flights", "slot")

    def __init__(self, slot: str, flights: Sequence[Flight[I]]) -> None:
        self.slot = slot
        self.flights = flights
        for flight in flights:
            flight.holder = self

    def unsettled(self) -> list[Flight[I]]:
        """Returns the inputs whose requests still wait for an answer."""
        return [flight for flight in self.flights if not flight.settled]

    def end(self) -> list[Flight[I]]:
        """Those that begin another attempt."""
        again = self.unsettled()
        for flight in again:
            flight.attempt += 1
            flight.holder = None
        return again


# What the core wants done. Made by the hundred thousand in a simulation, hence tuples.


class SendCall(NamedTuple):
    """Send a call to the stage of its leg."""

    call: Call[Any, Any]
    block: int
    payload: Any
    """What its inputs came with from the stage before, others too where it `enters`; None for new ones."""
    enters: int | None = None
    """The network of the chain for which its inputs are to be encoded, those of `call.flights` alone."""
    rows: tuple[int, ...] | None = None
    """Of the payload, which inputs are the call's; None: all."""


class Answered(NamedTuple):
    """Tell owners their answers."""

    flights: Sequence[Flight[Any]]
    block: int
    """Which they left after."""
    answers: Sequence[Any]
    """One each, as they came."""
    latencies_s: Sequence[float]


class Dropped(NamedTuple):
    """Inputs get no answer."""

    flights: Sequence[Flight[Any]]
    reason: str
    error: OfframpError | None
    """What to tell their owners; None where they have gone."""


class HungUp(NamedTuple):
    """Stop a call that was given up."""

    call: Call[Any, Any]


class Retried(NamedTuple):
    """Inputs that a slot failed under wait to be sent again."""

    slot: str
    number: int


Action = SendCall | Answered | Dropped | HungUp | Retried
Actions = list[Action]


T = TypeVar("T")
FEW = 64


class Timetable(Generic[T]):
    """Things by the second at which they are due.

    Nearly all come in the order in which they are due, and are over long before: so they stand in a line, which is
    cheaper than a heap, and from time to time those at its front that are over leave it. The others are in a heap.
    """

    __slots__ = ("_is_over", "_line", "_many", "_serial", "_unordered")

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._line: deque[tuple[float, T]] = deque()
        self._unordered: list[tuple[float, int, T]] = []
        self._serial = 0
        self._many = FEW
        """Things in the line that are worth a look whether they are over."""

    def add(self, at_s: float, thing: T) -> None:
        """It is due then, a finite time."""
        line = self._line
        if line and line[-1][0] > at_s:
            self._serial += 1
            heappush(self._unordered, (at_s, self._serial, thing))
            return
        line.append((at_s, thing))
        if len(line) > self._many:
            self._drain()
            self._many = 2 * len(line) + FEW

    def next_s(self) -> float:
        """When something is due that is not over; infinite where nothing is."""
        line, unordered = self._line, self._unordered
        self._drain()
        while unordered and self._is_over(unordered[0][2]):
            heappop(unordered)
        return min(line[0][0] if line else math.inf, unordered[0][0] if unordered else math.inf)

    def pop(self, now_s: float) -> list[T]:
        """Everything that is due by now and not over, in its order."""
        due: list[T] = []
        while self.next_s() <= now_s:
            line, unordered = self._line, self._unordered
            if not unordered or (line and line[0][0] <= unordered[0][0]):
                due.append(line.popleft()[1])
            else:
                due.append(heappop(unordered)[2])
        return due

    def _drain(self) -> None:
        line = self._line
        while line and self._is_over(line[0][1]):
            line.popleft()


class Agenda(Generic[I]):
    """What an ingress has to do later, if nothing comes before it."""

    __slots__ = ("deadlines", "hanging", "pauses")

    def __init__(self) -> None:
        self.deadlines: Timetable[Sequence[Flight[I]]] = Timetable(_are_over)
        """Requests."""
        self.hanging: Timetable[Flight[I]] = Timetable(lambda flight: flight.holder is None)
        """Inputs past their deadline that a call has still."""
        self.pauses: Timetable[Pause[I]] = Timetable(lambda pause: not pause.unsettled())

    def next_s(self) -> float:
        """When the first of it is due; infinite where there is nothing."""
        return min(self.deadlines.next_s(), self.hanging.next_s(), self.pauses.next_s())


def _are_over(flights: Sequence[Flight[Any]]) -> bool:
    for flight in flights:  # noqa: SIM110 - `all` of a generator takes five times as long, for every request
        if not flight.settled or flight.holder is not None:
            return False
    return True
