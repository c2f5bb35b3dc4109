"""Strategies on a cluster of several accelerator types, and on 16 V100 at the same price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.studies.kit import ratio
from experiments.studies.side_by_side import Row, document, simulated
from experiments.studies.sides import Workload, decide, facing
from optimizer.decision import Strategy
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

BASELINES: tuple[Strategy, ...] = ("stock", "early-exit")
READINGS = ("one type", "all types", "16 V100")
"""What a baseline may use: the type of the mixed cluster that suits it best; all of them side by side, each a service
of its own that holds the whole model and gets the load that it bears; or the 16 V100 of the same price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBatch:
    """Goodputs with batches up to one size, in inputs per second; None without a plan."""

    mixed: Mapping[str, float | None]
    """Pipelines over all types."""
    by_type: Mapping[str, Mapping[str, float]]
    """By accelerator type and strategy: a service on that type alone; 0 without a plan."""
    equal: Mapping[str, float | None]
    """On the 16 V100."""

    def baseline(self, strategy: str, reading: str) -> float | None:
        """What the strategy does by that reading."""
        alone = [rates[strategy] for rates in self.by_type.values()]
        return {"one type": max(alone), "all types": sum(alone), "16 V100": self.equal.get(strategy)}[reading]

    def times(self, pipeline: str, strategy: str, reading: str) -> float | None:
        """How many times the baseline's goodput the pipeline's on the mixed cluster is."""
        return ratio(self.mixed[pipeline], self.baseline(strategy, reading))


def on_type(problem: PlanProblem, name: str) -> PlanProblem:
    """A cluster's accelerators of one type."""
    return replace(problem, devices={name: problem.devices[name]}, latency={name: problem.latency[name]})


def as_fast_as_dear(problem: PlanProblem, equal: PlanProblem) -> PlanProblem:
    """Were every type as fast for its price as the equal cluster's: what is left is what mixing itself gives."""
    ((name, base),) = equal.devices.items()
    table = equal.latency[name]
    latency = {}
    for each, supply in problem.devices.items():
        slower = base.usd_per_hour / supply.usd_per_hour
        latency[each] = replace(table, block_s_NB=table.block_s_NB * slower, ramp_s_EB=table.ramp_s_EB * slower)
    return replace(problem, latency=latency)


def at_batches(
    mixed: PlanProblem,
    equal: PlanProblem,
    inputs: Workload,
    batches: tuple[int, ...],
    pipelines: tuple[Strategy, ...],
    *,
    seed: int = 0,
) -> tuple[dict[int, AtBatch], dict[str, Any]]:
    """Every batch limit, and everything about its plans as plain data.

    A service on one type keeps the smaller batches that it had: what suits a K80 is its own to choose.
    """
    found: dict[int, AtBatch] = {}
    documents: dict[str, Any] = {}
    alone: dict[str, Mapping[str, float]] = {name: dict.fromkeys(BASELINES, 0.0) for name in mixed.devices}
    for batch in batches:
        limited, limited_equal = (with_batch_limit(facing(each, inputs), batch) for each in (mixed, equal))
        rows = {"mixed": _row(limited, pipelines, inputs, seed)}
        for name in mixed.devices:
            if name in limited.latency:
                row = rows[name] = _row(on_type(limited, name), BASELINES, inputs, seed)
                alone[name] = better_of(alone[name], row)
        rows["equal"] = _row(limited_equal, (*BASELINES, "e3"), inputs, seed)
        found[batch] = AtBatch(mixed=_rates(rows["mixed"]), by_type=dict(alone), equal=_rates(rows["equal"]))
        documents[f"batch {batch}"] = document(rows)
    return found, documents


def better_of(before: Mapping[str, float], row: Row) -> dict[str, float]:
    """Goodput by strategy of a service that may stay as it was before."""
    return {name: max(rate_per_s, row[name].rate_per_s or 0.0) for name, rate_per_s in before.items()}


def _row(problem: PlanProblem, names: tuple[Strategy, ...], inputs: Workload, seed: int) -> Row:
    """In short simulations: they tell rates 1 % higher than long ones, those of all contenders alike."""
    return simulated(problem, decide(problem, names), inputs, "quick", seed=seed)


def _rates(row: Row) -> dict[str, float | None]:
    return {name: point.rate_per_s for name, point in row.items()}
