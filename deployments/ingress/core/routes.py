"""Routes of a plan: which slot runs which block, in which batches, and which replica gets the next call."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count, groupby
from typing import Any, Final, Generic, Protocol, TypeVar

from deployments.wire.messages import Assignment
from earlyexit.errors import SequenceLostError
from earlyexit.network.boundary import Budget
from optimizer.plans.plan import Plan

Layout = tuple[tuple[str, int, int], ...]
"""A chain's stages in their order: slot, first block, and the block after the last. If two plans have the same layout,
a replica that hosts the same slot under both can keep its keys and values, whatever the splits are."""
SOONEST_RETRY_S: Final = 1.0
SERIAL_BITS: Final = 32
NAME_BITS: Final = 30
"""A sequence's number consists of the name of its ingress (NAME_BITS) and a serial number (SERIAL_BITS)."""


@dataclass(slots=True, eq=False)
class KVPlacement:
    """The replicas that keep the keys and values of one sequence, until it ends or is lost. Its inputs share this.

    A sequence that starts again gets a new placement, so that a late reply cannot be mistaken for a new one.
    """

    number: int
    """The number of the sequence, unique at every replica."""
    _: KW_ONLY
    is_retry: bool = False
    """Whether the sequence was admitted before and was lost."""
    excluded: frozenset[str] = frozenset()
    """Replicas that had no room for the sequence. It is placed on one of them only if there are no others."""
    is_probe: bool | None = None
    """Whether the sequence is a probe. None until its first input is sent, when this is drawn."""
    layout: Layout | None = field(default=None, init=False)
    """The layout under which its first input was sent; None before that."""
    keepers: dict[str, ReplicaLoad[Any]] = field(default_factory=dict, init=False)
    """By slot, the replica that keeps the keys and values of the slot's blocks. The slot's first call chooses it."""
    yields_token: bool = field(default=True, init=False)
    """Whether the answer to the next step is a token. Only the last chunk of a prompt yields a token."""
    has_ended: bool = field(default=False, init=False)
    """Whether the sequence has ended. A call for it may still be open."""

    def end(self) -> None:
        """Makes replicas free the keys and values of a sequence that has ended or restarts elsewhere."""
        self.has_ended = True
        for keeper in self.keepers.values():
            if self.number in keeper.sequences:
                keeper.sequences.remove(self.number)
                keeper.replica.end(self.number)


def lost(why: str) -> SequenceLostError:
    """Returns the error of sequences whose keys and values are lost. The generation loop restarts them."""
    return SequenceLostError(f"the sequence is lost: {why}", retry_after_s=SOONEST_RETRY_S)


def sequence_numbers(rng: random.Random) -> Iterator[int]:
    """Returns numbers for the sequences of one ingress, distinct from those of other ingresses and earlier processes.

    0 stands for no sequence.
    """
    return count((rng.getrandbits(NAME_BITS) << SERIAL_BITS) + 1)


PARTS = 32
"""The unit of load under a token budget is 1 / PARTS of a full batch, so loads are as fine as with 32 inputs."""
MOST_BATCHES = 4
"""The largest weight of a call, in full batches. A single input may be as long as a hundred batches."""


def min_to_send(
    budget: Budget,
    *,
    pending_calls: int,
    batches: int,
    calls_per_batch: int,
    fills: bool,
    limit: float,
) -> tuple[float, float]:
    """Returns how many inputs, or alternatively how many tokens, must wait before a call to the first stage is sent.

    Both are infinite if no call may be sent. `pending_calls`: pending calls to the stage. `batches`: batches that all
    its replicas run at once. A call that can start immediately takes all waiting inputs; a call that will queue behind
    another one must be full. `fills`: batches share processors, so every call after the first must be full, or have its
    share of the `limit` of unanswered inputs (or tokens), which has room for a running and a waiting call per batch.
    Otherwise few calls would fill under a low limit, and idle replicas would keep the limit low. No call queues at a
    busy replica, because another replica may be free earlier and the way to it is short.
    """
    if pending_calls < (1 if fills else batches):
        return 1, math.inf
    if pending_calls >= (1 if fills else calls_per_batch) * batches:
        return math.inf, math.inf
    share = max(1, limit / (2 * batches)) if fills else math.inf
    if budget.tokens is None:
        return min(budget.inputs, share), math.inf
    return budget.inputs, min(budget.tokens, share)


