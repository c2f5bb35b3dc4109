"""The calls that carry inputs to stages, the actions that the core wants done, and what becomes of inputs.

Each input has its outcome once, counts once, and teaches admission control what it can.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, compress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from deployments.ingress.core.inputs import Chains, Inputs, PendingInput, Rules
from deployments.ingress.core.probes import ExitObservations, Watch
from deployments.ingress.core.routes import ChainRoute, KVPlacement, StageRoute, weight_of
from deployments.wire.messages import BUCKET, COUNT_FIELDS
from earlyexit.errors import AdmissionError, InputError, OfframpError, OverloadedError

Answers = Sequence[Any]
"""One answer per input, in the driver's form; empty where the driver has none."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """Inputs that were sent to a stage together."""

    stage: StageRoute
    inputs: Inputs
    """All that it began with."""
    started_s: float
    epoch: int
    """The epoch of the plan by which its inputs were sent to the first stage."""
    reserve_s: float
    """The seconds that the stages after this one are expected to take, and the slack."""
    watch: Watch | None
    """What is to be observed of its inputs; None for nothing."""
    is_first: bool
    """Whether it brings new inputs, to the first block."""
    heard: bool = field(default=False, init=False)
    """Whether an input has left it; early answers alone make no room for another call."""
    num_inside: int = field(default=0, init=False)
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


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one ingress that are under way. A call follows the routes in force when it begins."""

    chains: Chains
    rules: Rules
    make: type[Call]
    """The class of calls."""
    _open: Counter[int] = field(default_factory=Counter, init=False)
    """By the epoch of the plan by which they were sent."""

    @property
    def oldest_epoch(self) -> int:
        """The oldest plan by which a call under way was sent; the present one where there is no call."""
        return min(self._open, default=self.chains.route.epoch)

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
        has_s = self.rules.slo_s
        if has_s is None:
            has_s = max([each.deadline_s - each.arrived_s for each in mine], default=0.0)
        kept_s = 0.0 if has_s == math.inf else self.rules.slack * has_s  # for the unexpected, such as the way back
        reserve_s = route.reserve_s(stage) + kept_s
        if reserve_s == math.inf:
            reserve_s = max(0.0, *[each.deadline_s - now_s for each in mine])
        call = self.make(stage, inputs, now_s, epoch, reserve_s, watch, is_first)
        for each in mine:
            each.holder = call
        call.num_inside = len(mine)
        self._open[stage.epoch] += 1
        if is_first:
            self.chains.count(stage.slot, +1)
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
                self.chains.count(call.stage.slot, -1)

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


def homes_of(inputs: Inputs) -> list[KVPlacement]:
    """Returns where the sequences of inputs keep their keys and values; empty where they belong to none."""
    return [each.placement for each in inputs if each.placement is not None]


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


Action = SendCall | Answered | Dropped | HungUp
Actions = list[Action]


RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next attempt."""


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


PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Shorter latencies are one bucket: a clock that stood still has no logarithm."""
MOST_UNCOUNTED = 4096
LATENCY_ENDS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0, math.inf),
)
"""The upper ends of the buckets in which latencies are reported, six per decade."""


def bucket_of(seconds: float) -> int:
    """Returns the latency bucket of a duration."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


def latencies_within(latencies: Mapping[int, int]) -> dict[str, int]:
    """Returns how many answers have a bucket that ends at each of `LATENCY_ENDS_S` or before, by Prometheus' label."""
    between = [0] * len(LATENCY_ENDS_S)
    for bucket, count in latencies.items():
        between[bisect_left(LATENCY_ENDS_S, BUCKET ** (bucket + 1))] += count
    labels = ["+Inf" if math.isinf(end_s) else f"{end_s:g}" for end_s in LATENCY_ENDS_S]
    return dict(zip(labels, accumulate(between), strict=True))


