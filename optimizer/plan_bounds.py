"""Where the splits of a plan may begin and end, given the networks of its chain."""

from __future__ import annotations

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split


def check_begins(split: Split, end: int | None, networks: tuple[int, ...]) -> None:
    """Raise PlanError unless a split may follow one that ends at `end`; None: unless it may be the first."""
    starts = (0, *networks[:-1])
    if end is None:
        if split.first not in starts:
            where = f"where a network does, at {_or(starts)}" if networks else "at block 0"
            raise PlanError(f"the first split must start {where}, not {split.first}")
        return
    if split.first < end:
        raise PlanError(f"overlap: two splits run block {split.first}")
    if split.first > end and (end not in networks or split.first not in starts):
        whole = f"; a plan leaves out whole networks, which begin at blocks {_or(starts)}" if networks else ""
        raise PlanError(f"gap: no split runs blocks {end} to {split.first - 1}{whole}")


def check_crossings(split: Split, networks: tuple[int, ...]) -> None:
    """Raise PlanError for a split of two networks: between them its inputs are encoded anew."""
    over = [bound for bound in networks if split.first < bound < split.end]
    if over:
        raise PlanError(
            f"the split of blocks {split.first} to {split.end - 1} runs over a crossing: a network ends after block "
            f"{over[0] - 1}, and so must a split"
        )


def check_end(end: int, networks: tuple[int, ...]) -> None:
    """Raise PlanError unless splits that end at `end` end with the last network of the chain."""
    if not networks or end == networks[-1]:
        return
    if end > networks[-1]:
        raise PlanError(f"the last split ends at block {end}, the last of the networks at {networks[-1]}")
    if end <= networks[-2]:
        raise PlanError(
            f"the last network, blocks {networks[-2]} to {networks[-1] - 1}, is left out: it answers what no other does"
        )
    raise PlanError(f"gap: no split runs blocks {end} to {networks[-1] - 1}")


def _or(blocks: tuple[int, ...]) -> str:
    *before, last = map(str, blocks)
    return f"{', '.join(before)} or {last}" if before else last
