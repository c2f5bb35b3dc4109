"""A small network of images behind a real Ray Serve application."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from earlyexit.checkpoint import random_model
from earlyexit.codecs import find_codec
from earlyexit.record import exit_outputs
from earlyexit.split import Split
from earlyexit.store import save_model
from earlyexit.tasks.label import LabelTask
from offramp import Client
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import write_plan
from tests.earlyexit.codecs.pictures import Pixels, file_of, noise, png_header
from tests.end_to_end.tiny_service import HERE, running
from tests.offramp.cli.test_cli import run

pytestmark = pytest.mark.ray

PORT = 8163
SIDE = 8
LABELS = ("cat", "dog", "frog")
CODEC = {"name": "image", "height": SIDE, "width": SIDE}
PHOTO = noise(SIDE, SIDE)
Said = list[Any]


@dataclass(frozen=True, kw_only=True)
class Service:
    """Where it is, and what the uncut network says of images when the first ramp lets nobody out."""

    url: str
    folder: Path
    expected: Said

    def check(self, answers: dict[str, Said]) -> None:
        for way, (label, score, left) in answers.items():
            assert (label, left) == (self.expected[0], self.expected[2]), way
            assert score == pytest.approx(self.expected[1], abs=2e-5), way


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("images")
    model = random_model(
        {"depth": 8, "side": SIDE}, family="resnet", name="tiny", codec=CODEC, task=LabelTask(LABELS), seed=1
    )
    save_model(model, folder)
    np.save(folder / "photo.npy", PHOTO)
    (folder / "photo.png").write_bytes(file_of(PHOTO))
    write_plan(never_leaving(model.num_blocks, model.ramp_indices), folder / "plan.yaml")
    last = model.num_blocks - 1
    values, scores = model.task.answer(exit_outputs(model, find_codec(CODEC, folder).encode([PHOTO]))[last])
    with running(folder, script="serve_folder.py", port=PORT) as process:
        yield Service(url=process.url, folder=folder, expected=[LABELS[int(values[0])], float(scores[0]), last])


def never_leaving(num_blocks: int, ramps: tuple[int, ...]) -> Plan:
    """Two stages, so that hidden states of images travel."""
    splits = (Split(first=0, end=1, batch=4, ramps=ramps[:1]), Split(first=1, end=num_blocks, batch=4))
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in splits)
    return Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds={ramps[0]: 1.0}))


def said(answer: dict[str, Any]) -> Said:
    return [answer["label"], answer["score"], answer["exit"]]


def by_client(url: str, given: bytes | Pixels | Path) -> Said:
    with Client(url) as client:
        found = client.predict(given)
    return [found.label, found.score, found.exit]


def test_an_image_has_one_answer_by_every_way(service: Service, tmp_path: Path) -> None:
    file = file_of(PHOTO)
    base64_body = {"inputs": base64.b64encode(file).decode()}
    as_body = httpx.post(f"{service.url}/predict", content=file, headers={"Content-Type": "image/png"}, timeout=20.0)
    as_json = httpx.post(f"{service.url}/predict", json=base64_body, timeout=20.0)
    out = tmp_path / "out.jsonl"
    assert run("predict", "--data", service.folder / "photo.png", "--out", out, "--url", service.url) == 0
    ways = {
        "the file": said(as_body.json()),
        "base64": said(as_json.json()),
        "webp": by_client(service.url, file_of(PHOTO, "WEBP", lossless=True)),
        "pixels": by_client(service.url, PHOTO),
        "predict": said(json.loads(out.read_text())),
    }
    service.check(ways)


def test_tritons_client_gets_the_same_answer_over_grpc(service: Service) -> None:
    command = [sys.executable, str(HERE / "ask_images_with_tritonclient_grpc.py"), f"127.0.0.1:{PORT + 2}"]
    done = subprocess.run([*command, str(service.folder)], check=True, capture_output=True, timeout=60)
    result = json.loads(done.stdout)
    assert result["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": ["-1"]}]
    service.check(result["answers"])


def test_hostile_images_are_refused_and_those_of_others_answered(service: Service) -> None:
    with Client(service.url) as client:
        for content in (png_header(50_000, 50_000), file_of(PHOTO)[:60], b"no image"):
            answer = httpx.post(
                f"{service.url}/predict", content=content, headers={"Content-Type": "image/png"}, timeout=20.0
            )
            assert answer.status_code == 422
            assert "JPEG, PNG and WebP files are taken" in answer.json()["error"]["message"]
        found = client.predict_many([PHOTO] * 8)
    service.check({str(k): [each.label, each.score, each.exit] for k, each in enumerate(found)})
