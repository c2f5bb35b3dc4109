"""Who is slower than its peers, on batches that should take one second each."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from earlyexit.network.split import Split
from optimizer.live.stragglers import LEAST_BATCHES, MOST_SHARE, ReplicaTimes, Run, find

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


def names(
    times: list[ReplicaTimes],
    *,
    resting: Collection[str] = (),
    least_batches: int = LEAST_BATCHES,
    most_share: float = MOST_SHARE,
) -> list[str]:
    found = find(times, one_second, 1.5, resting=resting, least_batches=least_batches, most_share=most_share)
    return [each.replica for each in found]


def test_one_of_three_is_slow() -> None:
    (straggler,) = find(slots(a=[1.0, 1.1, 1.8]), one_second, 1.5)
    assert (straggler.replica, straggler.slot, straggler.device) == ("a2", "a", "T4")
    assert straggler.words == "a2 takes 1.71 times as long as its 2 peers (1.80 against 1.05 times the profile)"


def test_replicas_that_agree_are_not() -> None:
    assert names(slots(a=[1.0, 1.1, 1.4])) == []


def test_a_profile_that_is_wrong_for_all_makes_no_stragglers() -> None:
    assert names(slots(a=[3.0, 3.0, 3.0, 3.0], b=[3.0, 3.0], c=[3.0])) == []


def test_a_profile_that_is_wrong_for_one_slot_makes_none_of_two_that_agree() -> None:
    assert names(slots(a=[1.0] * 4, b=[2.0, 2.1])) == []


def test_of_two_in_a_slot_the_others_of_the_type_say_which_is_slow() -> None:
    assert names(slots(a=[1.0] * 4, b=[1.0, 2.0])) == ["b1"]
    assert names(slots(a=[2.0] * 4, b=[1.0, 2.0])) == []  # the other is quick


def test_one_alone_in_its_slot_is_held_against_its_type() -> None:
    assert names(slots(a=[1.0, 1.0, 1.0], b=[2.0])) == ["b0"]


def test_one_alone_on_its_type_has_nobody_to_be_held_against() -> None:
    assert names([*slots(a=[1.0, 1.0, 1.0]), ran("b0", "b", 9.0, device="V100")], most_share=1.0) == []


@pytest.mark.parametrize(("most_share", "found"), [(1 / 3, []), (0.5, ["a1"])])
def test_of_two_of_a_type_one_is_more_than_a_third(most_share: float, found: list[str]) -> None:
    assert names(slots(a=[1.0, 2.0]), most_share=most_share) == found


def test_no_more_than_a_third_rests_the_slowest_of_all() -> None:
    assert names(slots(a=[1.0, 1.0, 1.0, 2.0, 3.0])) == ["a4"]
    assert names(slots(a=[1.0, 1.0, 1.0, 1.0, 2.0, 3.0])) == ["a5", "a4"]


def test_those_that_rest_already_count_among_the_third() -> None:
    times = slots(a=[1.0, 1.0, 1.0, 2.0, 3.0])
    assert names(times, resting={"a4"}) == []
    assert names([*times, *slots(b=[1.0])], resting={"a4"}) == ["a3"]


def test_of_few_batches_nothing_is_said() -> None:
    times = [*slots(a=[1.0, 1.0]), ran("a2", "a", 5.0, batches=9)]
    assert names(times) == []
    assert names(times, least_batches=9) == ["a2"]


def test_peers_may_have_run_other_batches() -> None:
    def by_size(device: str, split: Split, size: float) -> float:
        return size / 4

    small = Run(split=SPLIT, size=2, batches=20, seconds=20 * 0.5)
    times = [*slots(a=[1.0, 1.0]), ReplicaTimes(replica="a2", slot="a", device="T4", runs=(small,))]
    assert find(times, by_size, 1.5) == ()
