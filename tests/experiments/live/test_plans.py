from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from experiments.live.changes import COUNTS, KINDS, NUM_BLOCKS, Knobs, all_plans, changes, plan_at
from experiments.live.emulation import Emulation, best_plan, emulated
from experiments.live.model import made_up, survival_of_problem
from experiments.live.service import SLOTS, seed_plan
from optimizer.evaluate import evaluate, violations
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import ModelShape, parse_plan, plan_document

SPEC = PolicySpec(name="recorded", thresholds=0.4, records="somewhere.npz")


def aspects(plan: Plan) -> dict[str, object]:
    """What each kind of change may change, and no other kind may."""
    assert plan.policy is not None
    thresholds = plan.policy.thresholds
    assert isinstance(thresholds, dict)
    return {
        "batch": {split.batch for split in plan.splits},
        "ramps": plan.ramps,
        "thresholds": set(thresholds.values()),
        "split points": plan.splits[0].end,
        "stages": len(plan.stages),
        "accelerator type": plan.stages[-1].device,
        "replicas": plan.stages[0].replicas,
    }


def test_every_change_changes_its_own_aspect_and_nothing_else() -> None:
    plans = [plan_at(Knobs(), SPEC), *(plan for _, plan in islice(changes(SPEC), 2 * len(KINDS)))]
    for kind, (before, after) in zip([*KINDS] * 2, pairwise(plans), strict=True):
        was, now = aspects(before), aspects(after)
        assert {name for name in was if was[name] != now[name]} == {kind}


def test_replicas_are_changed_up_and_down() -> None:
    named = [name for name, _ in islice(changes(SPEC), 2 * len(KINDS))]
    assert named[: len(KINDS)] == [*list(KINDS)[:-1], "replicas up"]
    assert named[len(KINDS) :] == [*list(KINDS)[:-1], "replicas down"]


def test_two_rounds_of_changes_lead_back_to_the_first_plan() -> None:
    plans = all_plans(SPEC)
    assert plans[0] == plans[-1]
    assert len({str(plan_document(plan)) for plan in plans}) == 2 * len(KINDS)


def test_every_plan_is_one_of_the_model_and_of_the_cluster() -> None:
    problem = Emulation(counts=COUNTS).problem(survival_of_problem())
    shape = ModelShape(num_blocks=NUM_BLOCKS, ramps=tuple(range(NUM_BLOCKS - 1)))
    for plan in all_plans(SPEC):
        document = plan_document(plan)
        document["policy"].pop("records")  # the file is not there
        document["policy"]["name"] = "entropy"
        assert parse_plan(document, shape).stages == plan.stages
        assert violations(problem, plan.stages, evaluate(problem, plan.stages)) == []
        per_device = Counter(stage.device for stage in plan.stages)
        assert max(per_device.values()) < SLOTS, "a new stage finds a free slot"


def test_an_emulated_cluster_is_slower_by_its_time_scale_and_nothing_else_changes() -> None:
    survival = survival_of_problem()
    cluster = Emulation(counts={"V100": 16}, time_scale=10.0)
    real, wall = cluster.problem(survival, time_scale=1.0), cluster.problem(survival)
    device = emulated("V100")
    assert wall.latency[device].block_s_NB == pytest.approx(10 * real.latency[device].block_s_NB)
    assert wall.slo.latency_s == pytest.approx(1.0)
    assert wall.link == real.link, "networks are not emulated"
    # TensorRT's 1.23 ms for one input, 6.5 times slower: about E3's 8 ms.
    assert real.latency[device].block_s_NB[:, 0].sum() == pytest.approx(0.00123 * 6.5)


def test_a_cluster_of_three_types_has_the_price_of_sixteen_v100() -> None:
    mixed = Emulation(counts={"V100": 6, "P100": 8, "K80": 15}).problem(survival_of_problem())
    equal = Emulation(counts={"V100": 16}).problem(survival_of_problem())
    prices = [sum(each.count * each.usd_per_hour for each in problem.devices.values()) for problem in (mixed, equal)]
    assert prices[0] == pytest.approx(prices[1], rel=0.02)


def test_the_best_plan_uses_its_ramps() -> None:
    survival = survival_of_problem()
    records = made_up(survival, num_inputs=2000, rng=np.random.default_rng(0))
    problem = Emulation(counts={"V100": 4}).problem(survival)
    best, stock = (best_plan(problem, strategy, records) for strategy in ("best", "stock"))
    assert best.figures.rate_per_s > 1.5 * stock.figures.rate_per_s


def test_a_seed_leaves_one_accelerator_for_every_idle_slot() -> None:
    seed = seed_plan(Emulation(counts={"V100": 16}), 12)
    assert seed.stages[0].replicas + (SLOTS - 1) == 16
    assert seed_plan(Emulation(counts={"V100": 3}), 12).stages[0].replicas + (3 - 1) == 3
