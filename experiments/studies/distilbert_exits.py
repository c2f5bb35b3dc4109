"""Where inputs left DistilBERT in Apparate's runs on IMDB, by the shares that were printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ValidationError

from earlyexit.errors import DataError

DISTILBERT_IMDB = "exit_traces/apparate_distilbert_imdb_a6000.json"
NUM_BLOCKS = 6
RAMPS = tuple(range(NUM_BLOCKS - 1))
COUNTS: tuple[tuple[int, Mapping[int, int]], ...] = (
    (61390, {1: 5337, 2: 71, 3: 6663, 4: 4319}),
    (69989, {1: 6570, 2: 828, 3: 4595, 4: 940}),
    (69999, {1: 5077, 2: 117, 3: 3861, 4: 1565}),
    (69989, {0: 106, 1: 13945, 2: 221, 3: 4083, 4: 775}),
    (69999, {0: 378, 1: 12501, 2: 619, 3: 1215}),
    (68282, {1: 14898, 2: 40, 3: 3939, 4: 617}),
)
"""Per run of the file, its inputs and how many left at each ramp.

Only shares were printed, but to the last digit: of inputs that left, and per ramp of answers that are the full model's.
They are ratios of whole numbers, and these are the fewest inputs of which counts give exactly them; no other counts of
so many inputs do. The ramp after the last block is none: who gets there has run everything.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImdbRun:
    """One run of Apparate's simulator, as a public fork of it recorded them."""

    requests_per_s: int
    is_plain: bool
    """Apparate's own controller; otherwise the fork's control layer decides too."""
    num_inputs: int
    exits: Mapping[int, int]
    """Ramp -> inputs that left there."""
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


class _RunsDocument(BaseModel):
    runs: list[_RunDocument]


def read_imdb_runs(path: Path) -> tuple[ImdbRun, ...]:
    """The runs of the transcribed file; raises DataError for another file."""
    try:
        runs = _RunsDocument.model_validate_json(path.read_bytes()).runs
    except ValidationError as error:
        raise DataError(f"{path} holds no runs of Apparate: {error.errors()[0]['msg']}") from error
    if [round(each.exit_rate, 9) for each in runs] != [round(sum(each.values()) / of, 9) for of, each in COUNTS]:
        raise DataError(f"{path} holds other runs of Apparate than those whose exits are counted")
    return tuple(
        ImdbRun(
            requests_per_s=each.qps,
            is_plain=each.config.startswith("baseline"),
            num_inputs=num_inputs,
            exits=exits,
            agreement=each.overall_accuracy_pct / 100,
            saving=each.latency_improvement_pct / 100,
        )
        for each, (num_inputs, exits) in zip(runs, COUNTS, strict=True)
    )
