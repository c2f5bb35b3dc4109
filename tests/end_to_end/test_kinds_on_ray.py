"""Services whose inputs are no texts, behind real Ray Serve applications: images, and the spectra of the example."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from earlyexit.checkpoint import RampOptions, add_ramps, load_pretrained, random_model
from earlyexit.model import EarlyExitModel
from earlyexit.record import exit_outputs
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.store import save_model
from earlyexit.tasks import find_task
from earlyexit.tasks.label import LabelTask
from offramp.cli.app import main
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import write_plan
from tests.end_to_end.tiny_service import HERE, running

pytestmark = pytest.mark.ray

PORT = 8143
MODALITY = HERE.parents[1] / "examples" / "own_modality"
SIDE = 16
Answers = list[tuple[str, int]]
"""Label and exit of each input."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running service, what it is asked, and what it must say."""

    url: str
    folder: Path
    inputs: npt.NDArray[Any]
    answers: Answers


def write_service(folder: Path, model: EarlyExitModel, inputs: npt.NDArray[Any]) -> Answers:
    """The model, and a plan of two stages by which half of the inputs leave in the first; the answers of the uncut."""
    outputs = exit_outputs(model, [Encoded(1, (each[None],)) for each in inputs])
    answers = {block: [each.numpy() for each in model.task.answer(given)] for block, given in outputs.items()}
    last, sure_B = model.num_blocks - 1, answers[0][1]
    threshold = float(np.median(sure_B))
    first, rest = Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=last + 1, batch=4)
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in (first, rest))
    save_model(model, folder)
    write_plan(
        Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds={0: threshold})), folder / "plan.yaml"
    )
    exits = [0 if sure >= threshold else last for sure in sure_B]
    names = model.task.spec()["label_names"]
    return [(names[answers[at][0][row]], at) for row, at in enumerate(exits)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A small ResNet; every image is there as a JPEG file and as a PNG file of the same pixels."""
    folder = tmp_path_factory.mktemp("images")
    model = random_model(
        {"depth": 8, "side": SIDE},
        family="resnet",
        name="tiny",
        codec={"name": "image", "height": SIDE, "width": SIDE},
        task=LabelTask(tuple("abcd")),
        ramps=RampOptions(style="mlp", pooling="grid"),
    )
    noise = np.random.default_rng(0).integers(0, 256, (6, SIDE, SIDE, 3), dtype=np.uint8)
    for row, each in enumerate(noise):
        Image.fromarray(each).save(folder / f"{row}.jpg")
    pixels = np.stack([np.asarray(Image.open(folder / f"{row}.jpg")) for row in range(len(noise))])
    for row, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{row}.png")
    answers = write_service(folder, model, pixels)
    with running(folder, script="serve_folder.py", port=PORT) as process:
        yield Served(url=process.url, folder=folder, inputs=pixels, answers=answers)


@pytest.mark.parametrize(("ending", "content_type"), [("jpg", "image/jpeg"), ("png", "image/png")])
def test_an_image_file_is_answered_as_its_pixels_are_by_the_uncut_model(
    images: Served, ending: str, content_type: str
) -> None:
    for row, answer in enumerate(images.answers):
        content = (images.folder / f"{row}.{ending}").read_bytes()
        as_it_is = httpx.post(f"{images.url}/predict", content=content, headers={"Content-Type": content_type})
        in_json = httpx.post(f"{images.url}/predict", json={"inputs": base64.b64encode(content).decode()})
        for response in (as_it_is, in_json):
            assert response.status_code == 200, response.text
            assert (response.json()["label"], response.json()["exit"]) == answer


def test_tritons_clients_get_the_same_answers_for_files_and_pixels_over_both_transports(images: Served) -> None:
    for ending in ("jpg", "png"):
        paths = [str(images.folder / f"{row}.{ending}") for row in range(len(images.inputs))]
        addresses = [f"127.0.0.1:{PORT}", f"127.0.0.1:{PORT + 2}"]
        done = subprocess.run(
            [sys.executable, str(HERE / "ask_images_with_tritonclient.py"), *addresses, "tiny", *paths],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert len(found) == 4
        for way, (labels, exits) in found.items():
            assert list(zip(labels, exits, strict=True)) == images.answers, way


def test_offramp_predict_gets_the_same_answers_for_a_folder(images: Served, tmp_path: Path) -> None:
    for ending in ("jpg", "png"):
        folder, out = tmp_path / ending, tmp_path / f"{ending}.jsonl"
        folder.mkdir()
        for row in range(len(images.inputs)):
            shutil.copy(images.folder / f"{row}.{ending}", folder)
        with pytest.raises(SystemExit) as ended:
            main(["predict", "--data", str(folder), "--out", str(out), "--url", images.url])
        assert ended.value.code == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["label"], row["exit"]) for row in rows] == images.answers


def test_what_is_no_image_is_refused_and_the_next_one_answered(images: Served) -> None:
    truncated = (images.folder / "0.jpg").read_bytes()[:300]
    for content in (truncated, b"text", b""):
        refused = httpx.post(f"{images.url}/predict", content=content, headers={"Content-Type": "image/jpeg"})
        assert 400 <= refused.status_code < 500, refused.text
    assert httpx.post(f"{images.url}/predict", json={"inputs": "a text"}).status_code == 400
    content = (images.folder / "0.jpg").read_bytes()
    answered = httpx.post(f"{images.url}/predict", content=content, headers={"Content-Type": "image/jpeg"})
    assert answered.json()["label"] == images.answers[0][0]


@pytest.fixture(scope="module")
def spectra(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The network and the task of the example, untrained."""
    folder = tmp_path_factory.mktemp("spectra")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MODALITY))
        patch.setenv("PYTHONPATH", str(MODALITY))
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
        answers = write_service(folder, model, inputs)
        with running(folder, script="serve_folder.py", port=PORT + 10) as process:
            yield Served(url=process.url, folder=folder, inputs=inputs, answers=answers)


def test_spectra_are_graded_as_by_the_uncut_model(spectra: Served) -> None:
    body = {"inputs": spectra.inputs.tolist()}
    response = httpx.post(f"{spectra.url}/predict", json=body)
    assert response.status_code == 200, response.text
    assert [(each["label"], each["exit"]) for each in response.json()["outputs"]] == spectra.answers


def test_the_service_says_what_a_spectrum_is(spectra: Served) -> None:
    [column] = httpx.get(f"{spectra.url}/v2/models/fruit").json()["inputs"]
    assert column == {"name": "spectrum", "datatype": "FP32", "shape": [-1, 128]}


def test_spectra_that_are_none_are_refused(spectra: Served) -> None:
    for inputs in ([[1.0] * 127], "a text", [["x"] * 128]):
        assert httpx.post(f"{spectra.url}/predict", json={"inputs": inputs}).status_code == 400
