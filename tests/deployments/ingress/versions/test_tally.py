from __future__ import annotations

from collections import Counter

import pytest

from deployments.ingress.core.outcomes import bucket_of
from deployments.ingress.versions.tally import (
    Tally,
    VersionTally,
    compared_figures,
    counts,
    growth,
    losses_between,
    quantile_s,
    version_figures,
)
from deployments.reports import BUCKET
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.wire import Answer, Value


def test_counts_of_two_ingresses_add_up() -> None:
    one, two = Tally(same=3, other=1, failed=1), Tally(same=1, skipped=2)
    one.of("1").answered = 4
    two.of("1").answered = 1
    two.of("2").errors["deadline"] += 2
    one.add(two)
    assert (one.same, one.other, one.failed, one.skipped) == (4, 1, 1, 2)
    assert (one.versions["1"].answered, one.versions["2"].errors) == (5, {"deadline": 2})


def test_a_versions_figures_are_requests_errors_quantiles_and_exits() -> None:
    tally = VersionTally(
        answered=3,
        errors=Counter(deadline=1),
        exits=Counter({5: 1, 0: 2}),
        latencies=Counter({bucket_of(0.010): 2, bucket_of(0.100): 1}),
    )
    figures = version_figures(tally)
    assert (figures["requests"], figures["errors"], figures["exits"]) == (4, {"deadline": 1}, {"0": 2, "5": 1})
    assert 0.010 < figures["p50_s"] <= 0.010 * BUCKET
    assert 0.100 < figures["p99_s"] <= 0.100 * BUCKET


def test_nothing_has_no_quantile() -> None:
    assert quantile_s({}, 0.5) is None


def test_a_quantile_is_its_buckets_upper_end() -> None:
    assert quantile_s({0: 98, 10: 2}, 0.98) == BUCKET
    assert quantile_s({0: 98, 10: 2}, 0.99) == pytest.approx(BUCKET**11)


def answers(*values: Value) -> list[Answer]:
    return [Answer(sample_id="", value=value, score=0.5, exit=0) for value in values]


def test_labels_are_compared_input_by_input() -> None:
    tally = Tally()
    names, turned = LabelTask(("a", "b", "c")), LabelTask(("c", "b", "a"))
    tally.compare(losses_between(answers(0, 1, 2), names, answers(0, 0, 2), names))
    by_name = losses_between(answers(0, 1, 2), names, answers(2, 2, 0), turned)
    assert by_name == [0.0, 1.0, 0.0]
    assert compared_figures(tally) == {
        "inputs": 3,
        "same": 2,
        "agreement": 2 / 3,
        "requests_failed": 0,
        "requests_skipped": 0,
    }
    assert compared_figures(Tally())["agreement"] is None


def test_numbers_differ_by_degrees() -> None:
    tally, task = Tally(), RegressionTask(scale=2.0)
    tally.compare(losses_between(answers(1.0, 1.0), task, answers(1.5, 9.0), task))
    assert (tally.same, tally.other, compared_figures(tally)["inputs"]) == (0.75, 1.25, 2)


def test_only_what_has_grown_is_told() -> None:
    tally = Tally(same=2)
    tally.of("1").answered = 5
    before = counts(tally)
    tally.of("1").answered += 2
    tally.of("2").errors["deadline"] += 1
    tally.other += 1
    assert growth({}, before) == {("", "same"): 2, ("1", "answered"): 5}
    assert growth(before, counts(tally)) == {("", "other"): 1, ("1", "answered"): 2, ("2", "deadline"): 1}
