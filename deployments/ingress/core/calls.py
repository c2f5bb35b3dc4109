"""The calls that carry inputs to stages, the actions that the core wants done, and what it has to do later."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import Any, NamedTuple

from deployments.ingress.core.inputs import Chains, Inputs, PendingInput, Rules
from deployments.ingress.core.probes import Watch
from deployments.ingress.core.routes import ChainRoute, KVPlacements, StageRoute, weight_of
from earlyexit.errors import OfframpError

Answers = Sequence[Any]
"""One answer per input, in the driver's form; empty where the driver has none."""


class Call:
    """Inputs that were sent to a stage together."""

    __slots__ = ("epoch", "heard", "inputs", "is_first", "num_inside", "reserve_s", "stage", "started_s", "watch")

    def __init__(
        self,
        stage: StageRoute,
        inputs: Inputs,
        started_s: float,
        epoch: int,
        reserve_s: float,
        watch: Watch | None,
        is_first: bool,
    ) -> None:
        self.stage = stage
        self.inputs = inputs
        """All that it began with."""
        self.started_s = started_s
        self.epoch = epoch
        """The epoch of the plan by which its inputs were sent to the first stage."""
        self.reserve_s = reserve_s
        """The seconds that the stages after this one are expected to take, and the slack."""
        self.watch = watch
        """What is to be observed of its inputs; None for nothing."""
        self.is_first = is_first
        """Whether it brings new inputs, to the first block."""
        self.heard = False
        """Whether an input has left it; early answers alone make no room for another call."""
        self.num_inside = 0
        """Inputs that it still has."""

    @property
    def probe(self) -> bool:
        """Whether its inputs are probes, or go beside some."""
        return self.watch in ("probe", "whole")

    def inside(self) -> list[PendingInput]:
        """Returns the inputs that have not left it, answered or not."""
        return [each for each in self.inputs if each.holder is self]

    def release(self, inputs: Inputs) -> list[bool]:
        """Lets inputs leave this call; returns whether it had each one. An input that is named twice leaves once."""
        had = []
        for each in inputs:
            had.append(each.holder is self)
            if had[-1]:
                each.holder = None
        return had


class Calls:
    """The calls of one ingress that are under way. A call follows the routes in force when it begins."""

    def __init__(self, chains: Chains, rules: Rules, make: type[Call]) -> None:
        """`make`: the class of calls."""
        self._chains = chains
        self._rules = rules
        self._make = make
        self._open: Counter[int] = Counter()
        """By the epoch of the plan by which they were sent."""

    @property
    def oldest_epoch(self) -> int:
        """The oldest plan by which a call under way was sent; the present one where there is no call."""
        return min(self._open, default=self._chains.route.epoch)

    def begin(
        self,
        route: ChainRoute,
        stage: StageRoute,
        inputs: Inputs,
        now_s: float,
        epoch: int,
        watch: Watch | None,
        *,
        mine: Inputs | None = None,
        is_first: bool = False,
    ) -> Call:
        """Returns a new call, which has the inputs now; of those, only `mine` if others merely travel along."""
        if mine is None:
            mine = inputs
        has_s = 0.0
        if self._rules.slo_s is None:
            has_s = max([each.deadline_s - each.arrived_s for each in mine], default=0.0)
        reserve_s = route.reserve_s(stage) + self._rules.kept_s(has_s)
        if reserve_s == math.inf:
            reserve_s = max(0.0, *[each.deadline_s - now_s for each in mine])
        call = self._make(stage, inputs, now_s, epoch, reserve_s, watch, is_first)
        for each in mine:
            each.holder = call
        call.num_inside = len(mine)
        self._open[stage.epoch] += 1
        if is_first:
            self._chains.count(stage.slot, +1)
        return call

    def part(self, call: Call, number: int, now_s: float, *, took_time: bool = True) -> None:
        """Note that a part of a call's reply came back, with so many of its inputs."""
        if took_time:
            call.stage.learn(now_s - call.started_s)
        call.num_inside -= number
        if not call.num_inside:
            epoch = call.stage.epoch
            self._open[epoch] -= 1
            if not self._open[epoch]:
                del self._open[epoch]
        if not call.heard:  # the first part tells that its batch has run: another call may be sent
            call.heard = True
            if call.is_first:
                self._chains.count(call.stage.slot, -1)

    def take_away(self, call: Call, inputs: Inputs, now_s: float) -> list[PendingInput]:
        """Takes inputs that will not come back from a call; returns those that it had."""
        mine = list(compress(inputs, call.release(inputs)))
        if mine:
            self.part(call, len(mine), now_s, took_time=False)
        return mine


