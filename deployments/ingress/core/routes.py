"""A plan as routes for inputs: which slot runs which block, and which batches it takes."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from deployments.wire.messages import Assignment, assignments_of
from earlyexit.errors import ExecutionError, PlanError, SequenceLostError
from earlyexit.network.boundary import Budget, Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage

Layout = tuple[tuple[str, int, int], ...]
"""A chain's slots, stage by stage, each with its first block and the block after its last. Where two plans have the
same layout, a replica that hosts the same slot under both has the same keys and values, whatever its splits are."""
LOST: Final = "sequence_lost"
"""The kind of a SequenceLostError."""
LOST_RETRY_S: Final = 1.0
SERIAL_BITS: Final = 32
NAME_BITS: Final = 30
"""The bits of a sequence's number: a serial number, and the name of the ingress. Replicas do not tell them apart."""


@dataclass(slots=True, eq=False)
class KVPlacement:
    """The replicas that keep one sequence's keys and values, until the sequence ends or is lost; its inputs share it.

    A sequence that begins anew gets another: a late reply to the old one cannot be taken for one to the new.
    """

    number: int
    """One that no other sequence has at any replica."""
    _: KW_ONLY
    is_again: bool = False
    """Whether its sequence was admitted before, and lost."""
    avoids: frozenset[str] = frozenset()
    """Replicas that had no room for its sequence; it gets none of them while there are others."""
    is_probe: bool | None = None
    """Whether its sequence is a probe; None until its first input is sent, when that is drawn."""
    layout: Layout | None = field(default=None, init=False)
    """The layout of the plan by which its first input was sent; None before."""
    replicas: dict[str, str] = field(default_factory=dict, init=False)
    """By slot, the replica that keeps the keys and values of the blocks there; the slot's first call chooses it."""
    says: bool = field(default=True, init=False)
    """Whether the answer to its next step is a token: among the parts of a prompt, only the last one's is."""
    is_over: bool = field(default=False, init=False)
    """Whether the sequence has ended; a call for it may still be under way."""


def lost(why: str) -> SequenceLostError:
    """Returns the error of sequences that cannot go on where they were. Their owner begins them anew."""
    return SequenceLostError(f"the sequence is lost: {why}", retry_after_s=LOST_RETRY_S)


def sequence_numbers(rng: random.Random) -> Iterator[int]:
    """Returns numbers for the sequences of one ingress, unlike those of any other ingress or of its predecessor.

    0 stands for no sequence.
    """
    return count((rng.getrandbits(NAME_BITS) << SERIAL_BITS) + 1)


Rank = tuple[bool, int, int, int]
PARTS = 32
"""Of a batch that tokens bound, as which loads are counted: replicas are told apart as finely as those with batches of
so many inputs are, and as quickly."""
MOST_BATCHES = 4
"""The most batches that a piece counts as: one input may be a hundred batches long, and none has more work ahead."""


def least_to_call(
    budget: Budget, *, unheard: int, batches: int, calls_per_batch: int, fills: bool = False
) -> tuple[float, float]:
    """Returns how many inputs, or instead tokens, must wait for a call to the first stage to be made.

    Infinite where no call may be made. `unheard`: calls to it from which nothing has come back; `batches`: those that
    all replicas run at once. A call that can start now takes whatever waits; one that will queue behind another must be
    full. `fills`: where batches share processors, a second one gets full calls only.
    """
    if unheard < (1 if fills else batches):
        return 1, math.inf
    if unheard < calls_per_batch * batches:
        return budget.inputs, math.inf if budget.tokens is None else budget.tokens
    return math.inf, math.inf


