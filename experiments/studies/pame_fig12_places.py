"""PAME, figure 12: the first exit at every place, by what the search expects of it and on inputs that it never saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.pame.cases import KINDS, Case, cases, judged_thresholds
from experiments.pame.models import telling_absent
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest
from optimizer.pame.search import Candidate, find_exits

LARGE = 2
"""Of a task's three batch sizes."""
PAPER_ERROR = 5.0
"""Largest relative error of an estimate (%): "less than 5 %"."""
PAPER_PLACE = 13 / 33
"""Of the backbone's blocks, where the paper's first exit of Imagenet sits: after block 13 of 33."""
COLUMNS = (
    *("after block", "mean expected", "mean", "error (%)"),
    *("slower expected (%)", "slower (%)", "precision kept (%)", ""),
)
NAMES: Mapping[Effort, Sequence[str]] = {"full": tuple(KINDS), "quick": ("sst2",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One candidate, its times as shares of the time without exits."""

    ramp: int
    expected: float
    found: float
    slower_expected: float
    slower: float
    precision: float
    is_chosen: bool

    @property
    def error(self) -> float:
        """Of what was expected, in percent."""
        return 100 * (self.expected / self.found - 1)

    def cells(self) -> tuple[str | float, ...]:
        """A row of a table."""
        shares = (100 * self.slower_expected, 100 * self.slower, 100 * self.precision)
        return str(self.ramp), self.expected, self.found, self.error, *shares, "chosen" if self.is_chosen else ""


def places(case: Case) -> list[Place]:
    """Every candidate whose check keeps the precision, alone."""
    found = find_exits(case.seconds, case.checks(), case.kind.batches[LARGE])
    step = found.steps[0]

    def place(each: Candidate) -> Place | None:
        if each.configured is None or each.configured.setting.threshold is None:
            return None
        alone = judged_thresholds(case, found, {each.ramp: each.configured.setting.threshold})
        return Place(
            ramp=each.ramp,
            expected=each.mean_s / step.matrix.whole_s,
            found=alone.times.mean_s / alone.times.whole_s,
            slower_expected=each.slower,
            slower=alone.times.slower,
            precision=alone.precision,
            is_chosen=step.chosen is each,
        )

    return [known for known in map(place, step.candidates) if known is not None]


def compare(found: Mapping[str, Sequence[Place]], blocks: Mapping[str, int]) -> StudyResult:
    """By task: where the first exit is, and how far estimates are off."""
    told: list[Comparison] = []
    for name, known in found.items():
        chosen = next((each.ramp for each in known if each.is_chosen), None)
        share = None if chosen is None else 100 * (chosen + 1) / blocks[name]
        told.append(Comparison(f"{name}: largest error of an estimated mean (%)", _worst(known), PAPER_ERROR))
        told.append(Comparison(f"{name}: first exit, of the blocks (%)", share, 100 * PAPER_PLACE))
    return StudyResult(
        comparisons=tuple(told),
        pictures=tuple(
            Lines(
                f"Mean answer time with one exit ({name})",
                "after block",
                "of the time without",
                tuple(float(each.ramp) for each in known),
                {
                    "expected": tuple(each.expected for each in known),
                    "on other inputs": tuple(each.found for each in known),
                },
            )
            for name, known in found.items()
            if known
        ),
        figures={name: [each.cells() for each in known] for name, known in found.items()},
        tables=tuple(
            Table(f"{name}, means over the time without exits", COLUMNS, tuple(each.cells() for each in known))
            for name, known in found.items()
        ),
    )


def _worst(known: Sequence[Place]) -> float | None:
    return largest(abs(each.error) for each in known)


def run(effort: Effort) -> StudyResult:
    """Every task whose records are there, at its large batch; GLUE's alone with quick effort."""
    known = cases(NAMES[effort])
    blocks = {case.name: case.search.num_blocks for case in known}
    return telling_absent(compare({case.name: places(case) for case in known}, blocks), NAMES[effort])


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
