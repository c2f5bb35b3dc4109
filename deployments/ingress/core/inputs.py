"""Pending inputs and the queues in which they wait to be sent: one queue for each chain of the plan. Pure.

An input's chain is drawn when the input arrives. If a new plan has fewer chains, the inputs of the removed chains move
to others. So do queued inputs of a chain that cannot run, because a stage has no replica.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort_left, insort_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, Final

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.routes import KVPlacement, Layout, StageRoute, crossings_of, min_to_send, stage_routes
from deployments.wire.messages import Assignment, ChainLoad, assignments_of
from earlyexit.engine.queue import OrderSpec, take_from
from earlyexit.errors import ExecutionError, OfframpError, PlanError
from earlyexit.network.boundary import Answer, Budget
from earlyexit.tasks.label import label_loss
from optimizer.plans.plan import PlacedPlan, Plan
from profiles.records import Loss
from profiles.stream import StreamShape


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressOptions:
    """Limits and settings of one ingress."""

    max_queued: float = math.inf
    """The largest number of inputs without an outcome."""
    calls_per_replica: int = 2
    """The largest number of pending calls per replica of the first stage. The first call takes all waiting inputs.
    Further calls queue at the replica, and are sent only with a full batch; with `filling`, none is sent."""
    max_attempts: int = 8
    """The number of attempts after which an input fails, or of losses in a row after which a sequence fails."""
    slo_s: float = math.inf
    """Infinite without an SLO, like the next two."""
    ttft_slo_s: float = math.inf
    """SLO of a sequence's time to first token."""
    tpot_slo_s: float = math.inf
    """SLO of a sequence's mean time per token after the first."""
    slack: float = 0.0
    """The share of the SLO that stages with deferred dispatch keep as a reserve (E3 section 4). Without an SLO, the
    share of the time from an input's arrival to its deadline."""
    num_ingresses: int = 1
    admits: bool = True
    """Whether requests that would be late are refused. Without an SLO none is refused."""
    shape: StreamShape | None = None
    """What is observed of probes and of inputs that stay; None: nothing."""
    loss: Loss = label_loss
    """The task's loss between early answers and the full model's answers."""
    probe_share: float = 0.0
    """The share of probes among the calls with new inputs or, for a decoder, among the sequences."""


UNPRUNED: Final = -1
"""The attempt number of an unpruned copy, which is sent in addition to its probe."""
ASIDE: Final = "aside"
"""The `holder` of inputs that are neither queued nor in a call: after a failed call, and steps of sequences."""
CALL_GRACE_S = 1.0
"""How long after the last deadline of its inputs a call is aborted. Until then its inputs may be observed."""
Settle = Callable[["PendingInput", Answer | OfframpError], None]
"""The callback for an input's outcome. It is called once, or never if the input is given up."""


@dataclass(slots=True, eq=False, repr=False)
class PendingInput:
    """One input until it has its outcome. It keeps the caller's data, so that it can be sent again."""

    serial: int
    """The number of the input in its ingress."""
    arrived_s: float
    deadline_s: float
    tokens: int = 1
    """Its length for the network that it was last encoded for; 1 if inputs have no lengths."""
    encoded: Any = None
    """The encoded input. In a cascade it is a `ChainEncoded`: the row, and its encoding for each network so far."""
    settle: Settle = lambda _input, _outcome: None
    key: str = field(default="", kw_only=True)
    """The caller's id of it, or an empty string."""
    request_id: str = field(default="", kw_only=True)
    """The id of its request, for the log."""
    placement: KVPlacement | None = field(default=None, kw_only=True)
    """The KV placement of its sequence; None if it belongs to no sequence."""
    chain: Chain = field(init=False)
    """The chain that was drawn for it. `Chains.assign` sets this field and the next three."""
    cost: int = field(default=0, init=False)
    """Its length at arrival. The tokens of unanswered inputs are counted by it."""
    ahead: int = field(default=0, init=False)
    """The number of unanswered inputs of its chain when it arrived."""
    ahead_tokens: int = field(default=0, init=False)
    """The tokens of these inputs."""
    attempt: int = field(default=0, init=False)
    settled: bool = field(default=False, init=False)
    holder: object = field(default=None, init=False)
    """The `Call` that holds it, or `ASIDE`. None while it is queued, and after its end."""

    @property
    def since_s(self) -> float:
        """The time from which on it waits (for `OrderSpec`)."""
        return self.arrived_s


