"""A plan on its slots."""

from __future__ import annotations

import json

import pytest

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.placement import PlacedPlan, initial_placement, is_slot_of, parse_placed, placed_document, slot_name
from optimizer.plan import Plan, Stage


def two_stages() -> Plan:
    return Plan(
        stages=(
            Stage(device="T4", replicas=3, splits=(Split(first=0, end=1, batch=4),)),
            Stage(device="T4", replicas=1, splits=(Split(first=1, end=2, batch=4),)),
        ),
        epoch=7,
    )


def test_a_slot_has_a_name_that_travels_in_urls() -> None:
    assert slot_name("emulated:V100", 2) == "split-emulated-V100-2"


@pytest.mark.parametrize(
    ("device", "slot", "belongs"),
    [
        ("T4", "split-T4-10", True),
        ("T4", "split-T4-A-0", False),
        ("T4-A", "split-T4-A-0", True),
        ("T4", "ingress", False),
    ],
)
def test_a_slot_belongs_to_the_accelerator_type_in_its_name(device: str, slot: str, belongs: bool) -> None:
    assert is_slot_of(device, slot) is belongs


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        (("split-T4-0",), "2 stages need as many slots"),
        (("split-T4-0", "split-T4-0"), "two stages in one slot"),
        (("split-T4-0", "split-V100-1"), "is not of T4"),
    ],
)
def test_slots_that_do_not_fit_the_plan_are_refused(slots: tuple[str, ...], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        PlacedPlan(plan=two_stages(), slots=slots)


def test_avoided_replicas_occupy_accelerators_beside_the_replicas_needed() -> None:
    placed = PlacedPlan(
        plan=two_stages(),
        slots=("split-T4-1", "split-T4-0"),
        avoided={"a": "split-T4-1", "b": "split-T4-1", "c": "split-T4-2"},
    )
    assert placed.replicas == {"split-T4-1": 3, "split-T4-0": 1}
    assert placed.occupied == {"split-T4-1": 5, "split-T4-0": 1, "split-T4-2": 1}
    assert placed.avoided_ids == {"a", "b", "c"} == set(placed.avoided)


def test_a_document_holds_all_of_it() -> None:
    placed = PlacedPlan(plan=two_stages(), slots=("split-T4-1", "split-T4-0"), avoided={"a": "split-T4-1"})
    read = parse_placed(json.loads(json.dumps(placed_document(placed))))
    assert read == placed
    assert read.epoch == 7


def test_every_stage_has_the_next_slot_of_its_accelerator_type() -> None:
    devices = ("cpu", "V100", "cpu")
    stages = tuple(
        Stage(device=device, replicas=1, splits=(Split(first=index, end=index + 1, batch=1),))
        for index, device in enumerate(devices)
    )
    assert initial_placement(Plan(stages=stages)).slots == ("split-cpu-0", "split-V100-0", "split-cpu-1")
