"""Images over a convolutional hop of half the bytes between two stages of a real Ray Serve application.

In the network's own type hops are those of `test_kinds_on_ray.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.settings import ServeSettings
from earlyexit.named import HopDtype
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.network import from_wire
from earlyexit.network.piece import Piece
from earlyexit.network.split import Split
from earlyexit.network.store import save_model
from earlyexit.network.wire import Answer, Encoded, entering
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from offramp import Client
from optimizer.plan import Plan, PolicySpec, Stage
from tests.answers import label_of
from tests.earlyexit.codecs.pictures import noise
from tests.end_to_end.one_ray import OneRay

pytestmark = pytest.mark.ray

SIDE, LABELS, CUT, NUM_IMAGES = 16, tuple("abcd"), 1, 24
HOP_DTYPE: HopDtype = "float16"
ROUNDING = 2e-5
"""Of scores, where batches are others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[EarlyExitModel, Path]:
    """Of three blocks; 16.4 kB cross after the first."""
    model = random_model(
        {"depth": 8, "side": SIDE},
        family="resnet",
        name="hops",
        codec={"name": "image", "height": SIDE, "width": SIDE},
        task=LabelTask(LABELS),
        ramps=RampOptions(style="mlp", pooling="grid"),
    )
    folder = tmp_path_factory.mktemp("hops")
    save_model(model, folder)
    return model, folder


def alone(model: EarlyExitModel, image: Encoded, threshold: float, bounds: Sequence[int], hop: HopDtype) -> Answer:
    """What one image is answered with, its hidden states crossing between the bounds as on a hop."""
    policy = ConfidencePolicy({0: threshold})
    piece: Piece | None = from_wire(model, entering(["image"], [image]), policy)
    for first, end in pairwise((0, *bounds, model.num_blocks)):
        assert piece is not None
        arrived = from_wire(model, piece.to_wire(hop), policy) if first else piece
        for step in cut_out(model, first, end, (0,) if first == 0 else (), policy).run(arrived):
            for answer in step.answers:
                return answer
            piece = step.survivors
    raise AssertionError("the last block answers")


def test_images_that_cross_a_hop_are_answered_as_by_the_model_cut_there(
    one_ray: OneRay, model: tuple[EarlyExitModel, Path]
) -> None:
    network, folder = model
    images = [noise(SIDE, SIDE, seed=seed) for seed in range(NUM_IMAGES)]
    encoded = [Encoded(1, (np.asarray(image)[None],)) for image in images]
    scores = torch.sort(Opinion(network.task, exit_outputs(network, encoded)[0]).score_B).values
    threshold = float(scores[NUM_IMAGES // 2 - 1] + scores[NUM_IMAGES // 2]) / 2
    splits = Split(first=0, end=CUT, batch=4, ramps=(0,)), Split(first=CUT, end=network.num_blocks, batch=4)
    plan = Plan(
        stages=tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in splits),
        policy=PolicySpec(name="confidence", thresholds={0: threshold}),
    )
    settings = ServeSettings(model=str(folder), plan=plan, app="hops", hop_dtype=HOP_DTYPE)
    with Client(one_ray.serve(settings)) as client:
        answers = client.predict_many([np.asarray(image) for image in images])
    uncut = [alone(network, image, threshold, (), "same") for image in encoded]
    cut = [alone(network, image, threshold, (CUT,), HOP_DTYPE) for image in encoded]
    assert [(each.label, each.exit) for each in answers] == [(LABELS[label_of(each)], each.exit) for each in cut]
    assert [each.score for each in answers] == pytest.approx([each.score for each in cut], abs=ROUNDING)
    apart = max(abs(answer.score - wanted.score) for answer, wanted in zip(answers, uncut, strict=True))
    assert 1e-6 < apart < 1e-2, "what crosses is rounded"
