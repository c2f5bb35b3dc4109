from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from deployments.ingress.core.calls import bucket_of
from deployments.versions.choice import Tally, VersionTally, losses_between
from deployments.wire.messages import BUCKET
from earlyexit.network.boundary import Answer, Value, values_of
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask


def test_counts_of_two_ingresses_add_up() -> None:
    one, two = Tally(failed=1), Tally(skipped=2)
    one.compare([0, 0, 0.25, 0.75])
    two.compare([0])
    one.versions["1"].requests["answered"] = 4
    two.versions["1"].requests["answered"] = 1
    two.versions["2"].requests["deadline"] += 2
    one.add(two)
    assert (one.inputs, one.failed, one.skipped, one.compared["inputs"]) == ({"same": 4, "other": 1}, 1, 2, 5)
    assert (one.versions["1"].requests, one.versions["2"].requests) == ({"answered": 5}, {"deadline": 2})


def test_a_versions_figures_are_requests_errors_quantiles_and_exits() -> None:
    tally = VersionTally(
        requests=Counter(answered=3, deadline=1),
        exits=Counter({5: 1, 0: 2}),
        latencies=Counter({bucket_of(0.010): 2, bucket_of(0.100): 1}),
    )
    figures = tally.figures
    assert (figures["requests"], figures["errors"], figures["exits"]) == (4, {"deadline": 1}, {"0": 2, "5": 1})
    assert 0.010 < figures["p50_s"] <= 0.010 * BUCKET
    assert 0.100 < figures["p99_s"] <= 0.100 * BUCKET
    assert VersionTally().figures["p50_s"] is None


def answers(*values: Value) -> list[Answer]:
    return [Answer(sample_id="", value=value, score=0.5, exit=0) for value in values]


def test_labels_are_compared_input_by_input() -> None:
    tally = Tally()
    names, turned = LabelTask(("a", "b", "c")), LabelTask(("c", "b", "a"))
    tally.compare(losses_between(answers(0, 1, 2), names, answers(0, 0, 2), names))
    by_name = losses_between(answers(0, 1, 2), names, answers(2, 2, 0), turned)
    assert by_name == [0.0, 1.0, 0.0]
    assert tally.compared == {
        "inputs": 3,
        "same": 2,
        "agreement": 2 / 3,
        "requests_failed": 0,
        "requests_skipped": 0,
    }
    assert Tally().compared["agreement"] is None


STREET = SegmentationTask(("road", "sky"), height=2, width=2, stride=1)
BODY = PoseTask(("head", "foot"), heatmap_side=4, image_side=8, tolerance=1.0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (STREET, SegmentationTask(("road", "sky"), height=2, width=2, stride=2)),
        (STREET, SegmentationTask(("road", "sky"), height=2, width=2, ignored=("sky",))),
        (BODY, PoseTask(("head", "foot"), heatmap_side=2, image_side=8, tolerance=3.0, sigma=1.5, highest=1)),
        (RegressionTask(scale=2.0), RegressionTask(scale=3.0, offset=1.0)),
    ],
    ids=["stride", "ignored", "pose", "regression"],
)
def test_versions_whose_answers_mean_the_same_differ_by_degrees(ours: Task, theirs: Task) -> None:
    one, another = {
        "segmentation": ([[0, 0], [0, 1]], [[0, 0], [0, 0]]),
        "pose": ([[1, 1, 0.5], [5, 5, 0.5]], [[1, 1, 0.25], [5, 7, 0.5]]),
        "regression": (1.0, 2.0),
    }[ours.name]
    dtype = np.uint8 if ours.name == "segmentation" else np.float32
    early, full = ([each] if isinstance(each, float) else values_of(np.array([each], dtype)) for each in (one, another))
    expected = 0.25 if ours.name == "segmentation" else 0.5
    assert losses_between(answers(*early), ours, answers(*full), theirs) == [expected]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (STREET, SegmentationTask(("sky", "road"), height=2, width=2)),
        (STREET, SegmentationTask(("road", "sky"), height=4, width=2)),
        (BODY, PoseTask(("foot", "head"), heatmap_side=4, image_side=8, tolerance=1.0)),
        (BODY, PoseTask(("head", "foot"), heatmap_side=4, image_side=16, tolerance=1.0)),
        (STREET, BODY),
        (BODY, STREET),
        (RegressionTask(scale=2.0), LabelTask(("a", "b"))),
    ],
)
def test_answers_that_mean_something_else_are_not_compared_by_loss(ours: Task, theirs: Task) -> None:
    assert not ours.compares(theirs)
    assert ours.compares(ours)
