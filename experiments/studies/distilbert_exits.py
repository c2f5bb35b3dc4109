"""Where inputs left DistilBERT in Apparate's runs on IMDB: counts, found again from the shares that were printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ValidationError

from earlyexit.errors import DataError

DISTILBERT_IMDB = "exit_traces/apparate_distilbert_imdb_a6000.json"
NUM_BLOCKS = 6
RAMPS = tuple(range(NUM_BLOCKS - 1))
MOST_INPUTS = 100_000
"""Of a run. Two fractions with smaller denominators differ by 1e-10, a million times what rounding can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImdbRun:
    """One run of Apparate's simulator, as a public fork of it recorded them."""

    requests_per_s: int
    is_plain: bool
    """Apparate's own controller; otherwise the fork's control layer decides too."""
    num_inputs: int
    exits: Mapping[int, int]
    """Ramp -> inputs that left there. The ramp after the last block is none: who gets there has run everything."""
    agreement: float
    """Share of inputs answered as the full model would."""
    saving: float
    """Share of its latency at batch 1 that exits saved, as Apparate printed it."""

    @property
    def survival_N(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reached it."""
        left = accumulate((self.exits.get(ramp, 0) for ramp in RAMPS), initial=0)
        return tuple(1 - count / self.num_inputs for count in left)


class _RunDocument(BaseModel):
    qps: int
    config: str
    overall_accuracy_pct: float
    latency_improvement_pct: float
    exit_rate: float
    ramp_accuracy: dict[int, float]


class _RunsDocument(BaseModel):
    runs: list[_RunDocument]


def read_imdb_runs(path: Path) -> tuple[ImdbRun, ...]:
    """The runs of the transcribed file; raises DataError for another file, and for shares that no counts give."""
    try:
        document = _RunsDocument.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path} holds no runs of Apparate: {error.errors()[0]['msg']}") from error
    return tuple(_run(each) for each in document.runs)


def _run(document: _RunDocument) -> ImdbRun:
    agreement = document.overall_accuracy_pct / 100
    agreement_by_ramp = {ramp: share for ramp, share in document.ramp_accuracy.items() if ramp in RAMPS}
    num_inputs, exits = exit_counts(document.exit_rate, agreement, agreement_by_ramp)
    return ImdbRun(
        requests_per_s=document.qps,
        is_plain=document.config.startswith("baseline"),
        num_inputs=num_inputs,
        exits=exits,
        agreement=agreement,
        saving=document.latency_improvement_pct / 100,
    )


def exit_counts(
    exit_share: float, agreement: float, agreement_by_ramp: Mapping[int, float]
) -> tuple[int, dict[int, int]]:
    """Inputs of a run, and how many left at every ramp: the fewest that give exactly these shares.

    All shares are ratios of whole numbers. Those who left at a ramp are a multiple of its share's denominator; together
    they are `exit_share` of all, and those of them who disagree are all who do, for the full model agrees with itself.
    Raises DataError unless exactly one set of counts fits.
    """
    left, agreed = _fraction(exit_share), _fraction(agreement)
    by_ramp = {ramp: _fraction(share) for ramp, share in agreement_by_ramp.items()}
    ordered = sorted(by_ramp, key=lambda ramp: -by_ramp[ramp].denominator)  # the fewest possibilities first
    parts = [(by_ramp[ramp].denominator, by_ramp[ramp].denominator - by_ramp[ramp].numerator) for ramp in ordered]
    step = math.lcm(left.denominator, agreed.denominator)
    for num_inputs in range(step, MOST_INPUTS, step):
        found = list(_multiples(parts, int(left * num_inputs), int((1 - agreed) * num_inputs)))
        if len(found) > 1:
            raise DataError(f"{len(found)} sets of counts give these shares of {num_inputs} inputs")
        if found:
            counts = {ramp: many * part[0] for ramp, many, part in zip(ordered, found[0], parts, strict=True)}
            return num_inputs, dict(sorted(counts.items()))
    raise DataError(f"no counts of fewer than {MOST_INPUTS} inputs give these shares")


def _fraction(share: float) -> Fraction:
    return Fraction(share).limit_denominator(MOST_INPUTS)


def _multiples(parts: Sequence[tuple[int, int]], left: int, wrong: int) -> Iterator[tuple[int, ...]]:
    """How many times each pair (inputs, wrong ones among them), at least once, so that both sums come out."""
    if not parts:
        if left == wrong == 0:
            yield ()
        return
    (inputs, disagreeing), *others = parts
    most = min(left // inputs, wrong // disagreeing if disagreeing else left // inputs)
    for many in range(1, most + 1):
        for rest in _multiples(others, left - many * inputs, wrong - many * disagreeing):
            yield many, *rest
