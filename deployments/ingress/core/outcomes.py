"""What becomes of inputs: each has its outcome once, counts once, and teaches what it can."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, Generic, NoReturn

import numpy as np

from deployments.ingress.core.chains import Chains
from deployments.ingress.core.inputs import (
    Actions,
    Answered,
    Call,
    Dropped,
    Flight,
    Flights,
    I,
    Rules,
    Tokens,
    picked,
)
from deployments.ingress.core.probes import ExitObservations
from deployments.ingress.core.routes import ChainRoute, W
from deployments.wire.messages import BUCKET
from earlyexit.errors import AdmissionError, InputError, OfframpError, OverloadedError

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Below, latencies are one bucket: a clock that stood still has no logarithm."""
MOST_UNCOUNTED = 4096
BY_KEY = ("exits", "drops", "latencies", "crossings", "crossing_s", "words", "pruned_words")
"""What is counted apart by blocks, reasons, buckets."""
LATENCY_ENDS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0, math.inf),
)
"""Up to which latencies are told, six per decade."""


def bucket_of(seconds: float) -> int:
    """The latency bucket that a duration falls into."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


def latencies_within(latencies: Mapping[int, int], ends_s: Sequence[float]) -> list[int]:
    """Answers by the longest latency that their bucket may hold, at most each of `ends_s`."""
    between = [0] * len(ends_s)
    for bucket, count in latencies.items():
        between[bisect_left(ends_s, BUCKET ** (bucket + 1))] += count
    return list(accumulate(between))


class IngressCounts:
    """Every input that arrived is, later, answered or dropped: once, for one reason."""

    def __init__(self, slo_s: float | None) -> None:
        self._slo_s = math.inf if slo_s is None else slo_s
        self.arrived = 0
        self.answered = 0
        self.answered_tokens = 0
        """Of the answered."""
        self.exits: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.refused = 0
        """Of those that arrived; their lengths are not known."""
        self.crossings: Counter[int] = Counter()
        """Inputs that went on to another network, by its first block; as are the next three."""
        self.crossing_s: defaultdict[int, float] = defaultdict(float)
        self._crossed_in: Counter[int] = Counter()
        """Of these, by latency bucket."""
        self.words: Counter[int] = Counter()
        self.pruned_words: Counter[int] = Counter()
        self._taken_tokens = 0
        self._in_slo = 0
        self._latencies: Counter[int] = Counter()
        self._uncounted_s = array("d")
        """Latencies that are not in these two yet: counted one by one they cost more than all else of an answer."""

    @property
    def in_slo(self) -> int:
        self._count()
        return self._in_slo

    @property
    def latencies(self) -> Counter[int]:
        self._count()
        return self._latencies

    def totals(self) -> dict[str, Any]:
        """All of them, by the names that an `IngressReport` has for them."""
        plain = {name: getattr(self, name) for name in ("arrived", "answered", "answered_tokens", "in_slo")}
        return plain | {name: dict(getattr(self, name)) for name in BY_KEY}

    @property
    def tokens_per_input(self) -> float | None:
        """Of those that were taken so far; None before the first."""
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
        if by_present_plan:
            self.exits[exit_block] += len(latencies_s)

    def cross(self, block: int, took_s: Sequence[float], *, words: int = 0, pruned_words: int = 0) -> None:
        """Count inputs that went on to the network that begins with a block, each with the seconds that it waited here.

        `words`: of the texts that words could be pruned of.
        """
        self.crossings[block] += len(took_s)
        self.crossing_s[block] += sum(took_s)
        for seconds, inputs in Counter(took_s).items():  # those of one call took the same
            self._crossed_in[bucket_of(seconds)] += inputs
        if words:
            self.words[block] += words
            self.pruned_words[block] += pruned_words

    def crossing_quantile_s(self, share: float) -> float | None:
        """How long so many of the crossings took at most, at most 5 % too long; None before the first."""
        left = share * self._crossed_in.total()
        for bucket, inputs in sorted(self._crossed_in.items()):
            left -= inputs
            if left <= 0:
                return BUCKET ** (bucket + 1)
        return None

    def begin_plan(self) -> None:
        self.exits.clear()

    def _count(self) -> None:
        seconds_N = np.array(self._uncounted_s)
        self._uncounted_s = array("d")
        self._in_slo += int((seconds_N <= self._slo_s).sum())
        buckets_N = np.floor(np.log(np.maximum(seconds_N, SHORTEST_S)) * PER_BUCKET).astype(np.int64)
        for bucket, number in zip(*np.unique(buckets_N, return_counts=True), strict=True):
            self._latencies[int(bucket)] += int(number)


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
        """Count from now on: until now there was nothing to answer."""
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
        """How long `count` answers take, at least 1 s (HTTP's Retry-After counts whole seconds)."""
        return min(max(1.0, count / self.rate_per_s), LONGEST_RETRY_S) if self.rate_per_s else 1.0


LATE = "deadline"
"""The reason of an input that missed its deadline; the kind of a DeadlineError."""


class Outcomes(Generic[I, W]):
    """The beginning and the end of every input of one ingress."""

    def __init__(self, chains: Chains[Flight[I], W], rules: Rules, probes: ExitObservations | None) -> None:
        self.num_unanswered = 0
        """Inputs without an outcome, in all chains."""
        self.counts = IngressCounts(rules.slo_s)
        self._chains = chains
        self._probes = probes
        self._rate = AnswerRate()

    @property
    def unanswered_tokens(self) -> int:
        """Tokens of the inputs without an outcome."""
        return sum([chain.unanswered_tokens for chain in self._chains.active])

    def admit(self, num_inputs: int, left_s: float, now_s: float, *, num_coming: int) -> None:
        """Refuse inputs that cannot be answered in the seconds that are left: raises AdmissionError."""
        per_input = self.counts.tokens_per_input or 1.0
        late_s = self._chains.late_s(num_inputs, num_coming, per_input, left_s, now_s)
        if late_s > 0:
            self._refuse_late(num_inputs, left_s, late_s)

    def take(
        self, inputs: Sequence[I], tokens: Tokens, arrived_s: float, deadline_s: float, now_s: float
    ) -> list[Flight[I]]:
        """Draw the chains of a request's inputs. Raises AdmissionError where their tokens would be late."""
        if tokens is None:
            tokens = (1,) * len(inputs)
        drawn, left_s = self._chains.draw(len(inputs)), deadline_s - now_s
        late_s = self._chains.tokens_late_s(drawn, tokens, left_s, now_s)
        if late_s > 0:
            self._refuse_late(len(inputs), left_s, late_s)
        self.counts.take(len(inputs), sum(tokens))
        self.num_unanswered += len(inputs)
        flights = []
        for chain, given, size in zip(drawn, inputs, tokens, strict=True):
            ahead, ahead_tokens = chain.num_unanswered, chain.unanswered_tokens
            chain.num_unanswered += 1
            chain.unanswered_tokens += size
            flights.append(
                Flight(given, chain, arrived_s, deadline_s, ahead=ahead, tokens=size, ahead_tokens=ahead_tokens)
            )
        return flights

    def _refuse_late(self, num_inputs: int, left_s: float, late_s: float) -> NoReturn:
        message = f"no answer is to be had within {left_s:.3g} s now, but {late_s:.3g} s later"
        self.refuse(AdmissionError(message, retry_after_s=min(late_s, LONGEST_RETRY_S)), num_inputs)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Count inputs that arrived and are not taken; raises the error."""
        self.counts.arrived += num_inputs
        self.counts.refused += num_inputs
        self.counts.drops[error.kind] += num_inputs
        raise error

    def refuse_overload(self, num_inputs: int, most: float, now_s: float) -> NoReturn:
        """Refuse what there is no room for, with what is known of when there will be; raises OverloadedError.

        Raises InputError for what there could never be room for.
        """
        if num_inputs > most:
            raise InputError(f"{num_inputs} inputs in one request; at most {most} wait here at a time")
        if not self.num_unanswered:
            self._rate.begin(now_s)
        message = f"{self.num_unanswered} inputs wait for their answers here, at most {most} are taken"
        self.refuse(OverloadedError(message, retry_after_s=self._rate.seconds_for(self.num_unanswered)), num_inputs)

    def answer(
        self,
        call: Call[Any, Any],
        flights: Flights[Any],
        block: int,
        answers: Sequence[Any],
        route: ChainRoute[Any],
        now_s: float,
    ) -> Actions:
        """Inputs of a chain are answered, those that have no outcome yet."""
        self.note(call, flights, block, route)
        fresh, answers = picked(flights, answers, _settled_now(flights))
        if not fresh:
            return []
        num_tokens = self._leave(fresh)
        self._rate.record(len(fresh), now_s)
        latencies_s = [now_s - flight.arrived_s for flight in fresh]
        self.counts.answer(block, latencies_s, num_tokens, by_present_plan=call.epoch == route.epoch)
        admission = fresh[0].chain.present.admission
        if admission is not None and block >= route.last_split:
            for flight, latency_s in zip(fresh, latencies_s, strict=True):
                admission.answered(latency_s, *admission.cost_of(flight), now_s)
        return [Answered(fresh, block, answers, latencies_s)]

    def note(self, call: Call[Any, Any], flights: Flights[Any], block: int, route: ChainRoute[Any]) -> None:
        """An exit let watched inputs leave; the first one counts."""
        if call.watch is not None and self._probes is not None:
            for flight in flights:
                self._probes.answered(flight, block, route.ramps)

    def fail(self, flights: Flights[Any], error: OfframpError, now_s: float) -> Actions:
        """Inputs get an error, for good."""
        return self.drop(flights, error.kind, error, now_s)

    def drop(self, flights: Flights[Any], reason: str, error: OfframpError | None, now_s: float) -> Actions:
        """Inputs get no answer; no `error` where their owner no longer waits for one."""
        fresh = list(compress(flights, _settled_now(flights)))
        if not fresh:
            return []
        if reason == LATE:
            self._learn_lateness(fresh, now_s)
        self._leave(fresh)
        self.counts.drops[reason] += len(fresh)
        return [Dropped(fresh, reason, error)]

    def _leave(self, flights: Flights[Any]) -> int:
        """Inputs have their outcome; how many tokens they have."""
        num_tokens = 0
        self.num_unanswered -= len(flights)
        for flight in flights:
            chain, cost = flight.chain.present, flight.cost
            chain.num_unanswered -= 1
            chain.unanswered_tokens -= cost
            num_tokens += cost
        return num_tokens

    def _learn_lateness(self, flights: Iterable[Flight[Any]], now_s: float) -> None:
        """What was dropped for its deadline would have taken longer still: left out, only the quick would be known."""
        for flight in flights:
            admission = flight.chain.present.admission
            if admission is not None:
                until_s = now_s if math.isinf(flight.deadline_s) else max(now_s, flight.deadline_s)
                admission.given_up(until_s - flight.arrived_s, *admission.cost_of(flight), now_s)


def _settled_now(flights: Flights[Any]) -> list[bool]:
    """Settle inputs; whether each had no outcome before, which one that is named twice has the second time."""
    fresh = []
    for flight in flights:
        fresh.append(not flight.settled)
        flight.settled = True
    return fresh
