"""Placement of stages on replicas."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest

from earlyexit.network.boundary import Split
from optimizer.placement import (
    PlacedPlan,
    deployment_name,
    divide_replicas,
    parse_placed,
    placed_document,
    roles,
    slot_name,
)
from optimizer.plan import Plan, Stage

FIRST, SECOND = "split-T4-0", "split-T4-1"


def two_stages() -> Plan:
    return Plan(
        stages=(
            Stage(device="T4", replicas=3, splits=(Split(first=0, end=1, batch=4),)),
            Stage(device="T4", replicas=1, splits=(Split(first=1, end=2, batch=4),)),
        ),
        epoch=7,
    )


def test_every_stage_has_the_next_slot_of_its_accelerator_type() -> None:
    assert deployment_name("emulated:V100") == "split-emulated-V100"
    assert slot_name("emulated:V100", 2) == "split-emulated-V100-2"
    devices = ("cpu", "V100", "cpu")
    stages = tuple(
        Stage(device=device, replicas=1, splits=(Split(first=index, end=index + 1, batch=1),))
        for index, device in enumerate(devices)
    )
    assert PlacedPlan(plan=Plan(stages=stages)).slots == ("split-cpu-0", "split-V100-0", "split-cpu-1")


def test_avoided_replicas_host_a_stage_only_if_there_are_too_few_others() -> None:
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "T4", "b": "T4", "c": "V100"})
    assert placed.needed("T4") == {FIRST: 3, SECOND: 1}
    assert placed.occupied == {"T4": 6, "V100": 1}
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "T4", "b": "T4"})
    assert placed.roles("T4", ["a", "b", "c", "d"]) == {"c": FIRST, "d": SECOND}
    assert placed.roles("T4", ["a", "b", "c"]) == {"a": FIRST, "b": FIRST, "c": SECOND}
    assert placed.roles("V100", ["e"]) == {}
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "T4"}, hosted={"b": SECOND})
    read = parse_placed(json.loads(json.dumps(placed_document(placed))))
    assert read == placed
    assert read.epoch == 7


@pytest.mark.parametrize(
    ("live", "before", "found"),
    [
        ("1234", {}, "aabb"),
        ("1234", {"1": "b", "4": "a"}, "baba"),
        ("1234", {"1": "b", "2": "b", "3": "b"}, "bbaa"),
        ("135", {"1": "b", "3": "elsewhere"}, "baa"),
        ("1", {"1": "b"}, "b"),
    ],
)
def test_replicas_stay_where_they_were_and_others_fill_gaps(live: str, before: dict[str, str], found: str) -> None:
    hosts = roles({"a": 2, "b": 2}, list(live), before)
    assert "".join(hosts[replica] for replica in live) == found


def least_share(needed: dict[str, int], found: dict[str, str]) -> float:
    return min(list(found.values()).count(slot) / needed[slot] for slot in needed)


def moved(found: dict[str, str], before: dict[str, str]) -> int:
    return sum(found[name] != before[name] for name in found if name in before)


def test_no_roles_give_the_poorest_stage_more_or_move_fewer_replicas_for_the_same_shares() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        needed = {slot: rng.randint(1, 4) for slot in "abc"[: rng.randint(1, 3)]}
        live = [f"r{k}" for k in range(rng.randint(0, 6))]
        before = {name: rng.choice("abcd") for name in (*live, "gone") if rng.random() < 0.7}
        found = roles(needed, rng.sample(live, len(live)), before)
        assert found.keys() == set(live)
        if not live:
            continue
        tried = [dict(zip(live, slots, strict=True)) for slots in product(needed, repeat=len(live))]
        assert least_share(needed, found) == max(least_share(needed, each) for each in tried), seed
        sizes = sorted(found.values())
        alike = [each for each in tried if sorted(each.values()) == sizes]
        assert moved(found, before) == min(moved(each, before) for each in alike), seed


def test_roles_depend_only_on_the_live_replicas() -> None:
    """Roles do not depend on the order in which replicas are listed, so all ingresses agree."""
    needed, before = {"a": 3, "b": 2}, {"r2": "b", "r9": "a"}
    live = [f"r{k}" for k in range(12)]
    assert len({tuple(sorted(roles(needed, random.Random(k).sample(live, 12), before).items())) for k in range(9)}) == 1


@pytest.mark.parametrize(
    ("number", "held", "given"),
    [
        (0, {}, [0, 0, 0]),
        (1, {}, [1, 0, 0]),
        (1, {"c": 1}, [0, 0, 1]),
        (3, {}, [1, 1, 1]),
        (5, {}, [3, 1, 1]),
        (7, {}, [4, 2, 1]),
        (14, {}, [8, 4, 2]),
    ],
)
def test_slots_share_replicas_in_proportion(number: int, held: dict[str, int], given: list[int]) -> None:
    assert list(divide_replicas({"a": 4, "b": 2, "c": 1}, number, held).values()) == given
