"""The chains of a plan at one ingress: which of them an input enters, where it waits, and how many may be inside. Pure.

An input's chain is drawn when the input arrives, and the input stays in it. When a plan has fewer chains than the plan
before it, the inputs of the chains that are no more go on in the last chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.queue import BatchingPolicy, Waiting, WaitQueue
from deployments.ingress.core.routes import ChainRoute, Layout, PlanRoute, W
from optimizer.plan import Plan

SHARE_UNITS = 10**6
"""Into which a share is divided."""


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


class InChain(Waiting, Protocol):
    """An input whose chain was drawn."""

    @property
    def chain(self) -> Chain[Any, Any]: ...


F = TypeVar("F", bound=InChain)
AdmissionOf = Callable[[Plan], Admission | None]
"""Makes the admission control of a chain; None where there is none."""


class Chain(Generic[F, W]):
    """One chain of the plan in force: the queue at its entrance, and the inputs inside that have no outcome."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "admission",
        "departures",
        "line",
        "num_unanswered",
        "present",
        "route",
        "share",
        "unanswered_tokens",
    )

    def __init__(
        self, route: ChainRoute[W], share: float, departures: BatchingPolicy, admission: Admission | None
    ) -> None:
        self.route = route
        self.share = share
        self.line: WaitQueue[F] = WaitQueue()
        self.departures = departures
        self.admission = admission
        self.num_unanswered = 0
        self.unanswered_tokens = 0
        """Of these inputs."""
        self.present: Chain[F, W] = self
        """The chain that has its inputs: another one since the plan has fewer chains."""
        self._ended: WeakSet[Chain[F, W]] = WeakSet()
        """Chains whose inputs it has, while there are any of these inputs."""

    @property
    def is_due(self) -> bool:
        """Whether a call with new inputs would be made now."""
        line, departures = self.line, self.departures
        return line.length >= departures.least or line.tokens >= departures.least_tokens

    def late_s(self, num_inputs: int, num_coming: float, per_input: float, left_s: float, now_s: float) -> float:
        """Seconds by which inputs with `left_s` until their deadline would be late, before their lengths are known.

        See `Admission.late_s`. `num_coming`: inputs that were let in before and are still to be submitted, each with
        `per_input` tokens. Where tokens count, nothing is shorter than one token: an input that is refused now would be
        refused when its length is known.
        """
        admission = self.admission
        if admission is None:
            return 0.0
        if admission.counts_tokens:
            unanswered = self.unanswered_tokens + num_coming * per_input
        else:
            unanswered = self.num_unanswered + num_coming
        return admission.late_s(num_inputs, left_s, unanswered=unanswered, now_s=now_s)

    def tokens_late_s(self, num_tokens: int, left_s: float, now_s: float) -> float:
        """The same of inputs whose tokens are known; 0 where inputs count, for those were looked at before."""
        admission = self.admission
        if admission is None or not admission.counts_tokens:
            return 0.0
        return admission.late_s(num_tokens, left_s, unanswered=self.unanswered_tokens, now_s=now_s)

    def end(self, successor: Chain[F, W]) -> None:
        """The plan has no such chain any more: another one has its inputs from now on, also those that wait."""
        for chain in (self, *self._ended):
            chain.present = successor
            successor._ended.add(chain)
        successor.num_unanswered += self.num_unanswered
        successor.unanswered_tokens += self.unanswered_tokens
        successor.line.rejoin(self.line.clear())


class Chains(Generic[F, W]):
    """All chains of the plan in force, in the plan's order."""

    def __init__(self, route: PlanRoute[W], calls_per_replica: int, admission_of: AdmissionOf) -> None:
        self.route = route
        self._calls_per_replica = calls_per_replica
        self._admission_of = admission_of
        self._unheard: Counter[str] = Counter()
        """Calls of new inputs that nothing has come back from, by slot."""
        self.active: list[Chain[F, W]] = []
        self.follow(route, None)

    def follow(self, route: PlanRoute[W], tokens_per_input: float | None) -> None:
        """Go by another plan from now on. `tokens_per_input`: of the inputs so far; None where there were none."""
        is_new = route.epoch > self.route.epoch
        self.route = route
        before, shares = self.active, route.placed.plan.shares
        for chain, its_route, share in zip(before, route.chains, shares, strict=False):
            chain.route, chain.share = its_route, share
            chain.departures.follow(its_route.first)
            if is_new and chain.admission is not None:
                chain.admission.follow(its_route.plan, tokens_per_input)
        self.active = before[: len(route.chains)]
        for its_route, share in zip(route.chains[len(before) :], shares[len(before) :], strict=True):
            departures = BatchingPolicy(its_route.first, self._calls_per_replica, self._unheard)
            self.active.append(Chain(its_route, share, departures, self._admission_of(its_route.plan)))
        for chain in before[len(route.chains) :]:
            chain.end(self.active[-1])
        self._turns = RoundRobin(shares)

    def draw(self, number: int) -> list[Chain[F, W]]:
        """The chains of the next inputs, one each."""
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

    def tokens_late_s(self, drawn: Sequence[Chain[F, W]], tokens: Sequence[int], left_s: float, now_s: float) -> float:
        """Seconds by which inputs would be late in the chains that were drawn for them, now that they have lengths."""
        if len(self.active) == 1:
            return self.active[0].tokens_late_s(sum(tokens), left_s, now_s)
        of_chain: Counter[Chain[F, W]] = Counter()
        for chain, size in zip(drawn, tokens, strict=True):
            of_chain[chain] += size
        return max([chain.tokens_late_s(size, left_s, now_s) for chain, size in of_chain.items()])

    def of_layout(self, layout: Layout | None) -> Chain[F, W] | None:
        """The chain whose stages keep keys and values so; None where the plan has none."""
        return next((chain for chain in self.active if chain.route.layout == layout), None)

    def count(self, slot: str, change: int) -> None:
        """So many more calls of new inputs to a slot are unheard of, or fewer."""
        self._unheard[slot] += change
        for chain in self.active:
            if chain.route.first.slot == slot:
                chain.departures.update()

    def apart(self, flights: Sequence[F]) -> list[tuple[Chain[F, W], Sequence[F]]]:
        """Inputs by the chain that has them now."""
        if len(self.active) == 1:
            return [(self.active[0], flights)]
        parts: dict[Chain[F, W], list[F]] = {}
        for flight in flights:
            parts.setdefault(flight.chain.present, []).append(flight)
        return list(parts.items())

    def clear(self) -> list[F]:
        """Removes and returns all inputs that wait at the entrances."""
        return [flight for chain in self.active for flight in chain.line.clear()]

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """How long the input that has waited longest has, by length class."""
        oldest: dict[int, float] = {}
        for chain in self.active:
            for length, seconds in chain.line.oldest_s(now_s).items():
                oldest[length] = max(seconds, oldest.get(length, 0.0))
        return dict(sorted(oldest.items()))
