"""What a study is, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from earlyexit.errors import InputError
from experiments.studies.picture import Picture

Effort = Literal["full", "quick"]
"""Quick: the same code on fewer points or shorter runs; its figures are not for quoting."""

How = Literal["simulated", "computed", "emulated", "real"]
"""Simulated: the live engine on a simulated clock. Computed: the cost model alone. Emulated: the live service, its
accelerators replaced by known times. Real: measured on the machine that the report names."""

LONGEST_CLAIM = 120
"""Characters of a claim that a table can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How many times better a strategy is: goodput over goodput, or the other's cost over its cost.

    At the point where it is largest, as the paper quotes it ("up to"). None where the study has no such figure.
    """

    over_stock: float | None = None
    over_early_exit: float | None = None


def largest_ratios(
    series: Mapping[str, Sequence[float | None]], strategy: str, *, lower_is_better: bool = False
) -> Ratios:
    """The largest of the strategy's ratios over the series `stock` and `early-exit`, point by point."""
    return Ratios(
        over_stock=_largest(series[strategy], series.get("stock", ()), lower_is_better),
        over_early_exit=_largest(series[strategy], series.get("early-exit", ()), lower_is_better),
    )


def ratio(one: float | None, other: float | None, *, lower_is_better: bool = False) -> float | None:
    """How many times better one is than the other; None where either has no value or the divisor is 0."""
    over, under = (other, one) if lower_is_better else (one, other)
    return None if over is None or not under else over / under


def _largest(ours: Sequence[float | None], others: Sequence[float | None], lower_is_better: bool) -> float | None:
    if not others:
        return None
    ratios = (ratio(one, other, lower_is_better=lower_is_better) for one, other in zip(ours, others, strict=True))
    return max((each for each in ratios if each is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure of ours beside the paper's."""

    name: str
    """With its unit, where it has one: "e3 / early-exit, batch 8", "planning BERT-base (s)"."""
    ours: float | None
    """None where there is none, such as the rate of a plan that does not exist."""
    paper: float | None = None
    """None where the paper gives no figure."""

    def __post_init__(self) -> None:
        if not all(value is None or math.isfinite(value) for value in (self.ours, self.paper)):
            raise InputError(f"{self.name}: a figure must be finite, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What one run of a study gave."""

    comparisons: tuple[Comparison, ...]
    """The first one stands in the report's table where a study has no ratios."""
    pictures: tuple[Picture, ...] = ()
    e3: Ratios = Ratios()
    """Of the strategy `e3`, which decides as the paper says."""
    best: Ratios = Ratios()
    """Of the strategy `best`, which has Offramp's whole space."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Everything measured, as plain data or numpy's; no NaN."""
    notes: tuple[str, ...] = ()
    """Sentences on this run, with its figures: what fell short, what surprised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a study says of itself before it runs."""

    name: str
    """Of its module: "fig07_homogeneous"."""
    figure: str
    """Of the paper: "7", or "16a"."""
    section: str
    """Of the paper: "5.1.1"."""
    title: str
    """In a few words: "BERT on 16 V100"."""
    claim: str
    """The paper's, with its figures, in our words, for a table."""
    detail: str = ""
    """More of the claim, for the study's own section."""
    paper: Ratios = Ratios()
    """What the paper quotes for E3."""
    how: How
    exits: str
    """What decides who leaves: "recorded: BERT-base on SST-2 dev, entropy 0.4", "synthetic: half leave at ramp 5"."""
    hardware: str
    """What it stands for and what it runs on: "16 V100 (TensorRT's published times), simulated on one core"."""
    minutes: float
    """About how long it takes in full, on the machine of the last report."""
    quick_s: float
    """The same with quick effort, in seconds."""
    seed: int
    needs: tuple[str, ...] = ()
    """Files under OFFRAMP_DATA without which it is skipped."""
    differs: str
    """Why ours differs from the paper: model, times, prices, workload; several sentences."""

    def __post_init__(self) -> None:
        if len(self.claim) > LONGEST_CLAIM:
            raise InputError(f"{self.name}: a claim has at most {LONGEST_CLAIM} characters, not {len(self.claim)}")

    @property
    def command(self) -> str:
        """What a person runs to get it."""
        return f"python -m experiments.studies.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(About):
    """A figure of the paper, and the code that gives ours."""

    run: Callable[[Effort], StudyResult]

    @property
    def about(self) -> About:
        """The study without its code, as results carry it."""
        return About(**{each.name: getattr(self, each.name) for each in fields(About)})
