"""What is told of hops: of a network cut in two, and of a live run by its records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.checkpoint import RampOptions, random_model
from earlyexit.model import EarlyExitModel
from earlyexit.signature import Encoded
from earlyexit.tasks.label import LabelTask
from experiments.live.hops import judge
from experiments.live.image_model import ImageModel, medians
from offramp.client.protocol import Prediction
from offramp.load.report import RequestRecord
from tests.earlyexit.codecs.pictures import noise

SIDE, NUM_IMAGES = 8, 5


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return random_model(
        {"depth": 8, "side": SIDE},
        family="resnet",
        name="m",
        codec={"name": "image", "height": SIDE, "width": SIDE},
        task=LabelTask(tuple("abcd")),
        ramps=RampOptions(style="mlp", pooling="grid"),
    ).eval()


@pytest.fixture(scope="module")
def images(model: EarlyExitModel) -> ImageModel:
    """By whose thresholds nobody leaves early."""
    return ImageModel(
        folder=Path("m"),
        model=model,
        thresholds={0: 1.1, 1: 1.1},
        images=(b"",) * NUM_IMAGES,
        encoded=tuple(Encoded(1, (np.asarray(noise(SIDE, SIDE, seed=k))[None],)) for k in range(NUM_IMAGES)),
        is_trained=False,
    )


def record(
    number: int, images: ImageModel, *, index: int = 0, error: str | None = None, **other: object
) -> RequestRecord:
    """A request of one image, answered as by the uncut model but for what is given."""
    answer = images.answers()[index]
    assert isinstance(answer.value, int)
    facts = {"exit": answer.exit, "label": "abcd"[answer.value], "score": answer.score, **other}
    return RequestRecord(
        request_id=str(number),
        input_indices=(index,),
        scheduled_s=0.0,
        sent_s=0.0,
        done_s=1.0,
        num_attempts=1,
        predictions=() if error else (Prediction(request_id=str(number), **facts),),  # type: ignore[arg-type] # the task's own
        error=error,
    )


def test_a_live_run_is_told_by_lost_double_and_wrong_answers(images: ImageModel) -> None:
    right = images.answers()
    assert {answer.exit for answer in right} == {2}
    records = [record(0, images), record(1, images, index=3), record(1, images), record(2, images, error="timeout")]
    judged = judge(images, records, right, "same")
    assert (judged.sent, judged.answered, judged.lost, judged.twice, judged.wrong) == (4, 3, 1, 1, 0)
    assert (judged.as_uncut, judged.score) == (1.0, 0.0)
    wrong = [record(0, images, label="?"), record(1, images, exit=1), record(2, images, score=right[0].score + 0.01)]
    judged = judge(images, [*wrong, record(3, images)], right, "same")
    assert (judged.wrong, judged.as_uncut) == (3, 0.75)
    assert judged.score == pytest.approx(0.01)


def test_other_exits_are_told_of_half_precision_and_nothing_of_what_was_not_measured(images: ImageModel) -> None:
    right = images.answers()
    judged = judge(images, [record(0, images), record(1, images, exit=1)], right, "float16")
    assert (judged.wrong, judged.other_exits, judged.as_uncut) == (None, 1, 1.0)
    judged = judge(images, [record(0, images, error="timeout")], right, "same")
    assert (judged.wrong, judged.other_exits, judged.as_uncut, judged.score) == (0, 0, None, None)


def test_half_of_those_inside_leave_at_each_ramp(images: ImageModel) -> None:
    halved = replace(images, thresholds=medians(images.model, images.encoded, (0, 1)))
    by_exit = Counter(answer.exit for answer in halved.answers())
    assert by_exit == {0: 3, 1: 1, 2: 1}  # of five; the one in the middle leaves


def test_a_model_cut_in_process_answers_as_the_uncut_one(images: ImageModel) -> None:
    for bounds in ((1,), (2,), (1, 2)):
        for answer, wanted in zip(images.answers(*bounds), images.answers(), strict=True):
            assert (answer.value, answer.exit) == (wanted.value, wanted.exit)
            assert answer.score == pytest.approx(wanted.score, abs=1e-6)
