"""When a call to a stage is made, and which replica takes it: fill-first, stragglers left out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Rank = tuple[bool, int, int, int]


def may_call(num_waiting: int, batch: int, *, unheard: int, replicas: int, calls_per_replica: int) -> bool:
    """Whether inputs that wait at the ingress are sent to the first stage now.

    `unheard`: calls to it that nothing has come back from. A call that some replica can start now takes whatever
    waits; one that will queue behind it must be full.
    """
    if unheard < replicas:
        return num_waiting > 0
    return unheard < calls_per_replica * replicas and num_waiting >= batch


def fill_first(loads: Sequence[int], weight: int, batch: int, phase: float = 0.0) -> list[int]:
    """Replica indices, best first, for a piece of `weight` inputs, given the inputs that each already holds.

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
    """The smaller, the better is a replica that holds `load` inputs."""
    whole, started = divmod(load, batch)
    fits = started + weight <= batch
    return (load > 0, whole if fits else whole + 1, -started if fits else 0, load)


def unavoided(replicas: Sequence[str], avoided: Collection[str]) -> list[int]:
    """Indices of the replicas that get work: all but the avoided ones, or all where those are all there is."""
    return [index for index, name in enumerate(replicas) if name not in avoided] or list(range(len(replicas)))


class FillFirst:
    """`fill_first` for thousands of replicas that are asked for one at a time: gives the same first one.

    Replicas by load, as bit sets: a choice costs one look per load there is, not one per replica.
    """

    def __init__(self, phase: float = 0.0) -> None:
        self._phase = phase
        self._first = 0
        self._loads: dict[int, int] = {}
        self._holding: dict[int, int] = {}
        """Per load, the replicas with it, as bits."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        """Loads by rank, per weight and batch."""
        self._most = 0

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, index: int) -> None:
        """A replica without load; indices ascend."""
        self._first = int(self._phase * (index + 1))
        self._loads[index] = 0
        self._holding[0] = self._holding.get(0, 0) | 1 << index

    def discard(self, index: int) -> None:
        """One that takes no more; what is taken off it later is ignored."""
        load = self._loads.pop(index, None)
        if load is not None:
            self._holding[load] ^= 1 << index

    def load(self, index: int, weight: int) -> None:
        """Put `weight` inputs on a replica; a negative weight takes them off. Unknown ones are ignored."""
        before = self._loads.get(index)
        if before is None:
            return
        after = self._loads[index] = before + weight
        bit = 1 << index
        self._holding[before] ^= bit
        self._holding[after] = self._holding.get(after, 0) | bit
        self._most = max(self._most, after)

    def choose(self, weight: int, batch: int) -> int:
        """The replica that `fill_first` puts first; there must be one."""
        for load in self._order(weight, batch):
            holding = self._holding.get(load)
            if holding:
                from_first = holding >> self._first
                if from_first:
                    return self._first + (from_first & -from_first).bit_length() - 1
                return (holding & -holding).bit_length() - 1
        raise LookupError("no replica to choose from")

    def _order(self, weight: int, batch: int) -> list[int]:
        order = self._orders.get((weight, batch))
        if order is None or len(order) <= self._most:
            order = sorted(range(2 * self._most + 1), key=lambda load: rank(load, weight, batch))
            self._orders[weight, batch] = order
        return order
