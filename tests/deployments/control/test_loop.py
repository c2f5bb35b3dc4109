"""A control loop over a fake fleet: plans, losses, stragglers, trials, restarts, and changes that fail."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.controller.act import describe_plan
from deployments.controller.observe import UNSTARTED_S
from deployments.wire.messages import total
from earlyexit.errors import OfframpError, PlanError
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem import MinimizeCost, PlanProblem
from optimizer.search.decision import Decision
from optimizer.search.planner import solve
from profiles.table import LatencyTable
from tests.clock import ManualClock
from tests.deployments.control.control_fakes import (
    EASY,
    GROWING,
    POLICY,
    RAMPS,
    SAFE,
    START_S,
    Scene,
    as_many_as_there_are,
    batches_run,
    begun,
    halves,
    no_plan,
    one_is_slow,
    planned,
    problem,
    thresholds_of,
    tuned,
    whole,
)

HARD = (10, 90)
NO_TEXT = "counts SET interval = CAST(X'FF' AS TEXT); UPDATE plans SET placed = '{'"
SWITCH = ["prepare 1", "follow 1"]


def test_an_infinite_latency_is_not_predicted() -> None:
    plan = Plan(stages=whole(2), predicted={"rate_per_s": 5.0, "latency_s": float("inf")})
    assert describe_plan(PlacedPlan(plan=plan)) == "2 x cpu blocks 0-3"


async def test_the_controller_changes_to_a_better_plan_at_the_end_of_a_window(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    assert scene.asked == []
    await scene.ticks(1, EASY)
    assert scene.fleet.log == SWITCH, "replicas host other stages, and none is started"
    # 1/w: (3 / (20 ms / 4), 1 / (0.4 * 20 ms / 4)) = (600, 500) inputs per second, of 400 with the whole model.
    assert scene.said("plan") == [
        "plan 1 in force (period): 3 x cpu blocks 0-1 | 1 x cpu blocks 2-3, 500/s in 68 ms predicted"
    ]
    assert scene.asked[0].survival_N == pytest.approx((1.0, 1.0, 0.4, 0.4))


@pytest.mark.parametrize(
    ("at_once", "levels"), [(None, [4]), (1, [2, 3, 4]), (2, [3, 4]), (5, [4])], ids=["all", "singly", "two", "more"]
)
async def test_starts_at_once_limits_how_many_replicas_start_together(
    tmp_path: Path, at_once: int | None, levels: list[int]
) -> None:
    scene = await begun(tmp_path, first=whole(1), best=whole(4), settings={"starts_at_once": at_once})
    await scene.ticks(1, EASY)
    assert scene.fleet.log == [*(f"scale cpu to {level}" for level in levels), *SWITCH]


async def test_starting_replicas_are_not_stopped_after_several_deaths(tmp_path: Path) -> None:
    scene = Scene(tmp_path, first=whole(4), settings={"starts_at_once": 1})
    await scene.loop.tick()
    scene.fleet.replicas["cpu"], scene.fleet.is_stuck = 1, True
    await scene.ticks(13)
    assert scene.fleet.log == ["scale cpu to 4"] * 2, "with a smaller number, starting replicas would stop"


async def test_a_plan_that_gains_less_than_its_change_costs_is_rejected(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=1, best=halves(2, 2))  # 400/s as well
    assert scene.fleet.log == []
    assert scene.said("keep") == [
        "keeps plan 0 (period): keeps the plan: the new one would give 0.0% more, starting 0 of 4 replicas costs 0.0%, "
        "and 2.0% is the least gain"
    ]
    assert [(row["epoch"], row["outcome"]) for row in scene.history.plans(9)] == [(1, "proposed"), (0, "in force")]


@pytest.mark.parametrize(
    ("best", "taken", "words"),
    [
        (whole(6), halves(3, 1), "give 20.0% more, and starting 2 of 6 replicas costs 33.3%"),
        (halves(4, 2), halves(4, 2), "give 37.5% less, and starting 0 of 4 replicas costs 0.0%"),
    ],
)
async def test_replicas_start_only_for_a_plan_that_gains_more_than_their_start_costs(
    tmp_path: Path, best: tuple[Stage, ...], taken: tuple[Stage, ...], words: str
) -> None:
    def solve_as(asked: PlanProblem) -> Decision:
        scene.clock.advance(50.0)
        return planned(asked, best if asked.devices["cpu"].count == 6 else halves(3, 1))

    wider: dict[str, Any] = {"count": 6, "problem": problem(count=6), "settings": {"start_s": 120.0}}
    scene = await begun(tmp_path, solve_as=solve_as, **wider)
    await scene.ticks(1, EASY)
    assert scene.limits_s == [60.0, 15.0], "both searches share the time, but the second has a quarter"
    assert scene.fleet.followed.plan.stages == taken
    assert scene.history.plans(1)[0]["words"].endswith(f"; compared with the chosen plan, another one would {words}")


async def test_after_a_jump_the_controller_plans_once_there_are_enough_probes(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=6, first=halves(3, 1), best=halves(3, 1))
    scene.fleet.hands_over = 20
    await scene.ticks(1, HARD)
    assert len(scene.asked) == 1
    await scene.ticks(1, HARD)
    assert len(scene.said("reaction")) == 1
    # 30 probes are needed: the first tick brings 20, the second 20 more.
    assert [each.survival_N[2] for each in scene.asked] == pytest.approx([0.4, 1.0])


@pytest.mark.parametrize(
    ("before", "inputs"),
    [(29, (180, 120)), (29, (30, 270)), (24, (180, 120)), (0, (180, 120))],
    ids=["usual exits", "new exits, with few probes", "just planned", "never planned"],
)
async def test_after_a_jump_of_the_rate_the_plan_is_for_the_new_rate(
    tmp_path: Path, before: int, inputs: tuple[int, int]
) -> None:
    cheap = replace(problem(count=40), objective=MinimizeCost(rate_per_s=20.0))
    scene = Scene(tmp_path, problem=cheap, first=halves(3, 1), best=halves(3, 1))
    await scene.loop.tick()
    await scene.ticks(before, EASY)
    scene.fleet.hands_over = 1
    await scene.ticks(1, inputs)
    assert len(scene.asked) == (before > 0)
    await scene.ticks(1, inputs)
    assert scene.said("reaction")[-1] == "60 inputs/s arrived for 10 s, 0 to 20 were expected"
    assert scene.asked[-1].required_per_s == pytest.approx(60.0)


@pytest.mark.parametrize(("refused", "times"), [(0, 0), (60, 1)])
async def test_while_inputs_are_refused_a_smaller_rise_matters(tmp_path: Path, refused: int, times: int) -> None:
    cheap = replace(problem(count=40), objective=MinimizeCost(rate_per_s=200.0))
    scene = await begun(tmp_path, (600, 400), ticks=6, problem=cheap, first=halves(3, 1), best=halves(3, 1))
    for _ in range(2):
        scene.fleet.arrived += refused
        scene.fleet.refused += refused
        await scene.ticks(1, (690 - refused, 460))
    assert scene.said("reaction") == ["230 inputs/s arrived for 10 s, 0 to 200 were expected"] * times


async def test_the_size_of_a_service_of_the_least_cost_follows_the_load(tmp_path: Path) -> None:
    cheap = replace(problem(), objective=MinimizeCost(rate_per_s=400.0, in_time=0.99))  # as by default
    scene = await begun(tmp_path, problem=cheap, ticks=1, solve_as=solve)
    assert sum(scene.fleet.replicas.values()) == 4, "one window is no forecast"
    await scene.ticks(2 * 24 + 4, EASY)
    assert sum(scene.fleet.replicas.values()) == 1
    await scene.ticks(2, (600, 400))
    assert sum(scene.fleet.replicas.values()) > 1
    assert scene.loop.state.placed.plan.predicted["rate_per_s"] > 200.0
    asked_per_s = scene.asked[-1].required_per_s
    await scene.ticks(6, EASY)
    assert scene.said("reaction")[1:] == []
    assert scene.asked[-1].required_per_s == asked_per_s, "a drop asks for no more than before"


async def test_a_plan_in_force_need_not_serve_the_upper_end_of_the_forecast(tmp_path: Path) -> None:
    cheap = replace(problem(), objective=MinimizeCost(rate_per_s=90.0, in_time=0.0))
    scene = await begun(tmp_path, (0, 420), problem=cheap, first=whole(1), best=whole(2))
    for staying in (495, 420, 495):
        await scene.ticks(24, (0, staying))
    assert (scene.asked[-1].required_per_s or 0.0) > 100.0, "more than the plan serves"
    assert scene.fleet.log == []


async def test_each_chain_is_compared_with_the_exits_at_its_own_ramps(tmp_path: Path) -> None:
    (plain,) = whole(2)
    stages = replace(plain, splits=(replace(plain.splits[0], ramps=(1,)),)), plain
    table = LatencyTable(batches=(1, 4), block_s_NB=np.tile([0.01, 0.04], (4, 1)), ramp_s_EB=np.zeros((3, 2)))
    asked = replace(problem(), latency={"cpu": table})
    scene = Scene(tmp_path, first=stages, shares=(0.5, 0.5), best=stages, problem=asked)
    for _ in range(60):
        scene.clock.advance(5.0)
        scene.inputs(60, 40)
        scene.fleet.exits.update({1: -30, 3: 30})  # only the first chain has the ramp
        batches_run(scene, 20, 0.08 + 0.4 * 0.08, ranks=(0, 1))
        batches_run(scene, 20, 0.16, ranks=(2, 3))
        await scene.loop.tick()
    assert scene.said("reaction") == []
    assert scene.loop.view.problem.latency["cpu"].block_s_NB == pytest.approx(table.block_s_NB)


async def test_a_straggler_gets_no_work_until_after_the_next_plan(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, best=whole(4))
    one_is_slow(scene, 4, slow=3)
    scene.best = whole(3)
    when = """NEW.value LIKE '%"reason": "straggler"%' BEGIN SELECT RAISE(FAIL, 'full'); END"""
    scene.history._connection.execute(f"CREATE TRIGGER full BEFORE INSERT ON standing WHEN {when}")
    await scene.ticks(1, EASY)
    scene.history._connection.execute("DROP TRIGGER full")
    await scene.ticks(1, EASY)
    assert scene.said("straggler")[1:] == [
        "cpu#3 takes 2.00 times as long as its 3 peers (2.00 against 1.00 times the profile)"
    ]
    # No accelerator is free, so the stage has one replica less.
    assert scene.fleet.log == SWITCH
    assert scene.fleet.followed.avoided == {"cpu#3": "cpu"}
    assert scene.fleet.followed.plan.stages == whole(3)
    assert scene.fleet.followed.plan.predicted["rate_per_s"] == pytest.approx(300.0)
    await scene.ticks(24, EASY)
    assert scene.asked[-1].devices["cpu"].count == 3
    scene.fleet.replicas["cpu"], scene.fleet.alive = 3, {"cpu": 3}  # it is lost with its accelerator
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.epoch, scene.fleet.followed.avoided) == (2, {})
    assert scene.fleet.followed.plan.stages == whole(3)


async def test_a_straggler_that_does_not_report_rests_until_its_periods_are_over(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, best=whole(3))
    one_is_slow(scene, 4)
    await scene.ticks(1, EASY)
    scene.fleet.silent = True
    await scene.ticks(24, EASY)
    assert len(scene.asked) == 3
    assert scene.fleet.followed.avoided == {"cpu#2": "cpu"}
    scene.fleet.silent = False
    scene.fleet.times.clear()
    await scene.ticks(3 * 24, EASY)
    assert scene.asked[-1].devices["cpu"].count == 3
    await scene.ticks(24, EASY)
    assert scene.asked[-1].devices["cpu"].count == 4
    assert scene.fleet.followed.avoided == {}


async def test_a_free_accelerator_takes_a_stragglers_place(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, first=whole(3), best=whole(3))
    one_is_slow(scene, 3)
    await scene.ticks(1, EASY)
    assert scene.fleet.log == [*SWITCH, "scale cpu to 4", "prepare 2", "follow 2"]
    assert scene.fleet.followed.plan.stages == whole(3)
    await scene.loop.apply(plan_document(Plan(stages=whole(4))), hold=True)
    assert scene.fleet.followed.avoided == {}, "under a held plan it would rest for ever"


async def test_a_straggler_rests_although_its_replacement_never_starts(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, first=whole(3), best=whole(3))
    scene.fleet.is_stuck = True
    one_is_slow(scene, 3)
    await scene.ticks(2, EASY)
    scene.best = whole(2)
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.plan.stages, scene.fleet.followed.avoided) == (whole(2), {"cpu#2": "cpu"})
    assert scene.asked[-1].devices["cpu"].count == 2, "planning goes on"


def fails(asked: PlanProblem) -> Decision:
    raise PlanError("no plan was found, and none was ruled out")


async def test_batches_of_other_times_than_the_profiles_correct_the_rate_of_plans(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=1, best=whole(4))
    # Two slow batches of each replica are too few. Batches also count if the search that follows fails.
    for number, each_s, rate_rps in ((80, 0.06, 400 / 1.5), (80, 0.08, 200.0), (2, 9.0, 200.0), (80, 0.04, 400.0)):
        batches_run(scene, number, each_s)
        scene.solve_as = fails if each_s == 0.08 else None
        await scene.ticks(24, EASY)
        assert evaluate(scene.asked[-1], whole(4)).rate_per_s == pytest.approx(rate_rps)
    scene.fleet.times.clear()
    batches_run(scene, 80, 0.06)
    await scene.ticks(1, EASY)
    scene.restart()  # the next controller compares all batches since the replicas began
    await scene.ticks(1, EASY)
    assert evaluate(scene.asked[-1], whole(4)).rate_per_s == pytest.approx(400 / 1.5)
    scene.best = whole(3)
    batches_run(scene, 100, 0.04, ranks=range(3))
    batches_run(scene, 100, 0.4, ranks=[3])
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.avoided == {"cpu#3": "cpu"}
    assert evaluate(scene.asked[-1], whole(3)).rate_per_s == pytest.approx(300.0)


async def test_a_split_slower_than_the_profile_changes_its_own_blocks(tmp_path: Path) -> None:
    scene = await begun(tmp_path, first=halves(3, 1), best=halves(3, 1))
    batches_run(scene, 100, 0.04, ranks=range(3), end=2)
    batches_run(scene, 300, 0.02, ranks=[3], first=2)
    await scene.ticks(1, EASY)
    assert scene.asked[-1].latency["cpu"].block_s_NB[:, 0] == pytest.approx([0.02, 0.02, 0.01, 0.01])


async def test_the_same_splits_continue_on_fewer_replicas_if_every_stage_still_runs(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, first=halves(2, 2), best=halves(2, 2))
    scene.fleet.log.clear()
    scene.best = halves(1, 2)
    scene.fleet.replicas["cpu"] = 3
    scene.fleet.alive = {"cpu": 3}
    await scene.ticks(1, EASY)
    assert scene.fleet.log == ["scale cpu to 3", *SWITCH]
    assert scene.loop.state.placed.plan.stages == halves(2, 1)
    hosted = {"cpu#0": "split-cpu-0", "cpu#1": "split-cpu-0", "cpu#2": "split-cpu-1"}
    assert scene.loop.state.placed.hosted == hosted  # by the newest reports
    assert scene.history.plans(2)[-1]["words"] == "the same splits on what still runs"
    assert len(scene.said("keep")) == 2


async def test_a_stage_that_stays_without_replicas_is_left_out_before_ray_reports_the_loss(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, first=halves(3, 1), best=halves(3, 1))
    scene.fleet.log.clear()
    scene.best = whole(1)
    scene.fleet.replicas["cpu"], scene.fleet.is_stuck = 1, True
    await scene.ticks(6, EASY)
    assert scene.said("capacity") == []
    await scene.ticks(1, EASY)
    assert scene.said("capacity") == ["capacity lost: {'cpu': 4} before, {'cpu': 1} now"]
    assert scene.asked[-1].devices["cpu"].count == 1


async def test_a_service_without_a_plan_stays_suspended_until_accelerators_return(tmp_path: Path) -> None:
    both = (*halves(1, 1), *whole(2))
    scene = await begun(
        tmp_path, solve_as=lambda asked: planned(asked, both) if asked.devices["cpu"].count == 4 else no_plan()
    )
    scene.fleet.alive = {"cpu": 0}
    await scene.ticks(2)
    assert scene.said("suspended") == ["no plan meets the problem on {'cpu': 0}: the binding limit is devices"]
    scene.start()
    await scene.ticks(2)
    assert scene.fleet.log == ["suspend"] * 4
    scene.fleet.alive = {"cpu": 4}
    await scene.ticks(1)
    assert scene.fleet.log[-1] == "follow 1"
    assert scene.loop.state.suspended is None
    scene.fleet.alive = {"cpu": 0}
    await scene.ticks(1)
    scene.fleet.alive, scene.fleet.replicas["cpu"], scene.fleet.is_stuck = {"cpu": 4}, 1, True
    await scene.ticks(1)
    assert scene.fleet.log[-1] == "follow 2", "a replica that runs the second chain answers more than none"


async def test_a_plan_stays_on_its_accelerators_if_no_other_is_found(tmp_path: Path) -> None:
    scene = await begun(tmp_path, first=whole(3), solve_as=fails)
    await scene.ticks(20, EASY)
    scene.fleet.alive = {"cpu": 3}
    await scene.ticks(4, EASY)
    assert (len(scene.asked), len(scene.said("no plan"))) == (2, 2), "at the loss, and again in the next period only"
    scene.solve_as = None  # none meets the problem
    await scene.ticks(1, EASY)
    assert scene.fleet.log == []
    assert scene.said("no plan")[1:] == [
        "no plan was found, and none was ruled out; keeps plan 0",
        "no plan meets the problem on {'cpu': 3}: the binding limit is devices; keeps plan 0",
    ]
    scene.solve_as = fails
    scene.fleet.alive = {"cpu": 2}
    await scene.ticks(1)
    scene.fleet.alive = {"cpu": 3}
    await scene.ticks(1)
    assert scene.fleet.log[0] == "suspend"
    assert (scene.fleet.followed.epoch, scene.fleet.followed.plan.stages) == (1, whole(3))


@pytest.mark.parametrize("limit_s", [0, 9])
async def test_a_plan_stays_if_time_is_over_before_a_better_one(tmp_path: Path, limit_s: int) -> None:
    briefly = partial(solve, time_limit_s=limit_s, now_s=count().__next__)
    scene = await begun(tmp_path, ticks=1, first=halves(3, 1), solve_as=briefly)
    assert scene.fleet.log == []
    assert scene.said("no plan", "keep")[0].startswith("keeps plan 0 (period)")


async def test_a_plan_that_misses_its_promise_is_rolled_back_and_blamed(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=1, best=halves(3, 1), predicted={"rate_per_s": 400.0, "latency_s": 0.05})
    assert scene.fleet.followed.plan.stages == halves(3, 1)
    scene.fleet.log.clear()
    await scene.ticks(6, EASY, in_slo=False)
    assert [words.partition(":")[0] for words in scene.said("trial")] == ["rolls back"]
    assert scene.fleet.followed.plan.stages == whole(4)
    assert scene.fleet.followed.epoch == 2
    scene.solve_as = lambda asked: planned(asked, halves(3, 1))
    await scene.ticks(24, EASY)
    assert scene.fleet.followed.epoch == 2
    await scene.ticks(4 * 24, EASY)
    assert (scene.fleet.followed.epoch, scene.fleet.followed.plan.stages) == (3, halves(3, 1)), "after five periods"


async def test_an_operators_plan_is_held(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=whole(4))
    with pytest.raises(PlanError, match=r"the plan needs .*'cpu': 5.*; available are .*'cpu': 4"):
        await scene.loop.apply(plan_document(Plan(stages=whole(5))))
    assert await scene.loop.apply(plan_document(Plan(stages=halves(3, 1), policy=POLICY)), hold=True) == 1
    assert scene.fleet.log == SWITCH
    await scene.ticks(30, EASY)
    assert scene.asked == []
    first, second = (plan_document(Plan(stages=stages, policy=POLICY)) for stages in (whole(3), halves(3, 1)))
    assert [*await asyncio.gather(scene.loop.apply(first), scene.loop.apply(second))] == [2, 3], "one waits"
    await scene.ticks(1, EASY)
    assert len(scene.asked) == 1
    assert not scene.loop.state.hold


async def test_an_operators_plan_may_use_a_type_that_was_empty_for_20_s(tmp_path: Path) -> None:
    scene = await begun(tmp_path, first=whole(4), best=whole(4))
    scene.fleet.replicas["cpu"], scene.fleet.is_stuck = 0, True
    await scene.ticks(5)
    scene.fleet.is_stuck = False
    assert await scene.loop.apply(plan_document(Plan(stages=halves(3, 1), policy=POLICY))) == 1
    assert scene.said("capacity", "suspended") == []


async def test_a_hold_ends_if_accelerators_are_lost_even_if_only_a_blamed_plan_fits(tmp_path: Path) -> None:
    scene = await begun(tmp_path, solve_as=as_many_as_there_are)
    await scene.loop.apply(plan_document(Plan(stages=halves(3, 1), policy=POLICY)), hold=True)
    scene.loop.update_state(blamed={whole(1): scene.loop.view.period + 5})  # it was rolled back
    scene.fleet.replicas["cpu"], scene.fleet.alive = 1, {"cpu": 1}
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.plan.stages, scene.loop.state.hold) == (whole(1), False)


async def test_a_chain_that_loses_replicas_gets_a_smaller_share_until_the_next_plan(tmp_path: Path) -> None:
    scene = await begun(tmp_path, solve_as=lambda _: no_plan())
    await scene.loop.apply(plan_document(Plan(stages=whole(1) + whole(3), shares=(0.25, 0.75), policy=POLICY)))
    scene.fleet.alive = {"cpu": 3}
    scene.fleet.replicas["cpu"] = 3
    await scene.ticks(1, EASY)
    plan = scene.fleet.followed.plan
    assert plan.stages == whole(1) + whole(2)
    assert plan.shares == pytest.approx((1 / 3, 2 / 3))
    scene.fleet.alive, scene.fleet.replicas["cpu"] = {"cpu": 1}, 1
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.plan.stages, scene.loop.view.state.suspended) == (whole(1), None)
    scene.fleet.alive, scene.fleet.replicas["cpu"] = {"cpu": 3}, 3
    scene.solve_as, scene.best = None, halves(2, 1)
    await scene.plans_again()
    assert scene.said("error") == []
    assert (scene.fleet.followed.plan.stages, scene.fleet.followed.plan.shares) == (halves(2, 1), (1.0,))


@pytest.mark.parametrize("predicted", [{"usd_per_hour": "dear"}, {"rate_per_s": 0.0}], ids=["words", "nothing"])
async def test_a_predicted_cost_of_any_type_is_accepted(tmp_path: Path, predicted: dict[str, Any]) -> None:
    scene = await begun(tmp_path, best=halves(3, 1), predicted=predicted)
    scene.start()
    await scene.ticks(2, EASY)
    assert scene.said("error") == []
    assert scene.fleet.followed.plan.stages == halves(3, 1)


async def test_a_restarted_controller_restores_plan_and_observations(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=2, best=halves(3, 1))
    scene.fleet.log.clear()
    asked = len(scene.asked)
    scene.start()  # nothing was closed: it was killed
    await scene.ticks(1, EASY)
    assert len(scene.asked) == asked + 1, "it plans at once: what the plan stood on is gone"
    assert scene.fleet.log == []
    assert scene.loop.state.placed == scene.fleet.followed
    estimate = scene.loop.stream.observed(scene.loop.state, START_S, START_S + 120.0)
    assert estimate is not None
    assert estimate.num_inputs == 24 * 100


@pytest.mark.parametrize("spoilt", ["probes SET columns = X'00'", "probes SET shape = ''", NO_TEXT])
async def test_a_controller_restores_its_plan_despite_unreadable_rows(tmp_path: Path, spoilt: str) -> None:
    scene = await begun(tmp_path, ticks=1, best=halves(3, 1))
    scene.history._connection.executescript(f"UPDATE {spoilt}")
    scene.start()
    assert (scene.loop.state.placed.epoch, len(scene.said("error"))) == (1, 1)
    assert all(row["placed"] for row in scene.history.plans(9))


@pytest.mark.parametrize("solve_as", [as_many_as_there_are, lambda _: no_plan()], ids=["another", "the earlier one"])
async def test_the_controller_plans_again_if_accelerators_are_lost_while_replicas_start(
    tmp_path: Path, solve_as: Any
) -> None:
    scene = await begun(tmp_path, **GROWING)
    scene.fleet.is_stuck = True
    scene.fleet.loses = 1

    def meanwhile() -> None:
        scene.solve_as = solve_as

    scene.meanwhile = meanwhile
    await scene.ticks(1, EASY)
    assert scene.said("capacity", "error") == ["capacity lost: {'cpu': 5} before, {'cpu': 4} now"]
    assert (scene.fleet.followed.plan.stages, scene.loop.state.suspended) == (whole(4), None)


async def test_replicas_that_do_not_start_are_requested_once_a_minute(tmp_path: Path) -> None:
    scene = await begun(tmp_path, **GROWING)
    scene.fleet.is_stuck = True
    requested_s: list[float] = []

    def meanwhile() -> None:
        if len(scene.fleet.log) > len(requested_s):
            requested_s.append(scene.clock.now_s())

    scene.meanwhile = meanwhile
    await scene.ticks(1, EASY)
    assert scene.fleet.log == ["scale cpu to 5"] * 3
    assert np.diff(requested_s) == pytest.approx(60.0, abs=0.5)
    await scene.ticks(1, EASY)
    assert scene.said("error") == ["OfframpError: replicas did not start within 120 s: cpu runs 4 of 5"], "only once"
    scene.clock.advance(600.0)
    scene.start()  # the next controller waits anew
    await scene.ticks(1, EASY)
    scene.fleet.is_stuck = False
    scene.fleet.replicas["cpu"] = 5
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.plan.stages == halves(3, 2)


async def test_accelerators_without_starting_replicas_are_left_out_for_half_an_hour(tmp_path: Path) -> None:
    def solve_as(asked: PlanProblem) -> Decision:
        return planned(asked, halves(4, 2)) if asked.devices["cpu"].count == 6 else as_many_as_there_are(asked)

    scene = await begun(tmp_path, count=6, problem=problem(count=6), solve_as=solve_as, settings={"start_s": 10.0})
    scene.fleet.replicas["cpu"], scene.fleet.is_stuck = 5, True  # the sixth is broken
    with pytest.raises(OfframpError, match="did not start"):
        await scene.loop.apply(plan_document(Plan(stages=halves(4, 2), policy=POLICY)), hold=True)
    await scene.ticks(2, EASY)
    assert scene.said("capacity") == ["capacity lost: {'cpu': 6} before, {'cpu': 5} now"]
    assert (scene.fleet.followed.plan.stages, scene.loop.state.hold) == (whole(5), False)
    await scene.ticks(50, EASY)
    assert {each.devices["cpu"].count for each in scene.asked} == {4, 5}
    scene.clock.advance(UNSTARTED_S)
    await scene.ticks(1, EASY)
    assert {each.devices["cpu"].count for each in scene.asked} == {4, 5, 6}


async def test_a_plan_that_replicas_cannot_prepare_is_given_up(tmp_path: Path) -> None:
    other = tuple(replace(stage, splits=(replace(stage.splits[0], batch=1),)) for stage in whole(1))
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.broken = {"prepare"}
    await scene.ticks(10, EASY)
    scene.fleet.broken = set()
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.epoch, scene.fleet.followed.plan.stages) == (2, whole(4))
    scene.solve_as = lambda asked: replace(planned(asked, whole(1)), candidates=(other,))
    scene.fleet.replicas["cpu"], scene.fleet.alive, scene.fleet.broken = 1, {"cpu": 1}, {"prepare"}
    await scene.ticks(10, EASY)
    assert scene.loop.state.placed.plan.stages == whole(1)
    await scene.ticks(1, EASY)
    assert scene.loop.state.placed.plan.stages == other


async def test_observations_during_a_change_are_stored_at_once(tmp_path: Path) -> None:
    scene = await begun(tmp_path, **GROWING)
    scene.fleet.is_stuck = True
    rows: list[int] = []

    def meanwhile() -> None:
        if len(rows) == 1:
            scene.clock._now_s -= 60.0  # it is set back
        with closing(sqlite3.connect(tmp_path / "control.db")) as other:
            rows.append(other.execute("SELECT count(*) FROM probes").fetchone()[0])
        scene.inputs(*EASY)

    scene.meanwhile = meanwhile
    await scene.ticks(1, EASY)
    # 23 ticks before; it waits 20 times between two ticks.
    assert rows[::20][:3] == [24, 25, 26]


async def test_surplus_replicas_stop_after_a_minute_although_inputs_of_the_earlier_plan_are_left(
    tmp_path: Path,
) -> None:
    scene = await begun(tmp_path, first=halves(2, 2))
    scene.fleet.behind = {"i"}
    await scene.loop.apply(plan_document(Plan(stages=whole(3), policy=POLICY)))
    await scene.ticks(11, EASY)
    assert scene.fleet.log == SWITCH
    await scene.ticks(1, EASY)
    assert (scene.fleet.log[2:], scene.loop.view.running) == (["scale cpu to 3"], {"cpu": 3})


async def test_a_controller_keeps_its_state_while_the_disk_is_full(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    before, tables = scene.loop.state, ("standing", "events")
    for table in tables:
        full = f"CREATE TRIGGER {table}_full BEFORE INSERT ON {table} BEGIN SELECT RAISE(FAIL, 'full'); END"
        scene.history._connection.execute(full)
    await scene.ticks(1, EASY)
    assert (scene.loop.state, scene.fleet.followed.epoch) == (before, 0)
    scene.start()
    await scene.ticks(1, EASY)
    assert (scene.loop.state, scene.fleet.followed.epoch) == (before, 0)
    for table in tables:
        scene.history._connection.execute(f"DROP TRIGGER {table}_full")
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.epoch == 1
    assert [row["epoch"] for row in scene.history.plans(9)] == [1, 0], "one that was never in force is not listed"


@pytest.mark.parametrize("table", ["standing", "events", "counts"])
async def test_an_alarm_on_a_full_disk_is_applied_once_it_has_room(tmp_path: Path, table: str) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.observed = 0
    with closing(sqlite3.connect(tmp_path / "control.db")) as other:
        other.execute(f"ALTER TABLE {table} RENAME TO away")
        tuner.says(SAFE, "alarm")
        await scene.ticks(2, EASY)
        other.execute(f"ALTER TABLE away RENAME TO {table}")
    await scene.ticks(1, EASY)
    assert (thresholds_of(scene), scene.loop.changes, tuner.observed) == (SAFE, {"alarm": 1}, 300)


async def test_the_controller_plans_although_the_clock_was_set_back(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=whole(4))
    scene.clock = scene.fleet.clock = ManualClock(START_S - 600.0)
    scene.start()
    await scene.ticks(48, EASY)  # at once, with the first probes, and after each of two periods
    assert len(scene.asked) == 4
    view = scene.loop.view
    counted, forecast = total(view.stream.intervals(view.state.followed_s)), view.forecast
    assert counted is not None
    assert forecast is not None
    assert (counted.arrived, counted.seconds, forecast.num_probes) == (47 * 100, 47 * 5.0, 2400)


async def test_a_clock_that_was_set_forward_stops_no_replicas(tmp_path: Path) -> None:
    cheap = replace(problem(), objective=MinimizeCost(rate_per_s=200.0))
    scene = await begun(tmp_path, (600, 400), problem=cheap, ticks=49, solve_as=solve)
    replicas = scene.fleet.replicas["cpu"]
    scene.clock.advance(600.0)
    await scene.ticks(25, (600, 400))
    assert (scene.fleet.replicas["cpu"], scene.said("reaction")) == (replicas, [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": replace(POLICY, thresholds=dict.fromkeys(RAMPS, 0.7))}, "policy"),
        ({"problem": problem(ramps=(0, 2))}, "ramps"),
        ({"problem": problem(count=0)}, "accelerators"),
        ({"placed": PlacedPlan(plan=Plan(stages=whole(4), policy=POLICY, dispatch="filling"))}, "dispatch"),
    ],
    ids=["thresholds", "ramps", "accelerators", "dispatch"],
)
async def test_a_plan_of_other_settings_is_not_restored(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    scene = await begun(tmp_path, ticks=1, best=halves(3, 1))
    assert scene.loop.state.placed.epoch == 1
    for name, value in changes.items():
        setattr(scene, name, value)
    scene.start()
    assert scene.said("error") == [f"the last plan cannot be restored: settings have changed: {words}"]
    assert scene.loop.state.placed == scene.placed
    scene.start()  # it was killed at once
    assert scene.loop.state.placed == scene.placed


async def test_deviations_of_replicas_and_ingresses_from_the_plan_are_repaired(tmp_path: Path) -> None:
    scene = await begun(tmp_path, (0, 0), best=whole(4))
    scene.fleet.replicas["cpu"] = 1
    await scene.ticks(1)
    assert scene.fleet.log == ["scale cpu to 4"]
    scene.fleet.is_suspended = True
    await scene.ticks(1)
    assert scene.fleet.log[1:] == ["follow 0"]
    scene.fleet.followed = PlacedPlan(plan=Plan(stages=whole(4), epoch=7))
    await scene.ticks(1)
    assert scene.fleet.followed.epoch == 8, "a plan that is not remembered is outnumbered"
