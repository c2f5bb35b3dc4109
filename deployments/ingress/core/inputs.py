"""Inputs that have no outcome yet, and the queues in which they wait to be sent: one for each chain of the plan. Pure.

An input's chain is drawn when the input arrives, and the input stays in it. When a plan has fewer chains than the plan
before it, the inputs of the chains that are no more go on in the last chain.
"""

from __future__ import annotations

import math
from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final
from weakref import WeakSet

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.routes import ChainRoute, KVPlacement, Layout, PlanRoute, least_to_call
from earlyexit.engine.queue import OrderSpec, take_from
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Answer, Budget
from earlyexit.tasks.label import differ
from optimizer.plan import Plan
from profiles.records import Loss
from profiles.stream import StreamShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The limits of one ingress."""

    max_queued: float = math.inf
    """The most inputs without an outcome."""
    calls_per_replica: int
    """The most calls to a replica of the first stage from which no input has come back."""
    max_attempts: int
    """How often an input is sent from the start before it fails."""
    slo_s: float | None = None
    slack: float = 0.0
    """Share of the SLO that stages which wait for full batches leave (E3 section 4); without an SLO, of an input's time
    from its arrival to its deadline."""
    num_ingresses: int = 1
    admits: bool = True
    """Whether requests that cannot be in time are refused; without an SLO none is."""
    shape: StreamShape | None = None
    """What is observed of probes, and of inputs that stay; None: nothing."""
    loss: Loss = differ
    """The task's, by which early answers are compared with the full model's."""
    probe_share: float = 0.0
    """Share of probes among the calls with new inputs or, for a decoder, among the sequences."""

    def admission(self, plan: Plan) -> Admission | None:
        """The admission control of one chain; None where every request is admitted."""
        if self.slo_s is None or not self.admits:
            return None
        return Admission(plan, slo_s=self.slo_s, num_ingresses=self.num_ingresses)


WHOLE: Final = -1
"""The attempt number of a whole text that travels beside the same text with pruned words."""
DUE: Final = "due"
"""The holder of the inputs of sequences that are sent next."""
Settle = Callable[["PendingInput", Answer | OfframpError], None]
"""Called with an input's outcome: once, unless the input is given up."""


@dataclass(slots=True, eq=False, repr=False)
class PendingInput:
    """One input until it has its outcome; it keeps what its caller gave, so that it can be sent again."""

    serial: int
    """Counts the inputs of its ingress."""
    arrived_s: float
    deadline_s: float
    tokens: int = 1
    """Its length for the network that it was last encoded for; 1 where inputs have no length."""
    encoded: Any = None
    """The encoded input; in a chain a `ChainEncoded`, with its row and its encoding for every network so far."""
    settle: Settle = lambda _input, _outcome: None
    key: str = field(default="", kw_only=True)
    """The caller's id of it, or an empty string."""
    request_id: str = field(default="", kw_only=True)
    """The request that it belongs to, for the log."""
    chain: Chain = field(init=False)
    """The chain that was drawn for it; set when the core takes it, as are the next three."""
    cost: int = field(default=0, init=False)
    """Its length as it arrived, by which unanswered inputs are counted."""
    ahead: int = field(default=0, init=False)
    """Inputs of its chain that had no outcome when it arrived."""
    ahead_tokens: int = field(default=0, init=False)
    """The tokens of these inputs."""
    attempt: int = field(default=0, init=False)
    settled: bool = field(default=False, init=False)
    holder: object = field(default=None, init=False)
    """The `Call` or `Pause` that has it, or `DUE`; None while it waits to be sent, and when it is over."""
    placement: KVPlacement | None = field(default=None, init=False)
    """Where its sequence's keys and values are; None for an input that belongs to no sequence."""

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        return self.arrived_s

    def whole(self) -> PendingInput:
        """Returns a copy as it arrived, to go beside it when it loses words; no caller waits for the copy's answer."""
        made = replace(self, tokens=self.cost)
        made.chain, made.attempt, made.settled = self.chain, WHOLE, True
        return made


