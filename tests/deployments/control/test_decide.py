"""Which plan is proposed, and which accelerators count as missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deployments.controller.decide import Proposal, propose
from deployments.controller.observe import BELIEVED_S
from deployments.controller.observe import MissingAccelerators as Missing
from earlyexit.network.boundary import Split
from optimizer.decision import Decision, Strategy
from optimizer.live.trial import Blame
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from optimizer.problem import MinimizeCost, PlanProblem
from tests.deployments.control.control_fakes import halves, no_plan, planned, problem, whole

Stages = tuple[Stage, ...]


class FakePlanner:
    """Finds what it was given: the best plan and other good ones."""

    def __init__(self, *best: Stages) -> None:
        self._best = best
        self.asked: list[tuple[float | None, Strategy]] = []
        self.too_fast_per_s = float("inf")

    async def solve(self, asked: PlanProblem, strategy: Strategy) -> Decision:
        rate_per_s = asked.objective.rate_per_s if isinstance(asked.objective, MinimizeCost) else None
        self.asked.append((rate_per_s, strategy))
        if not self._best or (rate_per_s or 0.0) > self.too_fast_per_s:
            return no_plan()
        return replace(planned(asked, self._best[0]), candidates=self._best[1:])


async def stages_of(planner: FakePlanner, *questions: PlanProblem, blamed: Sequence[Blame] = ()) -> Stages | None:
    found = await propose(questions or (problem(),), planner.solve, "best", blamed=blamed, reach=None)
    return found.planned.stages if isinstance(found, Proposal) else None


async def test_another_good_plan_must_keep_the_promises_that_the_best_one_keeps() -> None:
    blamed = (Blame(stages=whole(4), problem=problem(), until=6),)
    planner = FakePlanner(whole(4), halves(4, 1), halves(2, 2))  # five accelerators, of four
    assert await stages_of(planner, blamed=blamed) == halves(2, 2)


async def test_records_may_prefer_another_plan() -> None:
    # All 1.0 at block 2: no input leaves at ramp 1, so that the second half needs as much as the first.
    found = await propose(
        (problem(),),
        FakePlanner(halves(3, 1), halves(2, 2)).solve,
        "best",
        blamed=(),
        reach=lambda active: (1.0, 1.0, 1.0, 1.0),
    )
    assert isinstance(found, Proposal)
    assert found.planned.stages == halves(2, 2)
    assert found.figures.rate_per_s == 400.0


async def test_questions_are_asked_until_one_has_an_answer() -> None:
    dear, cheap = (replace(problem(), objective=MinimizeCost(rate_per_s=rate)) for rate in (900.0, 300.0))
    planner = FakePlanner(whole(4))
    planner.too_fast_per_s = 400.0
    assert await stages_of(planner, dear, cheap, problem()) == whole(4)
    assert planner.asked == [(900.0, "best"), (300.0, "best")]


PLACED = PlacedPlan(
    plan=Plan(
        stages=(
            Stage(device="cpu", replicas=3, splits=(Split(first=0, end=1, batch=1),)),
            Stage(device="cpu", replicas=1, splits=(Split(first=1, end=2, batch=1),)),
        )
    )
)
ALL, WITHOUT_STAGE = {"cpu": 4}, {"cpu": 1}


def left(missing: Missing, running: dict[str, int], at_s: float, *, counted: int = 6) -> int:
    return missing.left({"cpu": counted}, running, PLACED, at_s)["cpu"]


def test_a_stage_that_has_not_started_yet_is_waited_for() -> None:
    missing = Missing()
    assert [left(missing, WITHOUT_STAGE, at_s) for at_s in (0.0, 2.0, 4.0)] == [6, 6, 6]


def given_up() -> Missing:
    """What is believed of a stage that was empty from 5 to 35 s."""
    missing = Missing()
    looks = [(ALL, 0.0), *((WITHOUT_STAGE, 5.0 * k) for k in range(1, 8))]
    assert [left(missing, running, at_s) for running, at_s in looks] == [6] * 7 + [3]
    return missing


def test_a_stage_whose_replica_serve_restarts_within_20_s_is_not_given_up() -> None:
    missing = Missing()
    looks = [ALL, *[WITHOUT_STAGE] * 5, ALL, *[WITHOUT_STAGE] * 5, ALL]
    assert {left(missing, running, 5.0 * k) for k, running in enumerate(looks)} == {6}
    left(missing, WITHOUT_STAGE, 65.0)
    missing.left({"cpu": 6}, WITHOUT_STAGE, None, 90.0)  # the plan changes, for which replicas are started
    assert left(missing, WITHOUT_STAGE, 95.0) == 6


def test_accelerators_are_there_again_once_ray_counts_them_or_their_replicas_run_or_after_a_while() -> None:
    missing = given_up()
    assert left(missing, WITHOUT_STAGE, 36.0) == 3
    assert left(missing, WITHOUT_STAGE, 38.0, counted=5) == 5
    assert left(missing, WITHOUT_STAGE, 40.0) == 6
    assert left(given_up(), ALL, 40.0) == 6
    missing = given_up()
    assert left(missing, WITHOUT_STAGE, 35.0 + BELIEVED_S - 1.0) == 3
    assert left(missing, WITHOUT_STAGE, 35.0 + BELIEVED_S) == 6
