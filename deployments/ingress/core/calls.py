"""Calls to stages, the core's actions, timers, and the outcomes and counts of inputs.

Every input has exactly one outcome and is counted once. Its latency updates the admission control.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, compress
from typing import Any, NamedTuple, NoReturn

from deployments.ingress.core.inputs import ASIDE, Chain, Chains, IngressOptions, Inputs, PendingInput
from deployments.ingress.core.probes import MOST_OPEN, ExitObservations, Watch
from deployments.ingress.core.routes import KVPlacement, ReplicaLoad, ReplicaT, StageReplicas, StageRoute, weight_of
from deployments.wire.messages import BUCKET, Counts
from earlyexit.errors import AdmissionError, DeadlineError, InputError, OfframpError, OverloadedError
from optimizer.plans.plan import PlacedPlan

Answers = Sequence[Any]
"""One answer per input, in the driver's form; empty where the driver has none."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """Inputs that were sent to a stage together."""

    stage: StageRoute
    inputs: Inputs
    """All inputs that the call was sent with."""
    started_s: float
    reserve_s: float
    """The expected seconds of the stages after this one, plus the slack."""
    watch: Watch | None
    """What replicas observe of its inputs; None: nothing."""
    serial: int
    """Its number in its ingress."""
    is_pending: bool
    """Whether it counts among the calls with new inputs that the first stage may have (`min_to_send`): until its batch
    has run, or is so small that another may run beside it. With `filling`, it is until any input has left."""
    counts_as_full: bool = field(default=False, init=False)
    """Whether its batch may begin beside a running one under the rule `filling`, here or on an idle replica."""
    num_remaining: int = field(default=0, init=False)
    """Inputs that have not left the call."""
    replica_load: ReplicaLoad[Any] | None = field(default=None, init=False)
    """The replica that runs it, with the load of the ingress; None before one is chosen."""
    weight: int = field(default=0, init=False)
    """Its weight in this load (`weight_of`); 0 for inputs of sequences, which are a load while their sequences last."""

    @property
    def probe(self) -> bool:
        """Whether replicas run the inputs as probes: they are probes, or unpruned copies of probes."""
        return self.watch in ("probe", "unpruned")

    def remaining(self) -> list[PendingInput]:
        """Returns the inputs that have not left the call, answered or not."""
        return [each for each in self.inputs if each.holder is self]

    def release(self, inputs: Inputs) -> list[bool]:
        """Releases inputs from this call; returns for each whether the call held it. A duplicate is released once."""
        was_held = []
        for each in inputs:
            was_held.append(each.holder is self)
            if was_held[-1]:
                each.holder = None
        return was_held

    def choose_replica(self, replicas: StageReplicas[ReplicaT], block: int) -> ReplicaT | None:
        """Chooses one of the stage's replicas to run a block; returns None if the stage has no replica.

        Inputs of sequences go to the replica that keeps their sequences, and new sequences get one here. Raises
        SequenceLostError if that replica no longer accepts calls.
        """
        slot, fills, placements = self.stage.slot, self.stage.assignment.fills, placements_of(self.inputs)
        if not replicas.num_up and not (placements and slot in placements[0].keepers):
            return None
        if placements:
            self.replica_load = replicas.replica_for(slot, placements, self.stage.budgets[0].inputs, fills=fills)
        else:
            budget = self.stage.budget(block)
            tokens = 0 if budget.tokens is None else sum([each.tokens for each in self.inputs])
            self.weight, batch = weight_of(budget, len(self.inputs), tokens)
            fills, batch_s = fills and not self.counts_as_full, self.stage.expected_s
            self.replica_load = replicas.assign(self.weight, batch, batch_s, self.started_s, fills=fills)
        return self.replica_load.replica

    def leave_replica(self) -> None:
        """Removes a call that has ended from the load of its replica."""
        if self.replica_load is not None:
            self.replica_load.load -= self.weight
            self.replica_load = None


def placements_of(inputs: Inputs) -> list[KVPlacement]:
    """Returns the KV placements of the inputs' sequences; empty if the inputs belong to no sequences."""
    return [each.placement for each in inputs if each.placement is not None]


def select(inputs: Inputs, answers: Answers, keep: Sequence[bool]) -> tuple[Inputs, Answers]:
    """Returns the inputs whose `keep` is true, with their answers if there are any."""
    if all(keep):
        return inputs, answers
    return list(compress(inputs, keep)), list(compress(answers, keep))


# The core's actions. They are tuples because a simulation creates hundreds of thousands of them.