class IngressCounts:
    """Counts the inputs of one ingress: each that arrived is, later, answered or dropped once, for one reason."""

    def __init__(self, slo_s: float | None) -> None:
        self._slo_s = math.inf if slo_s is None else slo_s
        self.arrived = 0
        self.answered = 0
        self.answered_tokens = 0
        """The tokens of the answered inputs."""
        self.exits: Counter[int] = Counter()
        """Answers under the present plan, by the block after which they left."""
        self.all_exits: Counter[int] = Counter()
        """The same under all plans."""
        self.drops: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        """Inputs that started again or were lost because a replica of a slot failed, by slot."""
        self.refused = 0
        """Arrived inputs that were refused; their lengths are not known."""
        self.crossings: Counter[int] = Counter()
        """Inputs that went on to another network, by its first block; the next four are by that block too."""
        self.crossing_s: defaultdict[int, float] = defaultdict(float)
        self.crossed_in: Counter[int] = Counter()
        """Crossings by latency bucket."""
        self.words: Counter[int] = Counter()
        self.pruned_words: Counter[int] = Counter()
        self._taken_tokens = 0
        self.in_slo = 0
        self.latencies: Counter[int] = Counter()
        """Answers by latency bucket."""
        self._uncounted_s = array("d")
        """Latencies that are in neither before `totals`: to count them one by one would cost more than all else of an
        answer."""

    def totals(self) -> dict[str, Any]:
        """Returns all counts, by the names that an `IngressReport` has for them."""
        self._count()
        counted = {name: getattr(self, name) for name in COUNT_FIELDS}
        return {name: count if isinstance(count, int) else dict(count) for name, count in counted.items()}

    @property
    def tokens_per_input(self) -> float | None:
        """The mean tokens of the inputs that were taken so far; None before the first."""
        taken = self.arrived - self.refused
        return self._taken_tokens / taken if taken else None

    def take(self, num_inputs: int, num_tokens: int) -> None:
        """Count inputs that arrived and were not refused."""
        self.arrived += num_inputs
        self._taken_tokens += num_tokens

    def answer(self, exit_block: int, latencies_s: Sequence[float], num_tokens: int, *, by_present_plan: bool) -> None:
        """Count answers that were given together, and the tokens of their inputs."""
        self.answered += len(latencies_s)
        self.answered_tokens += num_tokens
        self._uncounted_s.extend(latencies_s)
        if len(self._uncounted_s) > MOST_UNCOUNTED:
            self._count()
        self.all_exits[exit_block] += len(latencies_s)
        if by_present_plan:
            self.exits[exit_block] += len(latencies_s)

    def cross(self, block: int, took_s: Sequence[float], *, words: int = 0, pruned_words: int = 0) -> None:
        """Count inputs that went on to the network that begins with a block, each with the seconds that it waited here.

        `words`: the words of texts that could be pruned.
        """
        self.crossings[block] += len(took_s)
        self.crossing_s[block] += sum(took_s)
        for seconds, inputs in Counter(took_s).items():  # those of one call took the same
            self.crossed_in[bucket_of(seconds)] += inputs
        if words:
            self.words[block] += words
            self.pruned_words[block] += pruned_words

    def _count(self) -> None:
        seconds_N, self._uncounted_s = np.array(self._uncounted_s), array("d")
        self.in_slo += int((seconds_N <= self._slo_s).sum())
        buckets_N = np.floor(np.log(np.maximum(seconds_N, SHORTEST_S)) * PER_BUCKET).astype(np.int64)
        self.latencies.update(np.sort(buckets_N).tolist())


LONGEST_RETRY_S = 30.0
"""The longest Retry-After. A rate measured under little load says little about a full queue, and a limit that has
fallen says little about a long input."""


