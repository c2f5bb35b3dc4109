"""What becomes of inputs: each has its outcome once, counts once, and teaches admission control what it can."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, NoReturn

import numpy as np

from deployments.ingress.core.calls import Actions, Answered, Answers, Call, Dropped, picked
from deployments.ingress.core.inputs import Chains, Inputs, PendingInput, Rules
from deployments.ingress.core.probes import ExitObservations
from deployments.ingress.core.routes import ChainRoute
from deployments.wire.messages import BUCKET
from earlyexit.errors import AdmissionError, InputError, OfframpError, OverloadedError

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Shorter latencies are one bucket: a clock that stood still has no logarithm."""
MOST_UNCOUNTED = 4096
BY_KEY = ("exits", "drops", "latencies", "crossings", "crossing_s", "words", "pruned_words")
"""The counts that are kept by block, reason or bucket."""
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


def latencies_within(latencies: Mapping[int, int], ends_s: Sequence[float]) -> list[int]:
    """Returns how many answers have a bucket whose longest latency is at most each of `ends_s`."""
    between = [0] * len(ends_s)
    for bucket, count in latencies.items():
        between[bisect_left(ends_s, BUCKET ** (bucket + 1))] += count
    return list(accumulate(between))


class IngressCounts:
    """Counts the inputs of one ingress: each that arrived is, later, answered or dropped once, for one reason."""

    def __init__(self, slo_s: float | None) -> None:
        self._slo_s = math.inf if slo_s is None else slo_s
        self.arrived = 0
        self.answered = 0
        self.answered_tokens = 0
        """The tokens of the answered inputs."""
        self.exits: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.refused = 0
        """Arrived inputs that were refused; their lengths are not known."""
        self.crossings: Counter[int] = Counter()
        """Inputs that went on to another network, by its first block; the next four are by that block too."""
        self.crossing_s: defaultdict[int, float] = defaultdict(float)
        self._crossed_in: Counter[int] = Counter()
        """Crossings by latency bucket."""
        self.words: Counter[int] = Counter()
        self.pruned_words: Counter[int] = Counter()
        self._taken_tokens = 0
        self._in_slo = 0
        self._latencies: Counter[int] = Counter()
        self._uncounted_s = array("d")
        """Latencies that are in neither yet: counting them one by one would cost more than all else of an answer."""

    @property
    def in_slo(self) -> int:
        self._count()
        return self._in_slo

    @property
    def latencies(self) -> Counter[int]:
        self._count()
        return self._latencies

    def totals(self) -> dict[str, Any]:
        """Returns all counts, by the names that an `IngressReport` has for them."""
        plain = {name: getattr(self, name) for name in ("arrived", "answered", "answered_tokens", "in_slo")}
        return plain | {name: dict(getattr(self, name)) for name in BY_KEY}

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
        if by_present_plan:
            self.exits[exit_block] += len(latencies_s)

    def cross(self, block: int, took_s: Sequence[float], *, words: int = 0, pruned_words: int = 0) -> None:
        """Count inputs that went on to the network that begins with a block, each with the seconds that it waited here.

        `words`: the words of texts that could be pruned.
        """
        self.crossings[block] += len(took_s)
        self.crossing_s[block] += sum(took_s)
        for seconds, inputs in Counter(took_s).items():  # those of one call took the same
            self._crossed_in[bucket_of(seconds)] += inputs
        if words:
            self.words[block] += words
            self.pruned_words[block] += pruned_words

    def crossing_quantile_s(self, share: float) -> float | None:
        """Returns a quantile of the seconds that crossings took, at most 5 % too long; None before the first."""
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

    @property
    def unanswered_tokens(self) -> int:
        """The tokens of the inputs without an outcome."""
        return sum([chain.unanswered_tokens for chain in self._chains.active])

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

    def fail(self, inputs: Inputs, error: OfframpError, now_s: float) -> Actions:
        """Settle inputs with an error."""
        return self.drop(inputs, error.kind, error, now_s)

    def drop(self, inputs: Inputs, reason: str, error: OfframpError | None, now_s: float) -> Actions:
        """Settle inputs without an answer; no `error` where their caller no longer waits for one."""
        fresh = list(compress(inputs, _settled_now(inputs)))
        if not fresh:
            return []
        if reason == LATE:
            self._learn_lateness(fresh, now_s)
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

    def _learn_lateness(self, inputs: Inputs, now_s: float) -> None:
        """Inputs that missed their deadline would have taken longer still: without them only the quick are known."""
        for each in inputs:
            chain = each.chain.present
            if chain.admission is not None:
                until_s = now_s if math.isinf(each.deadline_s) else max(now_s, each.deadline_s)
                chain.admission.given_up(until_s - each.arrived_s, *chain.cost_of(each), now_s)


def _settled_now(inputs: Sequence[PendingInput]) -> list[bool]:
    """Settles inputs; returns whether each had no outcome before. An input that is named twice is settled once."""
    fresh = []
    for each in inputs:
        fresh.append(not each.settled)
        each.settled = True
    return fresh
