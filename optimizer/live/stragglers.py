"""Which replicas are slower than their peers, to be left out of the next plan (E3 section 3.3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_BATCHES = 10
"""Of fewer, one pause of the machine makes a straggler."""
LEAST_PEERS = 3
"""Replicas of a stage, the one in question among them, whose times show which is slow."""
MOST_SHARE = 1 / 3
"""Of an accelerator type; where more are slow, it is not they that stand out."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """What one replica ran since the last look."""

    replica: str
    slot: str
    device: str
    batches: int
    seconds: float
    expected_s: float
    """Seconds that its batches should take by the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A replica to be left out, and why."""

    replica: str
    slot: str
    device: str
    behind: float
    """How many times as long as its peers it takes, in the median."""
    words: str


def find(times: Sequence[ReplicaTimes], ratio: float, *, resting: Collection[str] = ()) -> tuple[Straggler, ...]:
    """Returns new stragglers, the ones furthest behind their peers first; `times` names resting replicas too.

    A replica's ratio is seconds taken over seconds expected, so that peers may have run other batches. A straggler is
    slower than `ratio` times the median of its peers. Peers are the other replicas of its slot, if there are two or
    more. With fewer it is compared with all others of its accelerator type, and must also be slower than `ratio` times
    its one slot mate: where both are slow, the profile of their splits is wrong. A replica alone in its slot has no
    such mate. No more than `MOST_SHARE` of a type rests at once.
    """
    ratios = {
        each: each.seconds / each.expected_s
        for each in times
        if each.replica not in resting and each.batches >= LEAST_BATCHES and each.expected_s > 0
    }
    judged = (_straggler(each, ratios, ratio) for each in ratios)
    behind = sorted((each for each in judged if each is not None), key=lambda each: each.behind, reverse=True)
    all_of_type = Counter(each.device for each in times)
    at_rest = Counter(each.device for each in times if each.replica in resting)
    found = []
    for each in behind:
        if at_rest[each.device] + 1 <= math.floor(all_of_type[each.device] * MOST_SHARE + ROUNDING):
            at_rest[each.device] += 1
            found.append(each)
    return tuple(found)


def _straggler(one: ReplicaTimes, ratios: Mapping[ReplicaTimes, float], ratio: float) -> Straggler | None:
    others = {each: taken for each, taken in ratios.items() if each is not one and each.device == one.device}
    mates = [taken for each, taken in others.items() if each.slot == one.slot]
    peers = mates if len(mates) + 1 >= LEAST_PEERS else list(others.values())
    if not peers:
        return None
    usual = median(peers)
    bounds = [usual] if peers is mates else [usual, *mates]
    if ratios[one] <= ratio * max(bounds) or usual <= 0:
        return None
    behind = ratios[one] / usual
    words = (
        f"{one.replica} takes {behind:.2f} times as long as its {len(peers)} peers "
        f"({ratios[one]:.2f} against {usual:.2f} times the profile)"
    )
    return Straggler(replica=one.replica, slot=one.slot, device=one.device, behind=behind, words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A replica that gets no work."""

    replica: str
    device: str
    until: int
    """The first period in which it gets work again."""


def avoided_by(resting: Iterable[Rest]) -> dict[str, str]:
    """Returns the accelerator type of each replica that rests, as `PlacedPlan` takes it."""
    return {rest.replica: rest.device for rest in resting}
