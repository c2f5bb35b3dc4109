from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from earlyexit.network.boundary import Split
from optimizer.plans.plan import (
    PlacedPlan,
    Plan,
    PolicySpec,
    Stage,
    assign_slots,
    deployment_name,
    divide_replicas,
    early_exit_plan,
    serial_plan,
    stock_plan,
)
from optimizer.plans.plan_file import ModelShape, parse_placed, placed_document, plan_document, read_plan, write_plan

ENTROPY = PolicySpec(thresholds=0.4)


def split(first: int, end: int, *ramps: int) -> Split:
    return Split(first=first, end=end, batch=8, ramps=ramps)


def stage(*splits: Split, replicas: int = 1) -> Stage:
    return Stage(device="cpu", replicas=replicas, splits=splits)


def test_after_answer_and_overlap_are_equal_in_all_splits_of_a_plan() -> None:
    plan = Plan(stages=(stage(split(0, 2, 1), split(2, 4)), stage(split(4, 6))), policy=ENTROPY)
    assert plan.after_answer == "stop"
    staying = plan.with_splits(after_answer="stay")
    assert (staying.after_answer, [each.stays for each in staying.splits]) == ("stay", [True] * 3)
    assert staying.with_splits(after_answer="stop") == plan
    overlapping = plan.with_splits(overlap_below=4)
    assert (plan.overlap_below, overlapping.overlap_below) == (None, 4)
    assert [each.overlap_below for each in overlapping.splits] == [4] * 3
    assert overlapping.planned_stages == plan.stages


def test_an_own_policy_may_be_in_a_module_of_a_package() -> None:
    assert PolicySpec(name="own", own="package.module:rule").own == "package.module:rule"


def test_a_stock_plan_is_one_split_and_splits_end_where_networks_end() -> None:
    plan = stock_plan(6, batch=8, device="V100", replicas=3)
    assert plan.splits == (Split(first=0, end=6, batch=8),)
    assert (plan.stages[0].device, plan.stages[0].replicas, plan.policy) == ("V100", 3, None)
    chain = (3, 5, 9)
    stock, early, serial = (
        stock_plan(9, batch=8, networks=chain),
        early_exit_plan(9, (1, 2, 6), ENTROPY, batch=8, networks=chain),
        serial_plan(9, (1, 2, 6), ENTROPY, batch=8, networks=chain),
    )
    assert stock.splits == (split(5, 9),)
    assert early.splits == (split(5, 9, 6),)
    assert serial.splits == (split(0, 2, 1), split(2, 3, 2), split(3, 5), split(5, 7, 6), split(7, 9))
    assert [plan.used for plan in (stock, early, serial)] == [(2,), (2,), (0, 1, 2)]


def side_by_side(*shares: float) -> Plan:
    """Returns a plan of two chains of four blocks: one stage with ramp 1, and two stages with ramp 2."""
    policy = PolicySpec(thresholds=0.5)
    chains = (stage(split(0, 4, 1), replicas=3), stage(split(0, 2)), stage(split(2, 4, 2)))
    return Plan(stages=chains, shares=shares, policy=policy, predicted={"rate_per_s": 400.0, "latency_s": 0.1})


def test_every_chain_of_a_plan_is_a_plan_with_its_share_of_the_rate() -> None:
    plan = side_by_side(0.75, 0.25)
    first, second = plan.chains
    assert (first.stages, second.stages) == (plan.stages[:1], plan.stages[1:])
    assert (first.predicted, second.predicted) == (
        {"rate_per_s": 300.0, "latency_s": 0.1},
        {"rate_per_s": 100.0, "latency_s": 0.1},
    )
    assert (plan.ramps, first.ramps, second.ramps) == ((1, 2), (1,), (2,))
    assert first.chains == (first,), "a plan of one chain is its chain"


NETWORKS = (2, 5, 9)
SHAPE = ModelShape(num_blocks=9, ramps=(0, 1, 3, 4, 6), networks=NETWORKS)


def spans(*bounds: tuple[int, int]) -> Stage:
    return Stage(device="cpu", replicas=1, splits=tuple(Split(first=a, end=b, batch=4) for a, b in bounds))


def planned(*stages: Stage, networks: tuple[int, ...] = NETWORKS) -> Plan:
    return Plan(stages=stages, networks=networks)