def sample_id_of(ingress: str, pending: PendingInput) -> str:
    """Returns the id that an input has on the wire: unique in the service and for each attempt."""
    return f"{pending.key}#{ingress}.{pending.serial}.{pending.attempt}"


Inputs = Sequence[PendingInput]

_deadline_of = attrgetter("deadline_s")
_order_of = attrgetter("deadline_s", "arrived_s")
_tokens_of = attrgetter("tokens")


class WaitQueue:
    """Inputs that wait to be sent, ordered by deadline and then by arrival.

    With one SLO for all inputs this is first in, first out. An input that is retried returns to its old position.
    """

    __slots__ = ("inputs", "tokens")

    def __init__(self) -> None:
        self.inputs: list[PendingInput] = []
        self.tokens = 0
        """The tokens of all waiting inputs."""

    def push(self, inputs: Inputs) -> None:
        """Adds the inputs of a request, which have the same deadline."""
        waiting = self.inputs
        if not waiting or inputs[0].deadline_s >= waiting[-1].deadline_s:
            waiting.extend(inputs)
        else:
            for each in inputs:
                insort_right(waiting, each, key=_deadline_of)
        self.tokens += sum(map(_tokens_of, inputs))

    def requeue(self, inputs: Inputs) -> None:
        """Adds inputs again, in front of inputs with the same deadline and the same arrival."""
        for each in reversed(inputs):
            insort_left(self.inputs, each, key=_order_of)
        self.tokens += sum(map(_tokens_of, inputs))

    def pop_batch(self, budget: Budget, order: OrderSpec, now_s: float) -> list[PendingInput]:
        """Removes and returns the next batch within a budget. At least one input must wait."""
        batch = take_from(self.inputs, order, budget, now_s)
        self.tokens -= sum(map(_tokens_of, batch))
        return batch

    def clear(self) -> list[PendingInput]:
        """Removes and returns all waiting inputs."""
        waiting, self.inputs, self.tokens = self.inputs, [], 0
        return waiting

    def discard(self, settled: Inputs) -> None:
        """Removes queued inputs that have just been settled."""
        deadlines_s = [each.deadline_s for each in settled]
        first = bisect_left(self.inputs, min(deadlines_s), key=_deadline_of)
        end = bisect_right(self.inputs, max(deadlines_s), lo=first, key=_deadline_of)
        self.inputs[first:end] = [each for each in self.inputs[first:end] if not each.settled]
        self.tokens -= sum(map(_tokens_of, settled))


SHARE_UNITS = 10**6
"""Shares are rounded to multiples of 1 / SHARE_UNITS, because rounding errors would decide between equal shares."""


