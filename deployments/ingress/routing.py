"""Which replica of a stage takes a piece: fill-first, stragglers left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def fill_first(loads: Sequence[int], weight: int, batch: int) -> list[int]:
    """Replica indices, best first, for a piece of `weight` inputs, given the inputs that each already holds.

    An idle replica first: it starts at once, whatever it gets. Then the one with the fewest whole batches ahead whose
    open batch has room, the fullest first; so batches fill one after the other instead of all a little. Where devices
    start at once that is worth a few percent; where they wait for batches, much more (docs/design.md has figures).
    """

    def rank(index: int) -> tuple[bool, int, int, int]:
        whole, started = divmod(loads[index], batch)
        fits = started + weight <= batch
        return (loads[index] > 0, whole if fits else whole + 1, -started if fits else 0, loads[index])

    return sorted(range(len(loads)), key=rank)


def unavoided(replicas: Sequence[str], avoided: Collection[str]) -> list[int]:
    """Indices of the replicas that get work: all but the avoided ones, or all where those are all there is."""
    return [index for index, name in enumerate(replicas) if name not in avoided] or list(range(len(replicas)))
