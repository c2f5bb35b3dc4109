"""What admission is worth where batches are unsteady: sides differ by its constants alone."""

from __future__ import annotations

from deployments.ingress.core import admission
from experiments.engine.admission import CUTS, SIDES, compare


def test_steady_batches_below_capacity_lose_nothing_and_constants_are_put_back() -> None:
    before = admission.CONTESTED
    rows = list(compare([0.0], [0.6], seconds=3.0, seeds=1))
    assert [row["side"] for row in rows] == [*SIDES] * len(CUTS)
    assert {row["in_time"] for row in rows if row["side"] != "without"} == {1.0}
    assert before == admission.CONTESTED


def test_above_capacity_admission_saves_what_deadlines_alone_lose() -> None:
    rows = {(row["splits"], row["side"]): row for row in compare([0.4], [1.4], seconds=6.0, seeds=1)}
    for splits in CUTS:
        assert rows[splits, "as it is"]["in_time"] > rows[splits, "without"]["in_time"] + 0.05
        assert rows[splits, "as it is"]["admitted_in_time"] > 0.9
