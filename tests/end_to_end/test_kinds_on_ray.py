"""Tests of services with other inputs than texts on Ray Serve: images, class maps, the example's spectra.

Hidden states between the first service's stages are rounded to half precision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from deployments.settings import ServeSettings
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Encoded, Split
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import save_model
from earlyexit.policies.base import ExitOutput
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from offramp import Client
from optimizer.plans.plan import Plan, PolicySpec, Stage
from tests.earlyexit.codecs.pictures import file_of, noise
from tests.earlyexit.families.vision import noise as noise_for
from tests.earlyexit.families.vision import segmentation_model
from tests.end_to_end.one_ray import MODALITY, OneRay
from tests.offramp.cli.runs import run

pytestmark = pytest.mark.ray

SIDE = 16
Answer = tuple[Any, float, int]
"""Value, score and exit."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running service, its inputs, and the expected answers."""

    url: str
    inputs: npt.NDArray[Any]
    task: Task
    answers: list[Answer]
    rounding: float
    """Tolerance of the scores of inputs that crossed the hop."""

    def check(self, way: str, answers: Sequence[Answer]) -> None:
        """Checks answers; in class maps a few pixels may differ, because they depend on the order of a sum."""
        for (value, score, left), (expected, its_score, exit_block) in zip(answers, self.answers, strict=True):
            assert (way, left) == (way, exit_block)
            assert score == pytest.approx(its_score, abs=self.rounding if left else 2e-5), way
            if isinstance(expected, str):
                assert (way, value) == (way, expected)
            else:
                assert self.task.loss(value[None], np.asarray(expected)[None]).max() < 2e-3, way


def serve(
    one_ray: OneRay, folder: Path, model: EarlyExitModel, inputs: npt.NDArray[Any], hop_dtype: HopDtype = "same"
) -> Served:
    """Serves a plan of two stages in which half of the inputs leave in the first; expects the uncut model's answers."""
    outputs = exit_outputs(model, [Encoded(1, (each[None],)) for each in inputs])
    answer_of = {block: ExitOutput(model.task, given) for block, given in outputs.items()}
    ramp, last = model.ramp_indices[0], model.num_blocks - 1
    sure_B = answer_of[ramp].score_B.numpy()
    threshold = float(np.median(sure_B))
    first, rest = Split(first=0, end=ramp + 1, batch=4, ramps=(ramp,)), Split(first=ramp + 1, end=last + 1, batch=4)
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in (first, rest))
    plan = Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds={ramp: threshold}))
    save_model(model, folder)
    url = one_ray.serve(ServeSettings(model=str(folder), plan=plan, app="inputs", hop_dtype=hop_dtype))
    exits = [ramp if sure >= threshold else last for sure in sure_B]
    names = model.task.spec().get("label_names")
    values = [answer_of[at].value_B[row] for row, at in enumerate(exits)]
    scores = [float(answer_of[at].score_B[row]) for row, at in enumerate(exits)]
    expected = list(zip(values if names is None else [names[each] for each in values], scores, exits, strict=True))
    rounding = 2e-5 if hop_dtype == "same" else 5e-3
    return Served(url=url, inputs=inputs, task=model.task, answers=expected, rounding=rounding)


def answer_of(answer: dict[str, Any]) -> Answer:
    return answer["label"], answer["score"], answer["exit"]


@pytest.fixture(scope="module")
def images(one_ray: OneRay, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serves a small ResNet."""
    model = random_model(
        {"depth": 8, "side": SIDE},
        family="resnet",
        name="tiny",
        codec={"name": "image", "height": SIDE, "width": SIDE},
        task=LabelTask(tuple("abcd")),
        ramps=RampOptions(style="mlp", pooling="grid"),
    )
    pixels = np.stack([noise(SIDE, SIDE, seed=row) for row in range(6)])
    return serve(one_ray, tmp_path_factory.mktemp("images"), model, pixels, "float16")


def test_images_get_the_uncut_models_answers_from_what_is_rounded_between_stages(images: Served) -> None:
    """`test_one_answer.py` tests the other forms of an image."""
    with Client(images.url) as client:
        for way, given in (("files", [file_of(each) for each in images.inputs]), ("pixels", list(images.inputs))):
            found = client.predict_many(given)
            images.check(way, [(each.label, each.score, each.exit) for each in found])
    apart = [abs(each.score - score) for each, (_, score, _) in zip(found, images.answers, strict=True)]
    assert 1e-6 < max(apart) < 1e-2, "what crosses is rounded"


@pytest.fixture(scope="module")
def street(one_ray: OneRay, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serves a small segmentation network."""
    model = segmentation_model(45, 60)
    pixels = np.stack([each.tensors[0][0] for each in noise_for(model, 4)])
    return serve(one_ray, tmp_path_factory.mktemp("street"), model, pixels)


def test_class_maps_are_those_of_the_uncut_model(street: Served, tmp_path: Path) -> None:
    for k, each in enumerate(street.inputs):
        Image.fromarray(each).save(tmp_path / f"{k}.png")
    with Client(street.url) as client:
        found = client.predict_many([path.read_bytes() for path in sorted(tmp_path.glob("*.png"))])
    street.check("client", [(each.class_map, each.score, each.exit) for each in found])
    out, folder = tmp_path / "answers.jsonl", tmp_path / "maps"
    assert run("predict", "--data", tmp_path, "--out", out, "--maps", folder, "--url", street.url) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    street.check(
        "offramp predict", [(np.asarray(Image.open(row["class_map"])), row["score"], row["exit"]) for row in rows]
    )


@pytest.fixture(scope="module")
def spectra(one_ray: OneRay, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serves the untrained network and the task of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MODALITY))
        pretrained, family = load_pretrained("fruit:build")
        model = add_ramps(
            pretrained,
            name="fruit",
            family=family,
            codec={"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [128]}]},
            task=find_task({"name": "fruit:grades"}),
            ramps=RampOptions(pooling="grid"),
        )
        inputs = np.random.default_rng(0).standard_normal((6, 128), dtype=np.float32)
        return serve(one_ray, tmp_path_factory.mktemp("spectra"), model, inputs)


def test_only_spectra_are_graded_as_by_the_uncut_model(spectra: Served) -> None:
    [column] = httpx.get(f"{spectra.url}/v2/models/fruit").json()["inputs"]
    assert column == {"name": "spectrum", "datatype": "FP32", "shape": [-1, 128]}
    response = httpx.post(f"{spectra.url}/predict", json={"inputs": spectra.inputs.tolist()})
    assert response.status_code == 200, response.text
    spectra.check("/predict", [answer_of(each) for each in response.json()["outputs"]])
    for inputs in ([[1.0] * 127], "a text", [["x"] * 128]):
        assert httpx.post(f"{spectra.url}/predict", json={"inputs": inputs}).status_code == 400
