"""TCB, figure 12: throughput first come, first served, lengths of variance 100."""

from __future__ import annotations

from experiments.studies.study import Effort, StudyResult, declare
from experiments.tcb import fcfs

VARIANCE = 100.0


def run(effort: Effort) -> StudyResult:
    """Simulated, and really computed on this CPU."""
    return fcfs.study(VARIANCE, effort)


STUDY = declare(__name__, run)
