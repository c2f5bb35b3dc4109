"""A study that breaks.

python -m tests.experiments.studies.fig98_breaks
"""

from __future__ import annotations

from dataclasses import replace

from earlyexit.errors import PlanError
from experiments.studies.kit import Effort, StudyResult, command
from tests.experiments.studies import fig99_works


def run(effort: Effort) -> StudyResult:
    """Break."""
    raise PlanError("no plan meets the SLO")


STUDY = replace(fig99_works.STUDY, name="fig98_breaks", figure="98", run=run)

if __name__ == "__main__":
    command(STUDY)
