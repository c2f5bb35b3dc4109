"""What a planner answers: a plan with its proof, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimizer.evaluate import Evaluation
from optimizer.plan import Stage

Strategy = Literal["best", "stock", "early-exit", "e3", "serial"]
STRATEGIES: tuple[Strategy, ...] = ("best", "stock", "early-exit", "e3", "serial")
"""`best` searches the whole space of plans; the others are parts of it that people deploy today, or E3's."""

Binding = Literal["devices", "budget", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The best plan of a strategy's space."""

    strategy: Strategy
    stages: tuple[Stage, ...]
    figures: Evaluation
    bound: float
    """No plan of the space is better than this: a rate per second, or USD per hour."""
    gap: float
    """How far the plan may be from the best, as a share of the bound; 0 where it is proven best."""
    candidates: tuple[tuple[Stage, ...], ...] = ()
    """Other good plans, best first: what joint exit records may prefer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """No plan of the strategy's space meets the problem."""

    strategy: Strategy
    binding: Binding
    """Which promise cannot be kept; the figures below say what would do, the others unchanged."""
    nearest_slo_s: float | None = None
    """The least SLO latency that has a plan; None where none has."""
    highest_rate_per_s: float | None = None
    """The highest rate that has a plan; None where none has or the rate is what is sought."""


Decision = Planned | NoPlan


def gap_between(value: float, bound: float) -> float:
    """How far a plan is from a bound, as a share of it."""
    return abs(value - bound) / bound if bound else float(value > 0)
