"""What every side needs for a fixed rate, by batch limit: the form of E3's figures 14 and 15 (section 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.e3_plans import PLENTY
from experiments.studies.cheapest import Need, accelerators, need
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.flat import flat
from experiments.studies.kit import Comparison, Effort, Ratios, largest_ratios, ratio
from experiments.studies.sides import SIDES, Workload, facing
from optimizer.decision import Planned
from optimizer.planner import solve
from optimizer.problem import MaximizeRate, PlanProblem, Supply
from optimizer.what_if import with_batch_limit
from simulator.goodput import SHARE

BATCHES: dict[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8), "quick": (8,)}
BASELINES = ("stock", "early-exit")
SEED = 0

Needs = Mapping[str, tuple[Need | None, ...]]
"""By side, one per batch limit; None where no plan holds the rate."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Circumstances that are asked for at the largest batch alone."""

    cluster: PlanProblem
    inputs: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRate:
    """All needs."""

    rate_per_s: float
    batches: tuple[int, ...]
    needs: Needs
    cases: Mapping[str, Needs]
    """By name; at the largest batch."""

    @property
    def usd_per_hour(self) -> dict[str, tuple[float | None, ...]]:
        return usd_per_hour(self.needs)

    def ratios(self, side: str) -> Ratios:
        """How many times a side's cost the baselines have, at most."""
        return largest_ratios(self.usd_per_hour, side, lower_is_better=True)

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rate_per_s": self.rate_per_s,
            "batches": self.batches,
            "needs": _document(self.needs),
            "cases": {name: _document(each) for name, each in self.cases.items()},
        }


def e3_cases(cluster: PlanProblem, published: PlanProblem, inputs: Workload) -> dict[str, Case]:
    """Accelerators as fast as published; E3's, which a batch of 8 does not fill; and its exits and ramps, too."""
    return {
        "published speed": Case(cluster=published, inputs=inputs),
        "flat times": Case(cluster=flat(cluster, LARGEST_BATCH), inputs=inputs),
        "E3's circumstances": Case(cluster=like_e3(cluster), inputs=even_exits(cluster, seed=SEED)),
    }


def fixed_rate(
    cluster: PlanProblem, inputs: Workload, cases: Mapping[str, Case], effort: Effort, *, rate_per_s: float
) -> FixedRate:
    """What every side needs: at each batch limit, and in other cases at the largest."""
    batches = BATCHES[effort]
    return FixedRate(
        rate_per_s=rate_per_s,
        batches=batches,
        needs=_needs(cluster, inputs, batches, effort, rate_per_s),
        cases={
            name: _needs(case.cluster, case.inputs, batches[-1:], effort, rate_per_s) for name, case in cases.items()
        },
    )


def _needs(cluster: PlanProblem, inputs: Workload, batches: Sequence[int], effort: Effort, rate_per_s: float) -> Needs:
    problems = [facing(with_batch_limit(plenty(cluster), batch), inputs) for batch in batches]
    return {
        side: tuple(need(problem, side, inputs, effort, rate_per_s=rate_per_s, seed=SEED) for problem in problems)
        for side in SIDES
    }


def plenty(problem: PlanProblem) -> PlanProblem:
    """More accelerators than the rate takes."""
    many = {name: replace(supply, count=PLENTY) for name, supply in problem.devices.items()}
    return replace(problem, devices=many)


def usd_per_hour(needs: Needs) -> dict[str, tuple[float | None, ...]]:
    """Cost by side."""
    return {side: tuple(None if each is None else each.usd_per_hour for each in row) for side, row in needs.items()}


def dearer(needs: Needs, at: int) -> dict[str, float | None]:
    """How many times e3's cost each baseline has, at one batch limit."""
    usd = {side: row[at] for side, row in usd_per_hour(needs).items()}
    return {other: ratio(usd["e3"], usd[other], lower_is_better=True) for other in BASELINES}


def comparisons(found: FixedRate) -> tuple[Comparison, ...]:
    """Costs of the baselines over e3's, the largest batch first, then the other cases."""
    rows = {f"batch {batch}": dearer(found.needs, at) for at, batch in reversed(list(enumerate(found.batches)))}
    rows |= {f"batch {found.batches[-1]}, {name}": dearer(each, -1) for name, each in found.cases.items()}
    return tuple(
        Comparison(name=f"{other} / e3, {label}", ours=value)
        for label, row in rows.items()
        for other, value in row.items()
    )


def bought(found: FixedRate) -> tuple[str, ...]:
    """Which accelerators hold the rate: a sentence per batch limit and case."""
    rows = {
        f"Batch {batch}": {side: row[at] for side, row in found.needs.items()} for at, batch in enumerate(found.batches)
    }
    for name, needs in found.cases.items():
        rows[f"Batch {found.batches[-1]}, {name}"] = {side: row[-1] for side, row in needs.items()}
    return tuple(
        f"{label}: {', '.join(f'{side} {_bought(each)}' for side, each in row.items())}." for label, row in rows.items()
    )


def _bought(found: Need | None) -> str:
    return "none" if found is None else _told(found.planned)


def corrections(found: FixedRate) -> tuple[str, ...]:
    """A sentence per side of whose plans the simulation does not say what the cost model says."""
    notes = []
    for side, row in found.needs.items():
        words = [
            f"{_told(each.proposed)} at batch {batch} ({_verdict(each)})"
            for batch, each in zip(found.batches, row, strict=True)
            if each is not None and not _is_confirmed(each)
        ]
        if words:
            notes.append(f"For {side} the cost model asks for {'; '.join(words)}.")
    return tuple(notes)


def _is_confirmed(found: Need) -> bool:
    return found.proposed_share >= SHARE and found.usd_per_hour == found.proposed.figures.usd_per_hour


def _verdict(found: Need) -> str:
    if found.proposed_share >= SHARE:
        return f"{_told(found.planned)} hold the rate too"
    another = "of another plan " if accelerators(found.planned.stages) == accelerators(found.proposed.stages) else ""
    return f"{found.proposed_share:.1%} in time; {_told(found.planned)} {another}hold the rate"


def _told(planned: Planned) -> str:
    counts = sorted(accelerators(planned.stages).items(), reverse=True)
    return " + ".join(f"{count} {device}" for device, count in counts)


def least_in_fractions(problem: PlanProblem, rate_per_s: float) -> tuple[str, float]:
    """The type of accelerator that is cheapest for stock, and USD per hour for the rate if parts of it could be had.

    By the cost model. No mix of types that each run the whole model costs less.
    """
    costs = {}
    for device, supply in problem.devices.items():
        one = {device: Supply(count=1, usd_per_hour=supply.usd_per_hour)}
        decision = solve(replace(problem, devices=one, objective=MaximizeRate()), "stock")
        if isinstance(decision, Planned):
            costs[device] = rate_per_s / decision.figures.rate_per_s * supply.usd_per_hour
    device = min(costs, key=lambda name: costs[name])
    return device, costs[device]


def _document(needs: Needs) -> dict[str, Any]:
    return {side: [None if each is None else each.document() for each in row] for side, row in needs.items()}
