"""Finds replicas that are slower than their peers, so that the next plan leaves them out (E3, section 3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_BATCHES = 20
"""With fewer batches, a pause of the machine, or a few inputs that leave at no ramp, would make a straggler."""
DEVIATIONS = 3
"""Standard deviations by which chance may explain that a replica is slower or faster."""
LEAST_PEERS = 3
"""Least number of replicas of a slot for a comparison within the slot."""
LEAST_PER_STRAGGLER = 3
"""Least number of replicas of an accelerator type per straggler. If more of them are slow, the cause is elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """The batches of one replica since the last observation."""

    replica: str
    slot: str
    device: str
    batches: int
    seconds: float
    expected_s: float
    """Seconds that the batches should take by the profile."""
    variance_s2: float = 0.0
    """Variance of the seconds, at most: batches skip blocks that none of their inputs reaches."""


def find_stragglers(
    times: Sequence[ReplicaTimes], ratio: float, *, resting: Collection[str] = ()
) -> dict[ReplicaTimes, str]:
    """Returns new stragglers with the reason, the slowest first. `times` includes resting replicas.

    Replicas are compared by seconds taken over seconds expected, because they run different batches. A straggler
    exceeds `ratio` times the median of its peers, and chance does not explain it. Peers are the other replicas of its
    slot, if there are two or more. Otherwise peers are all others of its accelerator type, and a straggler must exceed
    `ratio` times the other replica of its slot, too: if both are slow, the profile of their splits is wrong. At most
    one of `LEAST_PER_STRAGGLER` replicas of a type rests at once.
    """
    ratios = {
        each: each.seconds / each.expected_s
        for each in times
        if each.replica not in resting and each.batches >= LEAST_BATCHES and each.expected_s > 0
    }
    behind = {each: found for each in ratios if (found := _behind(each, ratios, ratio)) is not None}
    num_of_type = Counter(each.device for each in times)
    num_resting = Counter(each.device for each in times if each.replica in resting)
    stragglers = {}
    for straggler in sorted(behind, key=lambda each: behind[each][0], reverse=True):
        device = straggler.device
        if (num_resting[device] + 1) * LEAST_PER_STRAGGLER <= num_of_type[device]:
            num_resting[device] += 1
            stragglers[straggler] = behind[straggler][1]
    return stragglers


def _behind(replica: ReplicaTimes, ratios: Mapping[ReplicaTimes, float], limit: float) -> tuple[float, str] | None:
    """Returns a straggler's ratio relative to the median of its peers, with the reason; None for other replicas."""
    others = [each for each in ratios if each is not replica and each.device == replica.device]
    in_slot = [ratios[each] for each in others if each.slot == replica.slot]
    peers = in_slot if len(in_slot) + 1 >= LEAST_PEERS else [ratios[each] for each in others]
    if not peers:
        return None
    own, usual = ratios[replica], median(peers)
    bounds = [usual] if peers is in_slot else [usual, *in_slot]
    spread, *spreads = (each.variance_s2**0.5 / each.expected_s for each in (replica, *others))
    if own <= max(limit * max(bounds), usual + DEVIATIONS * (spread + median(spreads))) or usual <= 0:
        return None
    behind, figures = own / usual, f"({own:.2f} against {usual:.2f} times the profile)"
    return behind, f"{replica.replica} takes {behind:.2f} times as long as its {len(peers)} peers {figures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingReplica:
    """A replica that gets no work for some time."""

    replica: str
    device: str
    until: int
    """The first control period in which it gets work again."""


def avoided_replicas(resting: Iterable[RestingReplica]) -> dict[str, str]:
    """Returns the accelerator type of each resting replica, as needed by `PlacedPlan`."""
    return {rest.replica: rest.device for rest in resting}
