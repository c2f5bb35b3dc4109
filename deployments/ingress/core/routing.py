"""When a call to a stage is made, and which replica takes it: fill-first, stragglers left out. Pure."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from earlyexit.split import Budget

Rank = tuple[bool, int, int, int]
PARTS = 32
"""Of a batch that tokens bound, as which loads are counted: replicas are told apart as finely as those with batches of
so many inputs are, and as quickly."""
MOST_BATCHES = 4
"""That a piece counts as at most: one input may be a hundred batches long, and nobody has more work ahead than it."""


def least_to_call(budget: Budget, *, unheard: int, replicas: int, calls_per_replica: int) -> tuple[float, float]:
    """How many inputs, or else tokens, must wait at the ingress for a call to the first stage to be made.

    Infinite where none is. `unheard`: calls to it that nothing has come back from. A call that some replica can start
    now takes whatever waits; one that will queue behind it must be full.
    """
    if unheard < replicas:
        return 1, math.inf
    if unheard < calls_per_replica * replicas:
        return budget.inputs, math.inf if budget.tokens is None else budget.tokens
    return math.inf, math.inf


def weight_of(budget: Budget, num_inputs: int, num_tokens: int) -> tuple[int, int]:
    """What a piece weighs, and a full batch: inputs or, where tokens bound a batch, parts of it.

    Of those the piece fills as many of the budget's inputs as of its tokens, whichever are more.
    """
    if budget.tokens is None:
        return num_inputs, budget.inputs
    batch = min(PARTS, budget.tokens)
    by_inputs, by_tokens = -(-num_inputs * batch // budget.inputs), -(-num_tokens * batch // budget.tokens)
    return min(max(by_inputs, by_tokens), MOST_BATCHES * batch), batch


def fill_first(loads: Sequence[int], weight: int, batch: int, phase: float = 0.0) -> list[int]:
    """Replica indices, best first, for a piece of `weight`, given the weight that each already holds (`weight_of`).

    An idle replica first: it starts at once, whatever it gets. Then the one with the fewest whole batches ahead whose
    open batch has room, the fullest first; so batches fill one after the other instead of all a little. Where devices
    start at once that is worth a few percent; where they wait for batches, much more (docs/design.md has figures).

    Equal ones come in their order from the share `phase` of them on. An ingress knows of its own calls only: with a
    phase of its own each begins elsewhere, where otherwise all would send to the same few (docs/scale.md has figures).
    """
    first = int(phase * len(loads))
    order = [*range(first, len(loads)), *range(first)]
    return sorted(order, key=lambda index: rank(loads[index], weight, batch))


def rank(load: int, weight: int, batch: int) -> Rank:
    """The smaller, the better is a replica that holds so much."""
    whole, started = divmod(load, batch)
    fits = started + weight <= batch
    return (load > 0, whole if fits else whole + 1, -started if fits else 0, load)


class FillFirst:
    """`fill_first` for thousands of replicas that are asked for one at a time: gives the same first one.

    Replicas by load, as bit sets: a choice costs one look per load there is, not one per replica.
    """

    def __init__(self, phase: float = 0.0) -> None:
        self.phase = phase
        self._first = 0
        self._load_of: list[int | None] = []
        """None where there is no replica of that index, or none any more."""
        self._indices: list[int] = []
        """Ascending."""
        self._holding = [0]
        """Per load, the replicas with it, as bits."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        """All loads by rank, per weight and batch."""

    def __len__(self) -> int:
        return len(self._indices)

    def add(self, index: int) -> None:
        """A replica without load."""
        self._load_of.extend([None] * (index + 1 - len(self._load_of)))
        self._load_of[index] = 0
        self._holding[0] |= 1 << index
        insort(self._indices, index)
        self._find_first()

    def discard(self, index: int) -> None:
        """One that takes no more; what is taken off it later is ignored."""
        load = self._load_of[index] if index < len(self._load_of) else None
        if load is not None:
            self._load_of[index] = None
            self._holding[load] ^= 1 << index
            self._indices.remove(index)
            self._find_first()

    def load(self, index: int, weight: int) -> None:
        """Put a piece on a replica; a negative weight takes it off. Unknown ones are ignored."""
        before = self._load_of[index] if index < len(self._load_of) else None
        if before is None:
            return
        after = self._load_of[index] = before + weight
        assert after >= 0, "more was taken off a replica than was put on it"
        while after >= len(self._holding):
            self._holding += [0] * len(self._holding)
            self._orders.clear()
        bit = 1 << index
        self._holding[before] ^= bit
        self._holding[after] |= bit

    def take(self, weight: int, batch: int) -> int:
        """Put a piece on the replica that `fill_first` puts first, which is given; there must be one."""
        index = self.choose(weight, batch)
        self.load(index, weight)
        return index

    def choose(self, weight: int, batch: int) -> int:
        """The replica that `fill_first` puts first; there must be one."""
        order = self._orders.get((weight, batch)) or self._ranked(weight, batch)
        for load in order:
            holding = self._holding[load]
            if holding:
                from_first = holding >> self._first << self._first if self._first else holding
                found = from_first or holding
                return (found & -found).bit_length() - 1
        raise LookupError("no replica to choose from")

    def _find_first(self) -> None:
        self._first = self._indices[int(self.phase * len(self._indices))] if self._indices else 0

    def _ranked(self, weight: int, batch: int) -> list[int]:
        order = sorted(range(len(self._holding)), key=lambda load: rank(load, weight, batch))
        self._orders[weight, batch] = order
        return order
