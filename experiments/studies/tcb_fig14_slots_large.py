"""TCB, figure 14: the speed-up by slots, batches of 32 rows."""

from __future__ import annotations

from experiments.studies.study import Effort, StudyResult, declare
from experiments.tcb import slots

ROWS, PAPER = 32, 2.31
"""The batch, and the paper's largest speed-up."""


def run(effort: Effort) -> StudyResult:
    """Counted, by published times, and really computed on this CPU."""
    return slots.study(ROWS, PAPER, effort)


STUDY = declare(__name__, run)