class SendCall(NamedTuple):
    """Send a call to its stage."""

    call: Call
    block: int
    payload: Any
    """The output of the previous stage; if `enters` is set, it may contain other inputs too. None for new inputs."""
    enters: int | None = None
    """The network of the cascade for which the inputs must be encoded; None: they need no encoding."""
    rows: tuple[int, ...] | None = None
    """The rows of the payload that belong to the call; None: all."""


class ReturnAnswers(NamedTuple):
    """Give callers their answers."""

    inputs: Inputs
    block: int
    """The block after which they left."""
    answers: Answers
    latencies_s: Sequence[float]


class ReturnErrors(NamedTuple):
    """Tell callers that their inputs were dropped."""

    inputs: Inputs
    reason: str
    error: OfframpError | None
    """The error that callers get; None if they no longer wait."""


class AbortCall(NamedTuple):
    """Abort a call that has timed out."""

    call: Call


Action = SendCall | ReturnAnswers | ReturnErrors | AbortCall
Actions = list[Action]

RETRY_PAUSE_S = 0.05
"""Pause before a failed call's inputs are sent again, so that routing has noticed the dead replica by then."""
SMALL_HEAP = 64
DEADLINE, CALL_TIMEOUT, PAUSE = range(3)
"""Kinds of timers. Timers that expire at the same time are handled in this order."""
Timer = tuple[float, int, int, Inputs, str]
"""Time, kind, serial number, inputs, and after a failed call the slot that failed."""