def weigh(stage: StageRoute, block: int, inputs: Inputs) -> tuple[int, int]:
    """Returns what inputs that wait for a block weigh, and what a full batch there does; see `weight_of`."""
    budget = stage.budget(block)
    return weight_of(budget, len(inputs), 0 if budget.tokens is None else sum([each.tokens for each in inputs]))


def placements_of(slot: str, inputs: Inputs) -> KVPlacements:
    """Returns where the sequences of a call to a slot keep their keys and values."""
    return KVPlacements(slot, [each.placement for each in inputs if each.placement is not None])


def picked(inputs: Inputs, answers: Answers, keep: Sequence[bool]) -> tuple[Inputs, Answers]:
    """Returns the inputs to be kept, with their answers, where there are any."""
    if all(keep):
        return inputs, answers
    return list(compress(inputs, keep)), list(compress(answers, keep))


# The core's actions. A simulation makes hundreds of thousands of them, hence tuples.


class SendCall(NamedTuple):
    """Send a call to its stage."""

    call: Call
    block: int
    payload: Any
    """What its inputs brought from the stage before, with other inputs where it `enters`; None for new inputs."""
    enters: int | None = None
    """The network of the chain for which the inputs of the call are to be encoded; None: for none."""
    rows: tuple[int, ...] | None = None
    """The rows of the payload that are the call's inputs; None: all."""


class Answered(NamedTuple):
    """Give callers their answers."""

    inputs: Inputs
    block: int
    """The block after which they left."""
    answers: Answers
    latencies_s: Sequence[float]


class Dropped(NamedTuple):
    """Tell callers that their inputs get no answer."""

    inputs: Inputs
    reason: str
    error: OfframpError | None
    """None where the callers have gone."""


class HungUp(NamedTuple):
    """Stop a call that was given up."""

    call: Call


class Retried(NamedTuple):
    """Note that inputs which a slot failed wait to be sent again."""

    slot: str
    number: int


Action = SendCall | Answered | Dropped | HungUp | Retried
Actions = list[Action]


class Pause:
    """Holds the inputs of a call that failed until they are sent again."""

    __slots__ = ("inputs", "slot")

    def __init__(self, slot: str, inputs: Inputs) -> None:
        self.slot = slot
        self.inputs = inputs
        for each in inputs:
            each.holder = self

    def end(self) -> list[PendingInput]:
        """Returns the inputs that begin another attempt."""
        again = [each for each in self.inputs if not each.settled]
        for each in again:
            each.attempt += 1
            each.holder = None
        return again


FEW = 64
DEADLINE, HANGING, PAUSE = range(3)
"""Kinds of timers, in the order in which those of one moment expire."""


class Timers:
    """What an ingress has to do later: deadlines of requests, calls that hang, pauses before another attempt.

    Nearly all requests are answered long before their deadline, so timers that are over are removed from time to time.
    """

    __slots__ = ("_heap", "_many", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        """Time, kind, serial number, and what expires."""
        self._serial = 0
        self._many = FEW
        """The number of timers at which it is worth a search for those that are over."""

    def add(self, at_s: float, kind: int, thing: Any) -> None:
        """Have a request's inputs, an input or a pause expire at a finite time."""
        self._serial += 1
        heappush(self._heap, (at_s, kind, self._serial, thing))
        if len(self._heap) > self._many:
            self._heap = [timer for timer in self._heap if not _is_over(timer[1], timer[3])]
            heapify(self._heap)
            self._many = 2 * len(self._heap) + FEW

    def next_s(self) -> float:
        """Returns when the next timer expires that is not over; infinite without one."""
        heap = self._heap
        while heap and _is_over(heap[0][1], heap[0][3]):
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop(self, now_s: float) -> list[tuple[int, Any]]:
        """Removes and returns the timers that have expired and are not over, by kind and then by time."""
        expired: list[tuple[int, Any]] = []
        while self.next_s() <= now_s:
            _, kind, _, thing = heappop(self._heap)
            expired.append((kind, thing))
        return sorted(expired, key=lambda timer: timer[0]) if len(expired) > 1 else expired


def _is_over(kind: int, thing: Any) -> bool:
    if kind == HANGING:
        return thing.holder is None
    if kind == PAUSE:
        return all(each.settled for each in thing.inputs)
    for each in thing:  # noqa: SIM110 - `all` of a generator takes five times as long, for every request
        if not each.settled or each.holder is not None:
            return False
    return True