class Chain:
    """One chain of the current plan: its stages, its queue, its admission control, and its unanswered inputs."""

    def __init__(self, options: IngressOptions, plan: Plan, block_s: Sequence[float]) -> None:
        """`plan`: the plan that it must then `follow`. `block_s`: the expected seconds of every block."""
        self.stages: tuple[StageRoute, ...] = ()
        self.block_s = [*block_s]
        self.queue = WaitQueue()
        self.min_inputs: float = 1
        """A call is sent as soon as this many new inputs wait."""
        self.min_tokens: float = math.inf
        """A call is also sent as soon as the waiting inputs have this many tokens."""
        slo_s = options.slo_s if options.admits else math.inf
        self.admission = Admission(plan, slo_s=slo_s, num_ingresses=options.num_ingresses)
        self.num_unanswered = 0
        self.unanswered_tokens = 0
        """The tokens of the unanswered inputs."""
        self._successor: Chain | None = None
        """The chain that got the inputs of this chain, after `merge_into`."""

    def follow(self, number: int, plan: Plan, share: float, assignments: Iterable[Assignment]) -> None:
        """Switches to a chain of another plan.

        `number`: its position in that plan. `plan`: the plan of the chain. `assignments`: one for each stage.
        """
        for stage in self.stages:  # exact for unchanged stages and close enough for others
            num_blocks = len(stage.budgets)
            self.block_s[stage.first : stage.end] = [stage.expected_s / num_blocks] * num_blocks
        self.number, self.plan, self.share, self.weight = number, plan, share, max(1, round(share * SHARE_UNITS))
        self.turn = 0
        """Its current weight in the round-robin of `Chains.draw`."""
        self.stages = stage_routes(plan, assignments, self.block_s)
        self.first_stage, self.ramps = self.stages[0], frozenset(plan.ramps)
        self.types = {stage.device for stage in plan.stages}
        self.last_split_first = plan.splits[-1].first
        self.starts, self.network = (0, *plan.networks[:-1]), plan.used[0]
        """The first block of each network, and the network that inputs enter first."""
        self.layout: Layout = tuple((stage.slot, stage.first, stage.end) for stage in self.stages)
        self._crossings = crossings_of(plan)
        self._stage_of = {block: stage for stage in self.stages for block in range(stage.first, stage.end)}
        # In a network that the plan skips, inputs continue at the first block of the next network.
        starts = {block: self.starts[network] for block, network in self._crossings.items()}
        self._stage_of |= {block: self._stage_of[start] for block, start in starts.items()}

    def at(self, block: int) -> StageRoute:
        """Returns the stage that runs a block. For a skipped network, it is the stage where the next network begins."""
        return self._stage_of[block]

    def crossing(self, block: int, *, probe: bool) -> int | None:
        """Returns the network that inputs waiting for a block enter; None if they stay in their network.

        Probes enter every network, whether the plan uses it or not.
        """
        if probe and self._crossings:
            return self.starts.index(block) if block in self.starts else None
        return self._crossings.get(block)

    def reserve_s(self, stage: StageRoute) -> float:
        """Returns the expected seconds of the stages after this one.

        The reserve is infinite if this stage defers batches and the time of a later stage is unknown.
        """
        sum_s = 0.0
        for later in [each for each in self.stages if each.first > stage.first]:
            if not later.expected_s and stage.assignment.dispatch == "deferred":
                return math.inf
            sum_s += later.expected_s
        return sum_s

    @property
    def load(self) -> ChainLoad:
        """Its unanswered inputs and their limit."""
        cost = self.cost(self.num_unanswered, self.unanswered_tokens)
        return ChainLoad(unanswered=self.num_unanswered, cost=cost, limit=self.admission.limit)

    @property
    def current(self) -> Chain:
        """The chain that now has the inputs of this chain."""
        return self if self._successor is None else self._successor.current

    @property
    def is_due(self) -> bool:
        """Whether a call with new inputs can be sent now."""
        return len(self.queue.inputs) >= self.min_inputs or self.queue.tokens >= self.min_tokens

    def cost(self, num_inputs: float, num_tokens: float) -> float:
        """Returns the cost of inputs with their tokens, in admission control's unit."""
        return num_tokens if self.admission.counts_tokens else num_inputs

    def cost_of(self, pending: PendingInput) -> tuple[float, float]:
        """Returns the cost of the unanswered inputs when an input arrived, and its own."""
        return self.cost(pending.ahead, pending.ahead_tokens), self.cost(1, pending.cost)

    def merge_into(self, successor: Chain) -> None:
        """Passes all inputs to another chain, because the new plan does not have this chain."""
        self._successor = successor
        successor.num_unanswered += self.num_unanswered
        successor.unanswered_tokens += self.unanswered_tokens
        successor.queue.requeue(self.queue.clear())


def _kept(before: Sequence[Chain], chains: Sequence[Plan]) -> dict[int, Chain]:
    """Returns the earlier chain that becomes each chain of a new plan, by number, and merges the others into these.

    If possible, it is a chain on the same accelerator types, so that limits and waiting inputs fit.
    """
    kept: dict[int, Chain] = {}
    types = [{stage.device for stage in own.stages} for own in chains]
    for chain in sorted(before, key=lambda each: each.types not in types):
        number = min(range(len(types)), key=lambda other: (types[other] != chain.types, other in kept))
        if kept.setdefault(number, chain) is not chain:
            chain.merge_into(kept[number])
    return kept


def _next_of(chains: Sequence[Chain]) -> Chain:
    """Returns the chain that gets the next input; see `Chains.draw`."""
    for chain in chains:
        chain.turn += chain.weight
    chosen = max(chains, key=lambda chain: chain.turn)
    chosen.turn -= sum([chain.weight for chain in chains])
    return chosen


