from __future__ import annotations

import numpy as np
import pytest

from deployments.versions.choice import losses_between
from earlyexit.network.boundary import Answer, Value, values_of
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask


def answers(*values: Value) -> list[Answer]:
    return [Answer(sample_id="", value=value, score=0.5, exit=0) for value in values]


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