Inputs = Sequence[PendingInput]

MANY_GONE = 64
"""Settled inputs in a queue that are not worth a search."""
_deadline_of = attrgetter("deadline_s")
_place_of = attrgetter("deadline_s", "arrived_s")
_tokens_of = attrgetter("tokens")


class WaitQueue:
    """Inputs that wait to be sent, by deadline; inputs with equal deadlines in the order of their arrival.

    With one SLO for all inputs this is first in, first out. Inputs that are sent again have their old place.
    """

    __slots__ = ("_inputs", "length", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens = 0
        """The sum over all waiting inputs."""
        self._inputs: deque[PendingInput] = deque()
        """Also holds inputs that were settled since; they are skipped in their turn."""

    def join(self, inputs: Inputs) -> None:
        """Add a request's inputs, which have one deadline."""
        waiting = self._inputs
        if not waiting or not inputs or inputs[0].deadline_s >= waiting[-1].deadline_s:
            waiting.extend(inputs)
        else:
            for each in inputs:
                insort_right(waiting, each, key=_deadline_of)
        self._count(inputs, 1)

    def rejoin(self, inputs: Inputs) -> None:
        """Add inputs again, before those of equal deadlines that arrived at the same time or later."""
        for each in reversed(inputs):
            insort_left(self._inputs, each, key=_place_of)
        self._count(inputs, 1)

    def __iter__(self) -> Iterator[PendingInput]:
        """Yields the waiting inputs, the earliest deadline first."""
        return (each for each in self._inputs if not each.settled)

    def leave(self, budget: Budget, order: OrderSpec, now_s: float) -> list[PendingInput]:
        """Removes and returns the next inputs, as many as a batch holds: at least one, if any waits."""
        if not self.length:
            return []
        if order.takes_front(self._inputs, now_s):
            leaving = self._front(budget)
        else:
            waiting = list(self)
            leaving = take_from(waiting, order, budget, now_s)
            self._inputs = deque(waiting)
        self._count(leaving, -1)
        return leaving

    def clear(self) -> list[PendingInput]:
        """Removes and returns all waiting inputs."""
        waiting = list(self)
        self.length = self.tokens = 0
        self._inputs.clear()
        return waiting

    def forget(self, gone: Inputs) -> None:
        """Removes inputs that waited here and were settled just now."""
        self._count(gone, -1)
        inputs = self._inputs
        while inputs and inputs[0].settled:
            inputs.popleft()
        if len(inputs) > 2 * self.length + MANY_GONE:
            self._inputs = deque(self)

    def _count(self, inputs: Inputs, sign: int) -> None:
        self.length += sign * len(inputs)
        self.tokens += sign * sum(map(_tokens_of, inputs))

    def _front(self, budget: Budget) -> list[PendingInput]:
        inputs, most, tokens = self._inputs, min(budget.inputs, self.length), 0
        leaving: list[PendingInput] = []
        while len(leaving) < most:
            first = inputs[0]
            if not first.settled:
                if budget.tokens is not None and not budget.room_for(len(leaving), tokens, first.tokens):
                    break
                leaving.append(first)
                tokens += first.tokens
            inputs.popleft()
        return leaving


class Chain:
    """One chain of the plan in force: the queue at its entrance, and the inputs inside that have no outcome."""

    def __init__(self, route: ChainRoute, share: float, admission: Admission | None) -> None:
        self.route = route
        self.share = share
        self.queue = WaitQueue()
        self.least: float = 1
        """New inputs that must wait for a call to be made."""
        self.least_tokens: float = math.inf
        """Tokens that suffice instead."""
        self.admission = admission
        self.num_unanswered = 0
        self.unanswered_tokens = 0
        """The tokens of these inputs."""
        self.present = self
        """The chain that has its inputs: another one once the plan has fewer chains."""
        self._ended: WeakSet[Chain] = WeakSet()
        """Chains whose inputs it has, while any of these inputs exist."""

    @property
    def is_due(self) -> bool:
        """Whether a call with new inputs would be made now."""
        return self.queue.length >= self.least or self.queue.tokens >= self.least_tokens

    def take(self, pending: PendingInput) -> None:
        """Count an input that arrived."""
        pending.chain, pending.cost = self, pending.tokens
        pending.ahead, pending.ahead_tokens = self.num_unanswered, self.unanswered_tokens
        self.num_unanswered += 1
        self.unanswered_tokens += pending.cost

    def cost_of(self, pending: PendingInput) -> tuple[int, int]:
        """What was unanswered when an input arrived and what it costs itself, in the unit of admission control."""
        if self.admission is not None and self.admission.counts_tokens:
            return pending.ahead_tokens, pending.cost
        return pending.ahead, 1

    def late_s(self, num_inputs: int, num_coming: float, per_input: float, left_s: float, now_s: float) -> float:
        """Seconds by which inputs with `left_s` until their deadline would be late, before their lengths are known.

        See `Admission.late_s`. `num_coming`: inputs that were admitted before and are still to be submitted, each with
        `per_input` tokens. Where tokens count, nothing is shorter than one token: an input that is refused now would be
        refused when its length is known.
        """
        if self.admission is None:
            return 0.0
        if self.admission.counts_tokens:
            unanswered = self.unanswered_tokens + num_coming * per_input
        else:
            unanswered = self.num_unanswered + num_coming
        return self.admission.late_s(num_inputs, left_s, unanswered=unanswered, now_s=now_s)

    def tokens_late_s(self, num_tokens: int, left_s: float, now_s: float) -> float:
        """The same for inputs whose tokens are known; 0 where inputs count, which `late_s` has checked."""
        if self.admission is None or not self.admission.counts_tokens:
            return 0.0
        return self.admission.late_s(num_tokens, left_s, unanswered=self.unanswered_tokens, now_s=now_s)

    def end(self, successor: Chain) -> None:
        """Pass all inputs, also those that wait, to another chain: the plan does not have this one any more."""
        for chain in (self, *self._ended):
            chain.present = successor
            successor._ended.add(chain)
        successor.num_unanswered += self.num_unanswered
        successor.unanswered_tokens += self.unanswered_tokens
        successor.queue.rejoin(self.queue.clear())


SHARE_UNITS = 10**6
"""The units into which a chain's share is divided."""


class RoundRobin:
    """Smooth weighted round-robin, as nginx draws its upstream servers.

    Every draw adds to each current weight its share, takes the largest (of equal ones the first), and subtracts the sum
    of the shares from it. The draws of a chain are spread evenly over those of the others.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        # Whole numbers: rounding errors of sums would decide between chains of equal shares.
        self._weights = tuple(max(1, round(share * SHARE_UNITS)) for share in shares)
        self._total = sum(self._weights)
        self._current = [0] * len(self._weights)

    def draw(self, number: int) -> list[int]:
        """Returns so many positions, in the order in which they were drawn."""
        current, drawn = self._current, []
        for _ in range(number):
            for position, weight in enumerate(self._weights):
                current[position] += weight
            chosen = current.index(max(current))
            current[chosen] -= self._total
            drawn.append(chosen)
        return drawn

    def peek(self, number: int) -> list[int]:
        """Returns what `draw` would return, and draws nothing."""
        before = list(self._current)
        drawn = self.draw(number)
        self._current = before
        return drawn


class Chains:
    """All chains of the plan in force, in the plan's order."""

    def __init__(self, route: PlanRoute, rules: Rules) -> None:
        self.route = route
        self._rules = rules
        self._unheard: Counter[str] = Counter()
        """Calls of new inputs from which nothing has come back, by slot."""
        self.active: list[Chain] = []
        self.follow(route, None)

    def follow(self, route: PlanRoute, tokens_per_input: float | None) -> None:
        """Follow another plan from now on. `tokens_per_input`: of the inputs so far; None before the first."""
        is_new = route.epoch > self.route.epoch
        self.route = route
        before, shares, rules = self.active, route.placed.plan.shares, self._rules
        for chain, its_route, share in zip(before, route.chains, shares, strict=False):
            chain.route, chain.share = its_route, share
            if is_new and chain.admission is not None:
                chain.admission.follow(its_route.plan, tokens_per_input)
        self.active = before[: len(route.chains)]
        for its_route, share in zip(route.chains[len(before) :], shares[len(before) :], strict=True):
            self.active.append(Chain(its_route, share, rules.admission(its_route.plan)))
        for chain in before[len(route.chains) :]:
            chain.end(self.active[-1])
        self._turns = RoundRobin(shares)
        for chain in self.active:
            self._update(chain)

    def draw(self, number: int) -> list[Chain]:
        """Draws the chains of the next inputs, one each."""
        if len(self.active) == 1:
            return self.active * number
        return [self.active[position] for position in self._turns.draw(number)]

    def late_s(self, num_inputs: int, num_coming: int, per_input: float, left_s: float, now_s: float) -> float:
        """Seconds by which the inputs of a request would be late in the chains that are next; see `Chain.late_s`.

        A request that would be late has had its turn: other chains are next.
        """
        if len(self.active) == 1:
            return self.active[0].late_s(num_inputs, num_coming, per_input, left_s, now_s)
        for position, number in Counter(self._turns.peek(num_inputs)).items():
            chain = self.active[position]
            late_s = chain.late_s(number, num_coming * chain.share, per_input, left_s, now_s)
            if late_s > 0:
                self._turns.draw(num_inputs)
                return late_s
        return 0.0

    def tokens_late_s(self, drawn: Sequence[Chain], inputs: Inputs, left_s: float, now_s: float) -> float:
        """Seconds by which inputs would be late in the chains that were drawn for them, now that they have lengths."""
        if len(self.active) == 1:
            return self.active[0].tokens_late_s(sum(map(_tokens_of, inputs)), left_s, now_s)
        tokens_of: Counter[Chain] = Counter()
        for chain, each in zip(drawn, inputs, strict=True):
            tokens_of[chain] += each.tokens
        return max([chain.tokens_late_s(tokens, left_s, now_s) for chain, tokens in tokens_of.items()])

    def of_layout(self, layout: Layout | None) -> Chain | None:
        """Returns the chain whose stages keep keys and values so; None if the plan has none."""
        return next((chain for chain in self.active if chain.route.layout == layout), None)

    def count(self, slot: str, change: int) -> None:
        """Note that so many more (or fewer) calls of new inputs to a slot are unheard."""
        self._unheard[slot] += change
        for chain in self.active:
            if chain.route.first.slot == slot:
                self._update(chain)

    def _update(self, chain: Chain) -> None:
        """Recompute how many inputs must wait for a call, from the calls that are unheard now."""
        first = chain.route.first
        chain.least, chain.least_tokens = least_to_call(
            first.budgets[0],
            unheard=self._unheard[first.slot],
            batches=first.planned.replicas * first.planned.splits[0].side_by_side,
            calls_per_batch=self._rules.calls_per_replica,
            fills=first.assignment.fills,
        )

    def apart(self, inputs: Inputs) -> list[tuple[Chain, Inputs]]:
        """Groups inputs by the chain that has them now."""
        if len(self.active) == 1:
            return [(self.active[0], inputs)]
        parts: dict[Chain, list[PendingInput]] = {}
        for each in inputs:
            parts.setdefault(each.chain.present, []).append(each)
        return list(parts.items())

    def clear(self) -> list[PendingInput]:
        """Removes and returns all inputs that wait at the entrances."""
        return [each for chain in self.active for each in chain.queue.clear()]

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """Returns the longest wait so far in seconds, by length class: a power of two that bounds its lengths."""
        oldest: dict[int, float] = {}
        for each in [each for chain in self.active for each in chain.queue]:
            length = 1 << max(0, each.tokens - 1).bit_length()
            oldest[length] = max(now_s - each.since_s, oldest.get(length, 0.0))
        return dict(sorted(oldest.items()))