class Chains:
    """All chains of the current plan, in the plan's order."""

    def __init__(self, placed: PlacedPlan, options: IngressOptions) -> None:
        self.placed = placed
        self._options = options
        self._pending_calls: Counter[str] = Counter()
        """The number of pending calls, by slot."""
        self._num_taken = self._tokens_taken = 0
        self.active: list[Chain] = []
        self.follow(placed)

    def follow(self, placed: PlacedPlan) -> None:
        """Switches to another plan. Raises PlanError for a plan of another model."""
        before, plan = self.placed.plan, placed.plan
        if before.num_blocks != plan.num_blocks:
            raise PlanError(f"a plan of {plan.num_blocks} blocks cannot follow one of {before.num_blocks}")
        if before.networks != plan.networks:
            ends, ends_before = list(plan.networks), list(before.networks)
            raise PlanError(f"a plan of networks that end at {ends} cannot follow one of {ends_before}")
        is_new, self.placed = plan.epoch > before.epoch, placed
        self.stays = plan.after_answer == "stay"
        block_s = self.active[0].block_s if self.active else [0.0] * plan.num_blocks
        self.assignments = assignments_of(placed)
        """The assignment of each slot."""
        chains, assignments = plan.chains, iter(self.assignments.values())
        kept = _kept(self.active, chains)
        self.active = [kept.get(number) or Chain(self._options, own, block_s) for number, own in enumerate(chains)]
        for number, (chain, own, share) in enumerate(zip(self.active, chains, plan.shares, strict=True)):
            if is_new:
                chain.admission.follow(own, self._tokens_per_input)
            chain.follow(number, own, share, islice(assignments, len(own.stages)))
            self._update(chain)
        self.set_available({})  # until the driver knows the replicas of the plan's slots

    def set_available(self, replicas: Mapping[str, int]) -> None:
        """Sets the number of replicas by slot. Inputs that wait in a chain that cannot run move to those that can."""
        running = [chain for chain in self.active if all(replicas.get(stage.slot) for stage in chain.stages)]
        for chain in running:  # it serves as many inputs as its scarcest stage
            part = min([replicas[stage.slot] / stage.assignment.stage.replicas for stage in chain.stages])
            chain.weight = max(1, round(min(1.0, part) * chain.share * SHARE_UNITS))
        self.can_run = bool(running)
        """Whether any chain has a replica for every stage."""
        self.usable = running or self.active
        """The chains that get inputs: those that can run, or all if none can."""
        for chain in self.active:
            if chain not in self.usable:
                self.requeue(chain.queue.clear())

    @property
    def _tokens_per_input(self) -> float | None:
        """The mean tokens of the inputs so far; None before the first."""
        return self._tokens_taken / self._num_taken if self._num_taken else None

    def check_block(self, block: int) -> None:
        """Raises ExecutionError for a block that the model does not have."""
        num_blocks = len(self.active[0].block_s)
        if not 0 <= block < num_blocks:
            raise ExecutionError(f"a reply names block {block}; the model has blocks 0 to {num_blocks - 1}")

    def draw(
        self, lengths: Sequence[int], left_s: float, now_s: float, num_coming: int = 0
    ) -> tuple[list[Chain], float]:
        """Draws a chain for each input of a request; also returns by how many seconds the request would be late.

        It is a smooth weighted round-robin, as nginx uses it for upstream servers, among the chains in which an input
        would be the least late: usually among all. Every draw adds the weight of each of them to its turn, takes the
        one with the largest turn (the first of equal ones), and subtracts the sum of the weights from it. So draws of
        every chain are spread evenly. Chains that cannot run keep their turns.
        """
        if len(self.usable) == 1:
            [only] = self.usable
            cost = only.cost(len(lengths), sum(lengths))
            return self.usable * len(lengths), self._delay_s(only, cost, left_s, now_s, num_coming)
        drawn, late_s, costs = list[Chain](), 0.0, dict.fromkeys(self.usable, 0.0)
        for length in lengths:
            delays_s = {
                chain: self._delay_s(chain, costs[chain] + chain.cost(1, length), left_s, now_s, num_coming)
                for chain in self.usable
            }
            least_s = min(delays_s.values())
            chosen = _next_of([chain for chain in self.usable if delays_s[chain] == least_s])
            costs[chosen] += chosen.cost(1, length)
            drawn.append(chosen)
            late_s = max(late_s, least_s)
        return drawn, late_s

    def _delay_s(self, chain: Chain, cost: float, left_s: float, now_s: float, num_coming: int) -> float:
        """Returns by how many seconds inputs of this cost would be late in a chain. See `Admission.late_s`."""
        unanswered = chain.cost(chain.num_unanswered, chain.unanswered_tokens)
        if num_coming:
            share = chain.weight / sum([each.weight for each in self.usable])
            unanswered += num_coming * share * chain.cost(1, self._tokens_per_input or 1.0)
        return chain.admission.late_s(cost, left_s, unanswered=unanswered, now_s=now_s)

    def assign(self, drawn: Sequence[Chain], inputs: Inputs) -> None:
        """Assigns new inputs to the chains that were drawn for them."""
        for chain, each in zip(drawn, inputs, strict=True):
            each.chain, each.cost = chain, each.tokens
            each.ahead, each.ahead_tokens = chain.num_unanswered, chain.unanswered_tokens
            chain.num_unanswered += 1
            chain.unanswered_tokens += each.cost
            self._tokens_taken += each.cost
        self._num_taken += len(inputs)

    def late_s(self, num_inputs: int, num_coming: int, left_s: float, now_s: float) -> float:
        """Returns by how many seconds a request would be late, and draws no chain.

        Each input counts as one token, so no input is refused that would be admitted once its length is known.
        """
        turns = [chain.turn for chain in self.active]
        _, late_s = self.draw([1] * num_inputs, left_s, now_s, num_coming)
        for chain, turn in zip(self.active, turns, strict=True):
            chain.turn = turn
        return late_s

    def with_layout(self, layout: Layout | None) -> Chain | None:
        """Returns the chain whose stages have this KV layout; None if the plan has no such chain."""
        return next((chain for chain in self.active if chain.layout == layout), None)

    def count_calls(self, slot: str, change: int) -> int:
        """Changes the number of pending calls to a slot, and returns it."""
        self._pending_calls[slot] += change
        for chain in self.active:
            if chain.first_stage.slot == slot:
                self._update(chain)
        return self._pending_calls[slot]

    def _update(self, chain: Chain) -> None:
        """Recomputes how many inputs must wait before the next call, from the pending calls."""
        first, stage = chain.first_stage, chain.first_stage.assignment.stage
        chain.min_inputs, chain.min_tokens = min_to_send(
            first.budgets[0],
            pending_calls=self._pending_calls[first.slot],
            batches=stage.replicas * stage.splits[0].side_by_side,
            calls_per_batch=self._options.calls_per_replica,
            fills=first.assignment.fills,
            limit=chain.admission.limit,
        )

    def requeue(self, inputs: Inputs) -> None:
        """Queues inputs that are to start again. Those of a chain that cannot run move to one that can."""
        for each in inputs:
            chain = each.chain.current
            if chain not in self.usable:
                chain.num_unanswered -= 1
                chain.unanswered_tokens -= each.cost
                self.assign([_next_of(self.usable)], [each])
        for chain, its_inputs in self.by_chain(inputs):
            chain.queue.requeue(its_inputs)

    def by_chain(self, inputs: Inputs) -> list[tuple[Chain, Inputs]]:
        """Groups inputs by their current chain."""
        if len(self.active) == 1:
            return [(self.active[0], inputs)] if inputs else []
        groups: dict[Chain, list[PendingInput]] = {}
        for each in inputs:
            groups.setdefault(each.chain.current, []).append(each)
        return list(groups.items())

    def clear(self) -> list[PendingInput]:
        """Removes and returns all queued inputs."""
        return [each for chain in self.active for each in chain.queue.clear()]

    def oldest_s(self, now_s: float) -> dict[int, float]:
        """Returns the age of the oldest queued input by length class: the tokens, rounded up to a power of two."""
        oldest: dict[int, float] = {}
        for chain in self.active:
            for each in chain.queue.inputs:
                length = 1 << max(0, each.tokens - 1).bit_length()
                oldest[length] = max(now_s - each.since_s, oldest.get(length, 0.0))
        return dict(sorted(oldest.items()))
