"""A study without work, for tests of the runner; OFFRAMP_FAKE sets its outcome."""

from __future__ import annotations

import os
import signal

from earlyexit.errors import PlanError
from experiments.studies.picture import Bars
from experiments.studies.study import About, Comparison, Effort, Ratios, Study, StudyResult, facts

NAME = "tests.experiments.studies.fake_study"


def run(effort: Effort) -> StudyResult:
    """Returns a fixed comparison, table and picture."""
    what = os.environ.get("OFFRAMP_FAKE")
    if what == "breaks":
        raise PlanError("no plan meets the SLO")
    if what == "dies":  # as if memory were short
        os.kill(os.getpid(), signal.SIGKILL)
    labels = ("1",) if effort == "quick" else ("1", "8")
    rates = {"stock": (100.0, 400.0), "e3": (90.0, 600.0)}
    series = {name: values[: len(labels)] for name, values in rates.items()}
    return StudyResult(
        comparisons=(Comparison("e3 / stock, batch 8", 1.5, 1.3),),
        pictures=(Bars("A model on two batches", "batch", "inputs/s", labels, series),),
        e3=Ratios(over_stock=1.5),
        tables=(facts({"what ran": 0}),),
    )


ABOUT = About(
    name="fake_study",
    section="9.9",
    title="a study of nothing",
    claim="e3 is up to 1.30 x stock [69]",
    paper=Ratios(over_stock=1.3),
    how="computed",
    exits="none",
    hardware="none",
    minutes=0.1,
    quick_s=1,
    differs="The paper has no such figure.",
)
STUDY = Study(ABOUT, run)
