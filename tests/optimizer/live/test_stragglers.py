"""Which replica is slower than its peers, on batches that should take one second each."""

from __future__ import annotations

from collections.abc import Collection

from earlyexit.network.boundary import Split
from optimizer.live.stragglers import ReplicaTimes, Run, find

SPLIT = Split(first=0, end=1, batch=4)


def one_second(device: str, split: Split, size: float) -> float:
    return 1.0


def ran(replica: str, slot: str, seconds: float, *, batches: int = 10, device: str = "T4") -> ReplicaTimes:
    """So many seconds per batch."""
    run = Run(split=SPLIT, size=4, batches=batches, seconds=seconds * batches)
    return ReplicaTimes(replica=replica, slot=slot, device=device, runs=(run,))


def slots(**seconds: list[float]) -> list[ReplicaTimes]:
    """Replicas named by slot and rank, such as `a0`."""
    return [ran(f"{slot}{rank}", slot, each) for slot, all_of in seconds.items() for rank, each in enumerate(all_of)]


def names(times: list[ReplicaTimes], *, resting: Collection[str] = ()) -> list[str]:
    found = find(times, one_second, 1.5, resting=resting)
    return [each.replica for each in found]


def test_one_of_three_is_slow_and_no_more_than_a_third_rests() -> None:
    (straggler,) = find(slots(a=[1.0, 1.1, 1.8]), one_second, 1.5)
    assert (straggler.replica, straggler.slot, straggler.device) == ("a2", "a", "T4")
    assert straggler.words == "a2 takes 1.71 times as long as its 2 peers (1.80 against 1.05 times the profile)"
    assert names(slots(a=[1.0, 1.0, 1.0, 2.0, 3.0])) == ["a4"]
    times = slots(a=[1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    assert names(times) == ["a5", "a4"]
    assert names(times, resting={"a5"}) == ["a4"]
    assert names(slots(a=[1.0, 2.0])) == [], "one of two is more than a third"
    assert names([*slots(a=[1.0, 1.0]), ran("a2", "a", 5.0, batches=9)]) == [], "of few batches nothing is known"


def test_peers_are_those_of_the_slot_or_the_type_whatever_batches_they_ran() -> None:
    assert names(slots(a=[3.0, 3.0, 3.0, 3.0], b=[3.0, 3.0], c=[3.0])) == []
    assert names(slots(a=[1.0] * 4, b=[2.0, 2.1])) == []
    assert names(slots(a=[1.0] * 4, b=[1.0, 2.0])) == ["b1"]
    assert names(slots(a=[2.0] * 4, b=[1.0, 2.0])) == []  # the other is quick
    assert names(slots(a=[1.0, 1.0, 1.0], b=[2.0])) == ["b0"]
    assert names([*slots(a=[1.0, 1.0, 1.0]), ran("b0", "b", 9.0, device="V100")]) == []

    def by_size(device: str, split: Split, size: float) -> float:
        return size / 4

    small = Run(split=SPLIT, size=2, batches=20, seconds=20 * 0.5)
    times = [*slots(a=[1.0, 1.0]), ReplicaTimes(replica="a2", slot="a", device="T4", runs=(small,))]
    assert find(times, by_size, 1.5) == ()