@dataclass(slots=True)
class AnswerRate:
    """Answers per second, as a moving average over about ten seconds; tells refused callers when to come back."""

    rate_per_s: float = 0.0
    _since_s: float | None = None
    _count: int = 0

    def begin(self, now_s: float) -> None:
        """Start to count now: until now there was nothing to answer."""
        self._since_s, self._count = now_s, 0

    def record(self, count: int, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        self._count += count
        elapsed_s = now_s - self._since_s
        if elapsed_s >= 1.0:
            weight = 1 - math.exp(-elapsed_s / 10)
            self.rate_per_s += (self._count / elapsed_s - self.rate_per_s) * (weight if self.rate_per_s else 1.0)
            self._since_s, self._count = now_s, 0

    def seconds_for(self, count: int) -> float:
        """Returns how long `count` answers take, at least 1 s (HTTP's Retry-After counts whole seconds)."""
        return min(max(1.0, count / self.rate_per_s), LONGEST_RETRY_S) if self.rate_per_s else 1.0


LATE = "deadline"
"""The reason of an input that missed its deadline; the kind of a DeadlineError."""


class Outcomes:
    """The beginning and the end of every input of one ingress."""

    def __init__(self, chains: Chains, rules: Rules, observations: ExitObservations | None) -> None:
        self.num_unanswered = 0
        """Inputs without an outcome, in all chains."""
        self.counts = IngressCounts(rules.slo_s)
        self._chains = chains
        self._observations = observations
        self._rate = AnswerRate()
        self._max_queued = rules.max_queued

    def admit(self, num_inputs: int, left_s: float, now_s: float, *, num_coming: int) -> None:
        """Refuse inputs that cannot be answered in the seconds that are left: raises AdmissionError."""
        per_input = self.counts.tokens_per_input or 1.0
        late_s = self._chains.late_s(num_inputs, num_coming, per_input, left_s, now_s)
        if late_s > 0:
            self._refuse_late(num_inputs, left_s, late_s)

    def take(self, inputs: Inputs, now_s: float) -> None:
        """Draw the chains of a request's inputs. Raises AdmissionError where their tokens would be late."""
        drawn, left_s = self._chains.draw(len(inputs)), inputs[0].deadline_s - now_s if inputs else math.inf
        late_s = self._chains.tokens_late_s(drawn, inputs, left_s, now_s)
        if late_s > 0:
            self._refuse_late(len(inputs), left_s, late_s)
        num_tokens = 0
        for chain, each in zip(drawn, inputs, strict=True):
            chain.take(each)
            num_tokens += each.tokens
        self.counts.take(len(inputs), num_tokens)
        self.num_unanswered += len(inputs)

    def _refuse_late(self, num_inputs: int, left_s: float, late_s: float) -> NoReturn:
        message = f"no answer is to be had within {left_s:.3g} s now, but {late_s:.3g} s later"
        self.refuse(AdmissionError(message, retry_after_s=min(late_s, LONGEST_RETRY_S)), num_inputs)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count inputs that arrived and are not taken; raises the error."""
        self.counts.arrived += num_inputs
        self.counts.refused += num_inputs
        self.counts.drops[error.kind] += num_inputs
        raise error

    def check_room(self, num_inputs: int, now_s: float) -> None:
        """Refuse inputs for which there is no room: raises OverloadedError, which says when there may be.

        Raises InputError for a request that could never fit.
        """
        most = self._max_queued
        if self.num_unanswered + num_inputs <= most:
            return
        if num_inputs > most:
            raise InputError(f"{num_inputs} inputs in one request; at most {most} wait here at a time")
        if not self.num_unanswered:
            self._rate.begin(now_s)
        message = f"{self.num_unanswered} inputs wait for their answers here, at most {most} are taken"
        self.refuse(OverloadedError(message, retry_after_s=self._rate.seconds_for(self.num_unanswered)), num_inputs)

    def answer(
        self, call: Call, inputs: Inputs, block: int, answers: Answers, route: ChainRoute, now_s: float
    ) -> Actions:
        """Settle inputs of a chain that have no outcome yet with their answers."""
        self.note(call, inputs, block, route)
        fresh, answers = picked(inputs, answers, _settled_now(inputs))
        if not fresh:
            return []
        num_tokens = self._leave(fresh)
        self._rate.record(len(fresh), now_s)
        latencies_s = [now_s - each.arrived_s for each in fresh]
        self.counts.answer(block, latencies_s, num_tokens, by_present_plan=call.epoch == route.epoch)
        chain = fresh[0].chain.present
        if chain.admission is not None and block >= route.last_split:
            for each, latency_s in zip(fresh, latencies_s, strict=True):
                chain.admission.answered(latency_s, *chain.cost_of(each), now_s)
        return [Answered(fresh, block, answers, latencies_s)]

    def note(self, call: Call, inputs: Inputs, block: int, route: ChainRoute) -> None:
        """Note the exit at which watched inputs left; the first one counts."""
        if call.watch is not None and self._observations is not None:
            for each in inputs:
                self._observations.answered(each, block, route.ramps)

    def drop(self, inputs: Inputs, why: OfframpError | str, now_s: float) -> Actions:
        """Settle inputs without an answer: with an error, or for a reason where their caller waits no longer."""
        fresh = list(compress(inputs, _settled_now(inputs)))
        if not fresh:
            return []
        error, reason = (None, why) if isinstance(why, str) else (why, why.kind)
        for each in fresh if reason == LATE else ():  # had they waited, they would have taken longer still
            chain = each.chain.present
            if chain.admission is not None:
                until_s = now_s if math.isinf(each.deadline_s) else max(now_s, each.deadline_s)
                chain.admission.given_up(until_s - each.arrived_s, *chain.cost_of(each), now_s)
        self._leave(fresh)
        self.counts.drops[reason] += len(fresh)
        return [Dropped(fresh, reason, error)]

    def _leave(self, inputs: Inputs) -> int:
        """Take settled inputs off their chains; returns their tokens."""
        num_tokens = 0
        self.num_unanswered -= len(inputs)
        for each in inputs:
            chain, cost = each.chain.present, each.cost
            chain.num_unanswered -= 1
            chain.unanswered_tokens -= cost
            num_tokens += cost
        return num_tokens


def _settled_now(inputs: Sequence[PendingInput]) -> list[bool]:
    """Settles inputs; returns whether each had no outcome before. An input that is named twice is settled once."""
    fresh = []
    for each in inputs:
        fresh.append(not each.settled)
        each.settled = True
    return fresh
