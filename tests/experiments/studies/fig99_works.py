"""A study of nothing, for tests of what runs studies.

python -m tests.experiments.studies.fig99_works
"""

from __future__ import annotations

from experiments.studies.kit import Bars, Comparison, Effort, Ratios, Study, StudyResult, command


def run(effort: Effort) -> StudyResult:
    """One comparison and one picture, known beforehand."""
    labels = ("1",) if effort == "quick" else ("1", "8")
    rates = {"stock": (100.0, 400.0), "e3": (90.0, 600.0)}
    return StudyResult(
        comparisons=(Comparison(name="e3 / stock, batch 8", ours=1.5, paper=1.3),),
        pictures=(
            Bars(
                title="A model on two batches",
                x_label="batch",
                y_label="inputs/s",
                labels=labels,
                series={name: values[: len(labels)] for name, values in rates.items()},
            ),
        ),
        e3=Ratios(over_stock=1.5),
        figures={"rates": rates},
        notes=("Nothing ran.",),
    )


STUDY = Study(
    name="fig99_works",
    figure="99",
    section="9.9",
    title="a study of nothing",
    claim="e3 is up to 1.30 x stock",
    paper=Ratios(over_stock=1.3),
    how="computed",
    exits="none",
    hardware="none",
    minutes=0.1,
    quick_s=1,
    seed=0,
    differs="The paper has no such figure.",
    run=run,
)

if __name__ == "__main__":
    command(STUDY)
