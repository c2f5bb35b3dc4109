"""Class maps of a small segmentation network, over two stages of a real Ray Serve application."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from deployments.settings import ServeSettings
from earlyexit.network.boundary import Split
from earlyexit.network.store import save_model
from earlyexit.tasks.base import Task
from earlyexit.training.ramps import exit_outputs
from offramp import Client
from optimizer.plan import Plan, PolicySpec, Stage
from tests.earlyexit.families.vision import noise, segmentation_model
from tests.end_to_end.one_ray import OneRay
from tests.offramp.cli.runs import run

pytestmark = pytest.mark.ray

HEIGHT, WIDTH, NUMBER = 45, 60, 4
Map = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running service, the files that it is asked about, and the answers of the uncut model."""

    url: str
    files: list[Path]
    task: Task
    maps: npt.NDArray[np.uint8]
    exits: list[int]

    def check(self, way: str, maps: Sequence[Map], exits: Sequence[int]) -> None:
        """Hardly a pixel may turn on the order of a sum."""
        assert (way, list(exits)) == (way, self.exits[: len(exits)])
        found = np.stack(list(maps))
        assert (way, found.dtype.name, found.shape[1:]) == (way, "uint8", (HEIGHT, WIDTH))
        assert self.task.loss(found, self.maps[: len(found)]).max() < 2e-3, way


@pytest.fixture(scope="module")
def street(one_ray: OneRay, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Half of the images leave in the first stage."""
    folder = tmp_path_factory.mktemp("street")
    model = segmentation_model(HEIGHT, WIDTH)
    encoded = noise(model, NUMBER)
    (folder / "images").mkdir()
    files = []
    for k, each in enumerate(encoded):
        files.append(folder / f"images/{k}.png")
        Image.fromarray(each.tensors[0][0]).save(files[-1])
    outputs = exit_outputs(model, encoded)
    first, last = model.ramp_indices[0], model.num_blocks - 1
    sure = model.task.score(outputs[first]).numpy()
    threshold = float(np.sort(sure)[NUMBER // 2 - 1 : NUMBER // 2 + 1].mean())
    exits = [first if each >= threshold else last for each in sure]
    maps = {block: model.task.answer(outputs[block]).numpy() for block in (first, last)}
    splits = Split(first=0, end=first + 1, batch=4, ramps=(first,)), Split(first=first + 1, end=last + 1, batch=4)
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in splits)
    plan = Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds={first: threshold}))
    save_model(model, folder / "model")
    url = one_ray.serve(ServeSettings(model=str(folder / "model"), plan=plan, app="street"))
    right = np.stack([maps[left][k] for k, left in enumerate(exits)])
    return Served(url=url, files=files, task=model.task, maps=right, exits=exits)


def of_png(content: bytes) -> Map:
    return np.asarray(Image.open(io.BytesIO(content)))


def post(served: Served, content: bytes, **headers: str) -> httpx.Response:
    sent = {"Content-Type": "image/png", **headers}
    return httpx.post(f"{served.url}/predict", content=content, headers=sent, timeout=30.0)


def test_every_way_answers_with_the_maps_of_the_uncut_model(street: Served, tmp_path: Path) -> None:
    content = [path.read_bytes() for path in street.files]
    with Client(street.url) as client:
        found = client.predict_many(content)
    street.check("client", [each.class_map for each in found], [each.exit for each in found])

    files = [base64.b64encode(each).decode() for each in content]
    said = httpx.post(f"{street.url}/predict", json={"inputs": files}, timeout=30.0).raise_for_status().json()
    maps = [of_png(base64.b64decode(each["class_map"])) for each in said["outputs"]]
    street.check("/predict", maps, [each["exit"] for each in said["outputs"]])

    pictures = [post(street, each, Accept="image/png").raise_for_status() for each in content]
    exits = [int(each.headers["x-offramp-exit"]) for each in pictures]
    street.check("PNG", [of_png(each.content) for each in pictures], exits)
    assert all(each.headers["x-request-id"] and 0 <= float(each.headers["x-offramp-score"]) <= 1 for each in pictures)

    out, folder = tmp_path / "answers.jsonl", tmp_path / "maps"
    asked = ("predict", "--data", street.files[0].parent, "--out", out, "--maps", folder, "--url", street.url)
    assert run(*asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    by_cli = [of_png(Path(row["class_map"]).read_bytes()) for row in rows]
    street.check("offramp predict", by_cli, [row["exit"] for row in rows])