def weight_of(budget: Budget, num_inputs: int, num_tokens: int) -> tuple[int, int]:
    """Returns the weight of a call, and of a full batch: in inputs or, under a token budget, in parts of a batch.

    Under a token budget, the weight is the larger share of the budget: of its inputs or of its tokens.
    """
    if budget.tokens is None:
        return num_inputs, budget.inputs
    batch = min(PARTS, budget.tokens)
    by_inputs, by_tokens = -(-num_inputs * batch // budget.inputs), -(-num_tokens * batch // budget.tokens)
    return min(max(by_inputs, by_tokens), MOST_BATCHES * batch), batch


def filling_rank(load: int, weight: int, batch: int) -> tuple[int, ...]:
    """Returns the rank under `filling` of a replica with this load, for a call of `weight`. The smallest is the best.

    The best replicas have the fewest full batches ahead, and among these an open batch with room, fullest first. So
    batches fill one after the other. Idle replicas come after them, because the replicas share processors: each batch
    reads all weights again and takes the cores from the others.
    """
    full_batches, started = divmod(load, batch)
    if started + weight > batch:  # the open batch has no room, so the call begins a new one
        full_batches, started = full_batches + 1, 0
    return (full_batches, -started, load)


class Replica(Protocol):
    """A connection to a replica, or a simulated replica."""

    @property
    def name(self) -> str: ...
    @property
    def is_up(self) -> bool:
        """Whether the replica accepts calls now."""

    def end(self, sequence: int) -> None:
        """Frees the keys and values of a sequence."""


ReplicaT = TypeVar("ReplicaT", bound=Replica)


@dataclass(slots=True, eq=False)
class ReplicaLoad(Generic[ReplicaT]):
    """The load that one ingress has put on a replica for a stage that the replica hosts, or has hosted."""

    replica: ReplicaT
    load: int = 0
    """The weight of this ingress's open calls for the stage."""
    since_s: float = -math.inf
    """When its batch began, as far as the ingress knows: when the last call ended, or one came to the idle replica."""
    sequences: set[int] = field(default_factory=set)
    """This ingress's sequences whose keys and values the replica keeps."""
    is_available: bool = False
    """Whether the replica hosts the stage and accepts calls."""

    def busy_s(self, batch: int, batch_s: float, now_s: float) -> float:
        """Returns about how many seconds its calls still take: the rest of its batch, and its load in full batches."""
        return max(0.0, self.since_s + batch_s - now_s) + self.load / batch * batch_s


class StageReplicas(Generic[ReplicaT]):
    """The replicas that host one stage, with the calls and sequences of one ingress.

    Under `filling`, both are assigned by `filling_rank`: a sequence will be one input of every batch.
    """

    def __init__(self, phase: float) -> None:
        """`phase`: the share of the replicas by which their order is rotated. Among equal ones the first is chosen.

        An ingress knows only its own calls. Without different phases, all ingresses would prefer the same replicas.
        """
        self._phase = phase
        self._known: dict[str, ReplicaLoad[ReplicaT]] = {}
        self._available: list[ReplicaLoad[ReplicaT]] = []
        """The replicas that accept calls, in the order of preference among equal ones."""

    @property
    def num_up(self) -> int:
        """The number of replicas that accept calls."""
        return len(self._available)

    def set_replicas(self, replicas: Iterable[ReplicaT]) -> None:
        """Sets the replicas that host the stage. Calls go to those that are up.

        A replica that now hosts another stage stays known while it has calls or sequences of this stage.
        """
        before, available = self._known, list[ReplicaLoad[ReplicaT]]()
        for known in before.values():
            known.is_available = False
            if not known.replica.is_up:  # a replica forgets its sequences when the connection breaks
                known.sequences.clear()
        self._known = {name: known for name, known in before.items() if known.sequences or known.load}
        for replica in replicas:
            known_load = before.get(replica.name)
            if known_load is None or known_load.replica is not replica:
                known_load = ReplicaLoad(replica)
            self._known[replica.name] = known_load
            known_load.is_available = replica.is_up
            if replica.is_up:
                available.append(known_load)
        first = int(self._phase * len(available))
        self._available = available[first:] + available[:first]

    def assign(self, weight: int, batch: int, batch_s: float, now_s: float, *, fills: bool) -> ReplicaLoad[ReplicaT]:
        """Assigns a call to an idle replica or the one that is free first, and returns it. There must be a replica.

        `weight` and `batch`: see `weight_of`. `batch_s`: the expected seconds of a call; 0: unknown. `fills`: the call
        goes to the best replica by `filling_rank` instead.
        """
        if fills:
            chosen = min(self._available, key=lambda each: filling_rank(each.load, weight, batch))
        else:
            idle = next((each for each in self._available if not each.load), None)
            chosen = idle or min(self._available, key=lambda each: each.busy_s(batch, batch_s or 1.0, now_s))
        if not chosen.load:
            chosen.since_s = now_s
        chosen.load += weight
        return chosen

    def replica_for(
        self, slot: str, placements: Sequence[KVPlacement], batch: int, *, fills: bool
    ) -> ReplicaLoad[ReplicaT]:
        """Returns the replica that keeps the sequences of a call at this slot, or chooses one for new sequences.

        New sequences go to the replica with the fewest. All sequences of a call have the same replica. Raises
        SequenceLostError if it no longer accepts new calls: a draining replica does not keep its sequences until they
        end, because that would delay its removal. Restarting a sequence elsewhere costs one pass over its tokens.
        """
        keeper = placements[0].keepers.get(slot)
        if keeper is not None:
            if not keeper.is_available:
                raise lost(f"{keeper.replica.name} no longer accepts calls")
            return keeper
        excluded, number = placements[0].excluded, len(placements)  # all new sequences exclude the same replicas
        others = [each for each in self._available if each.replica.name not in excluded] if excluded else []
        loads = {each: len(each.sequences) for each in others or self._available}
        chosen = min(loads, key=lambda each: filling_rank(loads[each], number, batch) if fills else (loads[each],))
        for placement in placements:
            chosen.sequences.add(placement.number)
            placement.keepers[slot] = chosen
        return chosen


SMOOTHING = 0.1
"""The weight of the newest call in the moving average of a stage's time."""


@dataclass(slots=True, kw_only=True, eq=False)
class StageRoute:
    """The route to one stage of a chain. A stage with blocks of several networks has one route per network."""

    first: int
    """The first block."""
    assignment: Assignment
    """The assignment that every call to the stage carries. It is created once per plan."""
    budgets: tuple[Budget, ...]
    """For each block, the budget of the batches that run it."""
    expected_s: float
    """The expected seconds until a call's inputs are answered or continue; 0 while unknown."""

    @property
    def slot(self) -> str:
        return self.assignment.slot

    @property
    def end(self) -> int:
        """One past the last block."""
        return self.first + len(self.budgets)

    def budget(self, block: int) -> Budget:
        """Returns the budget of the batches that start at a block."""
        return self.budgets[block - self.first if block > self.first else 0]

    def record_time(self, took_s: float) -> None:
        """Updates the expected time with the seconds until a part of a call's reply came."""
        self.expected_s += (SMOOTHING if self.expected_s else 1.0) * (took_s - self.expected_s)


def stage_routes(plan: Plan, assignments: Iterable[Assignment], block_s: Sequence[float]) -> tuple[StageRoute, ...]:
    """Returns the routes to the stages of a chain, in their order.

    `plan`: the plan of this chain. `assignments`: one for each stage. `block_s`: the expected seconds of every block.
    """
    routes = []
    for assignment in assignments:
        for _, group in groupby(assignment.stage.splits, key=lambda split: bisect_right(plan.networks, split.first)):
            splits = tuple(group)
            budgets = tuple(split.budget for split in splits for _ in range(split.first, split.end))
            first, expected_s = splits[0].first, sum(block_s[splits[0].first : splits[-1].end])
            routes.append(StageRoute(first=first, assignment=assignment, budgets=budgets, expected_s=expected_s))
    return tuple(routes)


def crossings_of(plan: Plan) -> dict[int, int]:
    """Returns, by block, the network that survivors waiting for the block enter.

    The keys are the first blocks of networks, and all blocks of skipped ones. Empty if the model is a single network.
    """
    crossings: dict[int, int] = {}
    used, starts = plan.used, (0, *plan.networks[:-1])
    for network, (start, end) in enumerate(zip(starts, plan.networks, strict=False)):
        entered = next(each for each in used if each >= network)
        # A used network is entered at its first block only; a skipped network is left at every block.
        blocks = [start] if entered == network else range(start, end)
        crossings |= dict.fromkeys(blocks, entered)
    return crossings
