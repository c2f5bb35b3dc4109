"""What sides run: the full model, exits with shrinking batches, and cuts: the best ones, or one at every ramp."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from earlyexit.split import Split

if TYPE_CHECKING:
    from optimizer.problem import PlanProblem
    from profiles.table import LatencyTable

SHOWN_SPLITS = 6
"""Of a plan, in a table's last column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a side runs; its splits hold the whole model."""

    name: str
    splits: tuple[Split, ...]

    @property
    def ramps(self) -> tuple[int, ...]:
        """The active ones."""
        return tuple(ramp for split in self.splits for ramp in split.ramps)

    def __str__(self) -> str:
        """Each split's blocks, and how many of its ramps are on; of many splits their number."""
        if len(self.splits) > SHOWN_SPLITS:
            return f"{len(self.splits)} splits ({len(self.ramps)})"
        return " | ".join(f"{split.first}-{split.end - 1} ({len(split.ramps)})" for split in self.splits)


def stock(num_blocks: int, batch: int) -> Plan:
    """The full model, no ramp on."""
    return Plan(name="stock", splits=(Split(first=0, end=num_blocks, batch=batch),))


def early_exit(num_blocks: int, ramps: tuple[int, ...], batch: int) -> Plan:
    """Every ramp on, batches shrink: E3's early-exit baseline."""
    return Plan(name="early-exit", splits=(Split(first=0, end=num_blocks, batch=batch, ramps=ramps),))


def serial_every_ramp(num_blocks: int, ramps: tuple[int, ...], batch: int) -> Plan:
    """A cut after every ramp: no batch ever shrinks."""
    bounds = [0, *(ramp + 1 for ramp in ramps), num_blocks]
    splits = (
        Split(first=first, end=end, batch=batch, ramps=() if end == num_blocks else (end - 1,))
        for first, end in pairwise(bounds)
    )
    return Plan(name="serial, every ramp", splits=tuple(splits))


def problem_of(table: LatencyTable, ramps: tuple[int, ...], survival: Sequence[float]) -> PlanProblem:
    """What the planner is asked: the highest rate of one device, however late the answers."""
    from optimizer.problem import ANY_LATENCY_S, Link, MaximizeRate, PlanProblem, Slo, Supply

    num_blocks = len(survival)
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=ramps,
        survival_N=tuple(survival),
        latency={"gpu": table},
        devices={"gpu": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0,) * num_blocks,
        slo=Slo(latency_s=ANY_LATENCY_S, slack=0.0),
        objective=MaximizeRate(),
    )


def can_plan() -> bool:
    """Whether the planner's compiler is here; a bare machine may lack it."""
    return importlib.util.find_spec("numba") is not None


def planned(problem: PlanProblem) -> tuple[Plan, ...]:
    """The product planner's answers for this device: the best ramps of one split, and the best cuts."""
    from optimizer.decision import Planned
    from optimizer.planner import solve
    from optimizer.space import Space

    one_split = Space(strategy="early-exit", splits_per_stage=False, several_stages=False)
    decisions = {
        "early-exit, best ramps": solve(problem, one_split),
        "serial": solve(problem, "serial"),
    }
    plans = []
    for name, decision in decisions.items():
        assert isinstance(decision, Planned), "any latency will do"
        [stage] = decision.stages
        plans.append(Plan(name=name, splits=stage.splits))
    return tuple(plans)


def predicted_per_s(problem: PlanProblem, plan: Plan) -> float:
    """By the product's cost model, which knows no price of a split beside its blocks'."""
    from optimizer.evaluate import evaluate
    from optimizer.plan import Stage

    return evaluate(problem, (Stage(device="gpu", replicas=1, splits=plan.splits),)).rate_per_s