def weight_of(budget: Budget, num_inputs: int, num_tokens: int) -> tuple[int, int]:
    """Returns the weight of a piece, and of a full batch: in inputs or, where tokens bound it, in parts of a batch.

    A piece fills as many parts as its inputs take of the budget's inputs, or its tokens of the budget's tokens,
    whichever are more.
    """
    if budget.tokens is None:
        return num_inputs, budget.inputs
    batch = min(PARTS, budget.tokens)
    by_inputs, by_tokens = -(-num_inputs * batch // budget.inputs), -(-num_tokens * batch // budget.tokens)
    return min(max(by_inputs, by_tokens), MOST_BATCHES * batch), batch


def rank(load: int, weight: int, batch: int, fills: bool) -> Rank:
    """Returns the rank of a replica that holds this load, for a piece of `weight`; the smallest rank is the best.

    An idle replica first: it starts at once, whatever it gets. Then the one with the fewest whole batches ahead whose
    open batch has room, the fullest first; so batches fill one after the other instead of all a little. Where devices
    start at once that is worth a few percent; where they wait for batches, much more (docs/design.md has figures).

    `fills`: idle replicas come last among those with no whole batch ahead. Replicas that share processors gain nothing
    from starting sooner: each batch reads all weights again, and takes the cores from the others.
    """
    whole, started = divmod(load, batch)
    fits = started + weight <= batch
    return (load > 0 and not fills, whole if fits else whole + 1, -started if fits else 0, load)


class FillFirst:
    """Replicas by load, as bit sets: to find the best takes one look per load there is, not one per replica."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._loads = list(loads)
        self._holding = [0] * (max(loads, default=0) + 1)
        """By load, the replicas that have it, as bits."""
        for index, load in enumerate(loads):
            self._holding[load] |= 1 << index
        self._orders: dict[tuple[int, int, bool], list[int]] = {}
        """All loads by rank, for each weight, batch, and `fills`."""

    def put(self, index: int, weight: int) -> None:
        """Put a piece on a replica; a negative weight takes it off."""
        before = self._loads[index]
        after = self._loads[index] = before + weight
        assert after >= 0, "more was taken off a replica than was put on it"
        while after >= len(self._holding):
            self._holding += [0] * len(self._holding)
            self._orders.clear()
        self._holding[before] ^= 1 << index
        self._holding[after] |= 1 << index

    def best(self, weight: int, batch: int, *, fills: bool = False) -> int:
        """Returns the index of the replica with the best rank, of equal ones the first; there must be one."""
        key = weight, batch, fills
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = sorted(range(len(self._holding)), key=lambda load: rank(load, *key))
        for load in order:
            if holding := self._holding[load]:
                return (holding & -holding).bit_length() - 1
        raise LookupError("no replica to choose from")


class Replica(Protocol):
    """What takes calls: the connection to a replica, or a simulated one."""

    @property
    def name(self) -> str: ...
    @property
    def is_up(self) -> bool:
        """Whether it takes calls now."""
        ...


ReplicaT = TypeVar("ReplicaT", bound=Replica)


@dataclass(slots=True, eq=False)
class Hosting(Generic[ReplicaT]):
    """What an ingress knows of a replica that hosts a stage, or has hosted it."""

    replica: ReplicaT
    load: int = 0
    """The weight of the calls of this ingress that it has for the stage."""
    sequences: set[int] = field(default_factory=set)
    """Sequences of this ingress whose keys and values it keeps."""
    position: int = -1
    """Its position among the offered replicas; -1 where it is not offered."""


class StageReplicas(Generic[ReplicaT]):
    """The replicas that host one stage, and what they have of one ingress there.

    Calls go to them fill-first, and so do sequences: each will be one input of every batch.
    """

    def __init__(self, phase: float) -> None:
        """`phase`: the share of the replicas that come last where they are equal.

        An ingress knows of its own calls only: with a phase of its own each begins elsewhere, where otherwise all would
        send to the same few.
        """
        self._phase = phase
        self._known: dict[str, Hosting[ReplicaT]] = {}
        self._offered: list[Hosting[ReplicaT]] = []
        """The replicas that take calls; of equal ones the first is chosen."""
        self._by_load = FillFirst(())
        """The loads of the offered replicas, by position."""
        self._by_sequences = FillFirst(())
        """The same, where the load is the number of sequences."""

    @property
    def is_up(self) -> bool:
        """Whether a replica takes calls."""
        return bool(self._offered)

    def offer(self, replicas: Iterable[ReplicaT]) -> None:
        """Send calls to these replicas from now on, as far as they are up.

        A replica that hosts another stage now is known while it has calls or sequences of this one.
        """
        before, offered = self._known, list[Hosting[ReplicaT]]()
        for known in before.values():
            known.position = -1
            if not known.replica.is_up:  # it has forgotten them
                known.sequences.clear()
        self._known = {name: known for name, known in before.items() if known.sequences or known.load}
        for replica in replicas:
            found = before.get(replica.name)
            hosting = found if found is not None and found.replica is replica else Hosting(replica)
            self._known[replica.name] = hosting
            if replica.is_up:
                offered.append(hosting)
        first = int(self._phase * len(offered))
        self._offered = offered[first:] + offered[:first]
        for position, hosting in enumerate(self._offered):
            hosting.position = position
        self._by_load = FillFirst([each.load for each in self._offered])
        self._by_sequences = FillFirst([len(each.sequences) for each in self._offered])

    def take(self, weight: int, batch: int, *, fills: bool) -> Hosting[ReplicaT]:
        """Puts a call on the best replica, and returns it; there must be one. See `weight_of` and `rank`."""
        position = self._by_load.best(weight, batch, fills=fills)
        self._by_load.put(position, weight)
        found = self._offered[position]
        found.load += weight
        return found

    def done(self, hosting: Hosting[ReplicaT], weight: int) -> None:
        """Note that a call has ended."""
        hosting.load -= weight
        if hosting.position >= 0:
            self._by_load.put(hosting.position, -weight)

    def holder(self, slot: str, homes: Sequence[KVPlacement], batch: int, *, fills: bool) -> Hosting[ReplicaT]:
        """Returns the replica of a call's sequences at this slot: all have the same one, or none yet and get one.

        Raises SequenceLostError where theirs takes no calls any more. A replica that drains finishes the calls that it
        has. To begin a sequence anew elsewhere costs one run over its tokens so far, and to wait until all its
        sequences end would delay its removal.
        """
        name = homes[0].replicas.get(slot)
        if name is not None:
            found = self._known.get(name)
            if found is None or found.position < 0:
                raise lost(f"{name} takes no calls any more")
            return found
        refused, number = homes[0].avoids, len(homes)  # the same for all that have no replica yet
        others = [each for each in self._offered if each.replica.name not in refused] if refused else []
        if others:
            found = others[FillFirst([len(each.sequences) for each in others]).best(number, batch, fills=fills)]
        else:
            found = self._offered[self._by_sequences.best(number, batch, fills=fills)]
        self._by_sequences.put(found.position, number)
        for home in homes:
            found.sequences.add(home.number)
            home.replicas[slot] = found.replica.name
        return found

    def leave(self, name: str, sequence: int) -> ReplicaT | None:
        """Note that a sequence has ended; returns the replica that kept it, None if that has gone."""
        found = self._known.get(name)
        if found is None or sequence not in found.sequences:
            return None
        found.sequences.remove(sequence)
        if found.position >= 0:
            self._by_sequences.put(found.position, -1)
        return found.replica


SMOOTHING = 0.1
"""The weight of the newest call in a stage's expected time."""


class Crossing(NamedTuple):
    """Where inputs enter a network: encoded anew, before its first block."""

    block: int
    network: int
    """Its place in the chain."""


@dataclass(slots=True, kw_only=True, eq=False)
class StageRoute:
    """One stage of a chain on its slot; a stage with blocks of several networks has one route per network."""

    index: int
    """Its place in the chain."""
    first: int
    """Its first block."""
    planned: Stage
    """The stage as the plan has it."""
    assignment: Assignment
    """Made once per plan: every call to the stage carries it."""
    budgets: tuple[Budget, ...]
    """The budget of the batches that run each of its blocks."""
    expected_s: float
    """The seconds until a call's inputs are answered or go on; 0 while nothing is known."""

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def slot(self) -> str:
        return self.assignment.slot

    @property
    def num_blocks(self) -> int:
        return len(self.budgets)

    def budget(self, block: int) -> Budget:
        """Returns the budget of the batches in which inputs that wait for a block run."""
        return self.budgets[block - self.first if block > self.first else 0]

    def learn(self, took_s: float) -> None:
        """Note when a part of a call's reply came, in which inputs were answered or go on."""
        self.expected_s += (SMOOTHING if self.expected_s else 1.0) * (took_s - self.expected_s)


class ChainRoute:
    """The stages of one chain of a plan, in their order."""

    def __init__(self, plan: Plan, stages: tuple[StageRoute, ...], block_s: Sequence[float]) -> None:
        """`plan`: the chain's. `block_s`: the seconds that each block was expected to take, also those left out."""
        self.plan = plan
        self.stages = stages
        self.ramps = frozenset(plan.ramps)
        self.last_split = plan.splits[-1].first
        self.entry = plan.entry
        self.network = plan.used[0]
        """The network that inputs enter first."""
        self.crossings: Mapping[int, Crossing] = crossings_of(plan)
        """By block, where survivors enter a network: at its first block, and at any block of a network that the plan
        leaves out, to which no hidden state can be sent. Empty where there is one network."""
        starts = (0, *plan.networks[:-1]) if plan.networks else ()
        self._all_crossings = {start: Crossing(start, network) for network, start in enumerate(starts)}
        """By block, the network that probes enter there: every one, used or not, for what it would answer."""
        self._block_s = tuple(block_s)
        self.layout: Layout = tuple((stage.slot, stage.first, stage.first + stage.num_blocks) for stage in stages)
        """Which slots keep the keys and values of which blocks."""
        hosting = {stage.first + k: stage for stage in stages for k in range(stage.num_blocks)}
        self._leg_of = tuple(hosting[self.hosted(block)] for block in range(plan.num_blocks))

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def first(self) -> StageRoute:
        return self.stages[0]

    def at(self, block: int) -> StageRoute:
        """Returns the stage of a block or, if its network is left out, of the next network's first block."""
        return self._leg_of[block]

    def crossing(self, block: int, *, probe: bool) -> Crossing | None:
        """Returns where inputs that wait for a block enter a network; None where they go on. Probes enter all."""
        return (self._all_crossings if probe else self.crossings).get(block)

    def entrance(self, *, probe: bool) -> tuple[int, None, int]:
        """Returns the block and the network of new inputs, with no payload between; probes enter the first network."""
        return (0, None, 0) if probe else (self.entry, None, self.network)

    def hosted(self, block: int) -> int:
        """Returns the block at which inputs go on: theirs or, if its network is left out, the next network's first."""
        crossing = self.crossings.get(block)
        return block if crossing is None else crossing.block

    @property
    def seconds_per_block(self) -> list[float]:
        """Every stage's expected time, spread evenly over its blocks; blocks that no stage hosts keep what was known.

        A new plan's stages begin with it: it is exact for stages that stay as they are, and near enough for others.
        """
        block_s = list(self._block_s)
        for stage in self.stages:
            block_s[stage.first : stage.first + stage.num_blocks] = [
                stage.expected_s / stage.num_blocks
            ] * stage.num_blocks
        return block_s

    def reserve_s(self, stage: StageRoute) -> float:
        """The expected seconds of the stages after this one; infinite if this one waits and one of them is unknown."""
        sum_s = 0.0
        for later in self.stages[stage.index + 1 :]:
            if not later.expected_s and stage.assignment.dispatch == "deferred":
                return math.inf
            sum_s += later.expected_s
        return sum_s


class PlanRoute:
    """A plan on its slots: the routes of its chains, and what they have in common."""

    def __init__(self, placed: PlacedPlan, chains: tuple[ChainRoute, ...]) -> None:
        self.placed = placed
        self.chains = chains
        self.stays = placed.plan.after_answer == "stay"
        self._num_blocks = placed.plan.num_blocks

    @property
    def epoch(self) -> int:
        return self.placed.epoch

    def check(self, block: int) -> None:
        """Raise ExecutionError for a block that the model does not have."""
        if not 0 <= block < self._num_blocks:
            raise ExecutionError(f"a reply names block {block}; the model has blocks 0 to {self._num_blocks - 1}")


def lay_out(placed: PlacedPlan, before: PlanRoute | None = None) -> PlanRoute:
    """Returns a plan's routes, with what the routes of the plan before it have learnt.

    Raises PlanError for a plan of another model.
    """
    if before is not None:
        earlier, later = before.placed.plan, placed.plan
        if earlier.num_blocks != later.num_blocks:
            raise PlanError(f"a plan of {later.num_blocks} blocks cannot follow one of {earlier.num_blocks}")
        if earlier.networks != later.networks:
            ends = list(later.networks), list(earlier.networks)
            raise PlanError(f"a plan of networks that end at {ends[0]} cannot follow one of {ends[1]}")
    assignments, chains = iter(assignments_of(placed).values()), list[ChainRoute]()
    for number, plan in enumerate(placed.plan.chains):
        of_before = None if before is None else before.chains[min(number, len(before.chains) - 1)]
        block_s = [0.0] * plan.num_blocks if of_before is None else of_before.seconds_per_block
        stages: list[StageRoute] = []
        for planned in plan.stages:
            assignment = next(assignments)
            for splits in _by_network(planned, plan.networks):
                first, end = splits[0].first, splits[-1].end
                route = StageRoute(
                    index=len(stages),
                    first=first,
                    planned=planned,
                    assignment=assignment,
                    budgets=tuple(split.budget for split in splits for _ in range(split.first, split.end)),
                    expected_s=sum(block_s[first:end]),
                )
                stages.append(route)
        chains.append(ChainRoute(plan, tuple(stages), block_s))
    return PlanRoute(placed, tuple(chains))


def crossings_of(plan: Plan) -> dict[int, Crossing]:
    """Returns, by block, where inputs for it enter a network: the block's own, or the next network that is used."""
    found: dict[int, Crossing] = {}
    used, starts = plan.used, (0, *plan.networks[:-1])
    for network, (start, end) in enumerate(zip(starts, plan.networks, strict=False)):
        entered = next(each for each in used if each >= network)
        for block in range(start, start + 1 if entered == network else end):
            found[block] = Crossing(starts[entered], entered)
    return found


def _by_network(stage: Stage, networks: Sequence[int]) -> list[list[Split]]:
    """A stage's splits, those of every network together."""
    by_network: dict[int, list[Split]] = {}
    for split in stage.splits:
        by_network.setdefault(bisect_right(networks, split.first), []).append(split)
    return list(by_network.values())