class Timers:
    """The timers of one ingress: deadlines of requests, timeouts of calls, and pauses before another attempt.

    Nearly all requests are answered long before their deadline, so obsolete timers are removed from time to time.
    """

    __slots__ = ("_compact_at", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._serial = 0
        self._compact_at = SMALL_HEAP
        """The serial number of the timer with which obsolete ones are removed."""

    def add(self, at_s: float, kind: int, inputs: Inputs, slot: str = "") -> None:
        """Starts a timer that expires at a finite time."""
        self._serial += 1
        heappush(self._heap, (at_s, kind, self._serial, inputs, slot))
        if self._serial >= self._compact_at:
            self._heap = [timer for timer in self._heap if not _are_over(timer[3])]
            heapify(self._heap)
            self._compact_at = self._serial + len(self._heap) + SMALL_HEAP

    def next_s(self) -> float:
        """Returns when the next timer expires; infinite if there is none. Obsolete timers do not count."""
        heap = self._heap
        while heap and _are_over(heap[0][3]):
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop(self, now_s: float) -> tuple[int, Inputs, str] | None:
        """Removes and returns kind, inputs and slot of the first expired timer; None if there is none."""
        if self.next_s() > now_s:
            return None
        _, kind, _, inputs, slot = heappop(self._heap)
        return kind, inputs, slot


def _are_over(inputs: Inputs) -> bool:
    """Whether the inputs' timer is obsolete: all of them have their outcome, and no call holds any of them."""
    for each in inputs:  # noqa: SIM110 - `all` of a generator is five times slower, and this runs for every request
        if not each.settled or each.holder not in (None, ASIDE):
            return False
    return True


PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Shorter latencies share one bucket, because the logarithm of 0 is undefined."""
LATENCY_ENDS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0,
    10.0, 15.0, 20.0, 30.0, 60.0, math.inf,
)  # fmt: skip
"""The upper ends of the buckets in which latencies are reported, six per decade."""


def bucket_of(seconds: float) -> int:
    """Returns the latency bucket of a duration."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


def latencies_within(latencies: Mapping[int, int]) -> dict[str, int]:
    """Returns the cumulative counts of a Prometheus histogram: answers up to each of `LATENCY_ENDS_S`, by label."""
    counts = [0] * len(LATENCY_ENDS_S)
    for bucket, count in latencies.items():
        counts[bisect_left(LATENCY_ENDS_S, BUCKET ** (bucket + 1))] += count
    labels = ["+Inf" if math.isinf(end_s) else f"{end_s:g}" for end_s in LATENCY_ENDS_S]
    return dict(zip(labels, accumulate(counts), strict=True))


@dataclass(slots=True, kw_only=True)
class IngressCounts(Counts):
    """The counts of one ingress. Each arrived input is later counted once as answered or as dropped."""

    slo_s: float
    retries: Counter[str] = field(default_factory=Counter)
    """Inputs that were retried or lost because a replica failed, by slot."""

    def record_answers(self, block: int, latencies_s: Sequence[float], num_tokens: int) -> None:
        """Counts the answers of one exit."""
        self.answered += len(latencies_s)
        self.answered_tokens += num_tokens
        for latency_s in latencies_s:
            self.latencies[bucket_of(latency_s)] += 1
            self.in_slo += latency_s <= self.slo_s
        self.exits[block] += len(latencies_s)

    def record_crossings(self, block: int, took_s: Sequence[float], *, words: int = 0, pruned_words: int = 0) -> None:
        """Counts inputs that entered the network whose first block is `block`.

        `took_s`: the seconds that each input spent in this ingress. `words`: the words of texts that could be pruned.
        """
        self.crossings[block] += len(took_s)
        self.crossing_s[block] += sum(took_s)
        if words:
            self.words[block] += words
            self.pruned_words[block] += pruned_words


LONGEST_RETRY_S = 30.0
"""The longest Retry-After. Longer estimates are unreliable: they come from light load or from a fallen limit."""


class Unanswered:
    """The inputs of one ingress until they have their outcome, and the calls that hold them.

    A call follows the routes that are in force when it begins.
    """

    def __init__(self, placed: PlacedPlan, options: IngressOptions, make_call: type[Call]) -> None:
        self.options = options
        self.chains = Chains(placed, options)
        self.counts = IngressCounts(slo_s=options.slo_s)
        # Answered inputs that stay occupy memory in the stages too, so `max_queued` also limits them.
        self.observations = ExitObservations(options.shape, options.loss, int(min(MOST_OPEN, options.max_queued)))
        self._make_call = make_call
        self._num_calls = 0
        self._num_open: Counter[int] = Counter()
        """The number of open calls, by the epoch of the plan under which they were sent."""

    @property
    def num_unanswered(self) -> int:
        """Inputs without an outcome, in all chains."""
        return sum([chain.num_unanswered for chain in self.chains.active])

    @property
    def oldest_epoch(self) -> int:
        """The epoch of the oldest plan under which an open call was sent; the current epoch if no call is open."""
        return min(self._num_open, default=self.chains.placed.epoch)

    def enter(
        self, chain: Chain, inputs: Inputs, now_s: float, watch: Watch | None, *, is_first: bool = True
    ) -> SendCall:
        """Returns the action that sends new inputs to a chain's first network. Probes enter the model's first one."""
        network = 0 if watch == "probe" else chain.network
        return self.begin(chain, chain.starts[network], inputs, now_s, watch, enters=network, is_first=is_first)

    def begin(
        self,
        chain: Chain,
        block: int,
        inputs: Inputs,
        now_s: float,
        watch: Watch | None,
        payload: Any = None,
        *,
        enters: int | None = None,
        rows: tuple[int, ...] | None = None,
        held: Inputs | None = None,
        is_first: bool = False,
    ) -> SendCall:
        """Returns the action that sends inputs to the stage of a block, in a new call that holds them.

        `payload`, `enters` and `rows` are those of `SendCall`. `held`: the inputs that the call holds; None: all. The
        others only travel along. `is_first`: whether it takes new inputs to the first block, and so `is_pending`.
        """
        stage = chain.at(block)
        held = inputs if held is None else held
        allowed_s = self.options.slo_s
        if allowed_s == math.inf:
            allowed_s = max([each.deadline_s - each.arrived_s for each in held])
        slack_s = 0.0 if allowed_s == math.inf else self.options.slack * allowed_s
        reserve_s = chain.reserve_s(stage) + slack_s
        if reserve_s == math.inf:
            reserve_s = max(0.0, *[each.deadline_s - now_s for each in held])
        self._num_calls += 1
        call = self._make_call(stage, inputs, now_s, reserve_s, watch, self._num_calls, is_first)
        for each in held:
            each.holder = call
        call.num_remaining = len(held)
        self._num_open[stage.assignment.epoch] += 1
        if is_first:
            call.counts_as_full = self.chains.count_calls(stage.slot, +1) > 1 and stage.assignment.fills
        return SendCall(call, block, payload, enters, rows)

    def record_reply(self, call: Call, number: int, now_s: float, *, end: int) -> None:
        """Records that `number` inputs of a call came back, which ran up to block `end` (0: they were lost)."""
        if end:
            call.stage.record_time(now_s - call.started_s)
        call.num_remaining -= number
        assignment, split = call.stage.assignment, call.stage.assignment.stage.splits[0]
        if not call.num_remaining:
            self._num_open -= Counter((assignment.epoch,))  # keeps only numbers above 0
            if call.replica_load is not None:
                call.replica_load.since_s = now_s
        # A batch that shrinks below this makes room for another one. Beside a second batch, only an empty one does.
        room_below = 1 if split.side_by_side > 1 else split.overlap_below or 1
        if call.is_pending and (assignment.fills or end >= split.end or call.num_remaining < room_below):
            call.is_pending = False
            self.chains.count_calls(call.stage.slot, -1)

    def refuse_late(self, num_inputs: int, left_s: float, late_s: float) -> NoReturn:
        """Raises AdmissionError for inputs that would miss a deadline in `left_s` by `late_s`."""
        message = f"an answer within {left_s:.3g} s is not possible now; it would be {late_s:.3g} s late"
        self.refuse(AdmissionError(message, retry_after_s=min(late_s, LONGEST_RETRY_S)), num_inputs)

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        """Counts inputs that arrived and were refused; raises the error."""
        self.counts.arrived += num_inputs
        self.counts.drops[error.kind] += num_inputs
        raise error

    def check_room(self, num_inputs: int, now_s: float) -> None:
        """Raises OverloadedError, with a Retry-After, if there is no room for the inputs.

        Raises InputError for a request that could never fit.
        """
        limit, unanswered = self.options.max_queued, self.num_unanswered
        if unanswered + num_inputs <= limit:
            return
        if num_inputs > limit:
            raise InputError(f"a request has {num_inputs} inputs; this ingress holds at most {limit} at a time")
        message = f"{unanswered} inputs wait for their answers; this ingress holds at most {limit}"
        first_s = min([each.queue.inputs[0].since_s for each in self.chains.active if each.queue.inputs], default=now_s)
        # New inputs would wait about as long as the oldest queued one has. HTTP's Retry-After counts whole seconds.
        retry_after_s = min(max(1.0, now_s - first_s), LONGEST_RETRY_S)
        self.refuse(OverloadedError(message, retry_after_s=retry_after_s), num_inputs)

    def settle(self, call: Call, inputs: Inputs, block: int, answers: Answers, now_s: float) -> Actions:
        """Settles the inputs of a chain with their answers. Inputs that already have an outcome are skipped."""
        self.record_exit(call, inputs, block)
        fresh, answers = select(inputs, answers, _settled_now(inputs))
        if not fresh:
            return []
        num_tokens = self._remove_settled(fresh)
        chain = fresh[0].chain.current
        latencies_s = [now_s - each.arrived_s for each in fresh]
        self.counts.record_answers(block, latencies_s, num_tokens)
        if chain.admission.is_on and block >= chain.last_split_first:
            for each, latency_s in zip(fresh, latencies_s, strict=True):
                chain.admission.answered(latency_s, *chain.cost_of(each), now_s)
        return [ReturnAnswers(fresh, block, answers, latencies_s)]

    def record_exit(self, call: Call, inputs: Inputs, block: int) -> None:
        """Records the exit at which watched inputs left. Only the first exit of an input counts."""
        if call.watch is not None:
            for each in inputs:
                self.observations.answered(each, block, each.chain.current.ramps)

    def drop(self, inputs: Inputs, why: OfframpError | str, now_s: float) -> Actions:
        """Settles inputs without an answer. `why`: the error, or a reason if the caller no longer waits."""
        fresh = list(compress(inputs, _settled_now(inputs)))
        if not fresh:
            return []
        reason, error = (why, None) if isinstance(why, str) else (why.kind, why)
        if reason == DeadlineError.kind:
            for each in fresh:  # the time that it waited is a lower bound of its latency
                chain = each.chain.current
                waited_s = max(now_s, each.deadline_s) - each.arrived_s
                chain.admission.given_up(waited_s, *chain.cost_of(each), now_s)
        self._remove_settled(fresh)
        self.counts.drops[reason] += len(fresh)
        return [ReturnErrors(fresh, reason, error)]

    def _remove_settled(self, inputs: Inputs) -> int:
        """Moves settled inputs from their chains' unanswered to the counts; returns the sum of their tokens."""
        num_tokens = 0
        for each in inputs:
            chain, cost = each.chain.current, each.cost
            self.counts.assigned[chain.number] += 1
            chain.num_unanswered -= 1
            chain.unanswered_tokens -= cost
            num_tokens += cost
        return num_tokens


def _settled_now(inputs: Sequence[PendingInput]) -> list[bool]:
    """Settles inputs; returns for each whether it had no outcome before. A duplicate counts once."""
    fresh = []
    for each in inputs:
        fresh.append(not each.settled)
        each.settled = True
    return fresh