@pytest.mark.parametrize(
    ("stages", "entry", "used"),
    [
        pytest.param([spans((0, 2), (2, 5), (5, 9))], 0, (0, 1, 2), id="all, in one stage"),
        pytest.param([spans((0, 1)), spans((1, 2), (2, 5)), spans((5, 7), (7, 9))], 0, (0, 1, 2), id="all"),
        pytest.param([spans((0, 2)), spans((5, 9))], 0, (0, 2), id="without the middle one"),
        pytest.param([spans((0, 2), (5, 9))], 0, (0, 2), id="without the middle one, in one stage"),
        pytest.param([spans((2, 5), (5, 9))], 2, (1, 2), id="without the first"),
        pytest.param([spans((5, 9))], 5, (2,), id="the last alone"),
    ],
)
def test_a_plan_may_leave_out_networks(stages: list[Stage], entry: int, used: tuple[int, ...], tmp_path: Path) -> None:
    made = planned(*stages)
    assert (made.stages[0].first, made.used, made.num_blocks) == (entry, used, 9)
    blocks = [end - first for each in made.stages for first, end in each.ranges]
    assert sum(blocks) == sum((2, 3, 4)[network] for network in used)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made


def test_a_stage_has_ranges_without_gaps_and_a_single_network_is_not_named() -> None:
    assert spans((0, 1), (1, 2), (5, 9)).ranges == ((0, 2), (5, 9))
    assert spans((2, 5)).ranges == ((2, 5),)
    one = planned(spans((0, 9)), networks=())
    assert one.used == (0,)
    assert "networks" not in plan_document(one)


def test_weights_and_pruning_are_of_the_networks_ends(tmp_path: Path) -> None:
    policy = PolicySpec(name="entropy", thresholds=0.4, weights={1: 0.2, 4: 0.5})
    made = Plan(stages=(spans((0, 2), (5, 9)),), networks=NETWORKS, policy=policy)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    made = replace(planned(spans((0, 2), (2, 5)), spans((5, 9))), prune={1: 0.7, 4: 0.9})
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    assert "prune" not in plan_document(planned(spans((5, 9))))


FIRST, SECOND = "split-cpu-0", "split-cpu-1"


def two_stages() -> Plan:
    return Plan(stages=(stage(split(0, 1), replicas=3), stage(split(1, 2))), epoch=7)


def test_every_stage_has_the_next_slot_of_its_accelerator_type() -> None:
    assert deployment_name("emulated:V100") == "split-emulated-V100"
    devices = ("cpu", "V100", "cpu")
    stages = tuple(replace(stage(split(at, at + 1)), device=device) for at, device in enumerate(devices))
    found = PlacedPlan(plan=Plan(stages=stages)).stage_of
    assert found == dict(zip(("split-cpu-0", "split-V100-0", "split-cpu-1"), stages, strict=True))


def test_avoided_replicas_host_a_stage_only_if_there_are_too_few_others() -> None:
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "cpu", "b": "cpu", "c": "V100"})
    assert placed.needed("cpu") == {FIRST: 3, SECOND: 1}
    assert placed.occupied == {"cpu": 6, "V100": 1}
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "cpu", "b": "cpu"})
    assert placed.roles({"cpu": ["a", "b", "c", "d"]}) == {"cpu": {"c": FIRST, "d": SECOND}}
    assert placed.roles({"cpu": ["a", "b", "c"]}) == {"cpu": {"a": FIRST, "b": FIRST, "c": SECOND}}
    assert placed.roles({"V100": ["e"]}) == {"V100": {}}
    placed = PlacedPlan(plan=two_stages(), avoided={"a": "cpu"}, hosted={"b": SECOND})
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
    hosts = assign_slots({"a": 2, "b": 2}, list(live), before)
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
        found = assign_slots(needed, rng.sample(live, len(live)), before)
        assert found.keys() == set(live)
        assert assign_slots(needed, rng.sample(live, len(live)), before) == found, "all ingresses agree"
        if not live:
            continue
        tried = [dict(zip(live, slots, strict=True)) for slots in product(needed, repeat=len(live))]
        assert least_share(needed, found) == max(least_share(needed, each) for each in tried), seed
        sizes = sorted(found.values())
        alike = [each for each in tried if sorted(each.values()) == sizes]
        assert moved(found, before) == min(moved(each, before) for each in alike), seed


def test_with_too_few_replicas_the_chain_with_the_largest_share_that_can_run_does() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        chains = [rng.choices("AB", k=rng.randint(1, 2)) for _ in range(3)]
        cuts = [(device, 2 * k // len(own), 2 * (k + 1) // len(own)) for own in chains for k, device in enumerate(own)]
        stages = tuple(Stage(device=each, replicas=2, splits=(split(first, end),)) for each, first, end in cuts)
        shares = rng.choice(((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)))
        placed = PlacedPlan(plan=Plan(stages=stages, shares=shares))
        live = {device: [f"{device}{k}" for k in range(rng.randint(0, 3))] for device in "AB"}
        up = {slot for hosts in placed.roles(live).values() for slot in hosts.values()}
        slots = iter(placed.stage_of)
        runs = [{next(slots) for _ in own} <= up for own in chains]
        could = [all(own.count(device) <= len(live[device]) for device in live) for own in chains]
        first = max(range(3), key=lambda k: (could[k], shares[k]))
        assert runs[first] == could[first], seed


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
