"""Class maps and keypoints of given outputs are the same over every protocol."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from deployments.api.exchange import preferred_type
from deployments.api.grpc.server import Rpcs, message_class
from deployments.api.http import build_api
from deployments.api.openapi import openapi_document
from deployments.api.operations import InferRequest
from earlyexit.network.boundary import Answer, values_of
from earlyexit.tasks.base import Task
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask
from offramp.client.client import AsyncClient
from offramp.client.protocol import Prediction
from tests.deployments.ingress.api.dense import BACKENDS, FILES, HEATMAPS, IN_BASE64, Answers, DenseBackend
from tests.deployments.ingress.api.faces import V2_INFER, FakeBackend, FakeContext, client_of
from tests.deployments.ingress.api.signatures import TEXT
from tests.earlyexit.tasks.maps import BODY, STREET


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> DenseBackend:
    return BACKENDS[request.param]()


def of_columns(columns: dict[str, Any]) -> Answers:
    [name] = set(columns) - {"score", "exit"}
    return list(zip(columns[name], columns["score"].tolist(), columns["exit"].tolist(), strict=True))


async def infer(backend: DenseBackend, headers: Mapping[str, str] | None = None, **asked: Any) -> httpx.Response:
    image = {"name": "image", "shape": [2], "datatype": "BYTES", "data": IN_BASE64}
    async with client_of(backend) as client:
        response: httpx.Response = await client.post(V2_INFER, json={"inputs": [image], **asked}, headers=headers)
    assert response.status_code == 200, response.text
    return response


TYPES = {"UINT8": "<u1", "FP32": "<f4", "INT32": "<i4"}


async def by_v2_json(backend: DenseBackend) -> Answers:
    outputs = (await infer(backend)).json()["outputs"]
    return of_columns(
        {each["name"]: np.array(each["data"], TYPES[each["datatype"]]).reshape(each["shape"]) for each in outputs}
    )


async def by_v2_bytes(backend: DenseBackend) -> Answers:
    response = await infer(backend, parameters={"binary_data_output": True})
    length = int(response.headers["inference-header-content-length"])
    tail, columns = response.content[length:], {}
    for each in json.loads(response.content[:length])["outputs"]:
        size = each["parameters"]["binary_data_size"]
        columns[each["name"]] = np.frombuffer(tail[:size], TYPES[each["datatype"]]).reshape(each["shape"])
        tail = tail[size:]
    assert not tail
    return of_columns(columns)


async def by_grpc(backend: DenseBackend) -> Answers:
    message = message_class("ModelInferRequest")(model_name="intents")
    message.inputs.add(name="image", datatype="BYTES", shape=[2])
    message.inputs[0].contents.bytes_contents.extend(FILES)
    response = await Rpcs(backend).call("ModelInfer", message.SerializeToString(), FakeContext())
    return of_columns(
        {
            output.name: np.frombuffer(raw, TYPES[output.datatype]).reshape(output.shape)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
    )


async def by_predict(backend: DenseBackend) -> Answers:
    async with client_of(backend) as client:
        outputs = (await client.post("/predict", json={"inputs": IN_BASE64})).json()["outputs"]
    return [of_words(each) for each in outputs]


def of_words(said: dict[str, Any]) -> tuple[npt.NDArray[Any], float, int]:
    """Returns an answer of `/predict` as an array."""
    if "class_map" in said:
        array = np.asarray(Image.open(io.BytesIO(base64.b64decode(said["class_map"]))))
    else:
        assert [each["joint"] for each in said["keypoints"]] == list(BODY.joint_names)
        places = [(each["x"], each["y"], each["score"]) for each in said["keypoints"]]
        array = np.array(places, dtype=np.float32)
    return array, said["score"], said["exit"]


def client(backend: DenseBackend, **options: Any) -> AsyncClient:
    return AsyncClient("http://test", transport=httpx.ASGITransport(build_api(backend)), **options)


async def by_client(backend: DenseBackend, **options: Any) -> Answers:
    async with client(backend, **options) as asking:
        return [_of_prediction(each) for each in await asking.predict_many(FILES)]


async def by_client_compressed(backend: DenseBackend) -> Answers:
    return await by_client(backend, compressed=True)


async def by_client_in_words(backend: DenseBackend) -> Answers:
    async with client(backend) as asking:
        found = await asking.predict_many(FILES, in_words=True)
    return [of_words({**each.task_values, "exit": each.exit}) for each in found]


def _of_prediction(found: Prediction) -> tuple[npt.NDArray[Any], float, int]:
    [name] = set(found.task_values) - {"score"}
    return getattr(found, name), found.score, found.exit


WAYS: list[Callable[[DenseBackend], Awaitable[Answers]]] = [
    *(by_v2_json, by_v2_bytes, by_grpc, by_predict),
    *(by_client, by_client_compressed, by_client_in_words),
]


@pytest.mark.parametrize("way", WAYS)
async def test_every_protocol_returns_the_same_arrays(
    backend: DenseBackend, way: Callable[[DenseBackend], Awaitable[Answers]]
) -> None:
    found, right = await way(backend), backend.right
    assert len(found) == len(right) == 2
    for (array, score, left), (expected, expected_score, expected_exit) in zip(found, right, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(array, expected)
        assert score == pytest.approx(expected_score, abs=1e-6)
        assert left == expected_exit


async def test_an_image_body_is_answered_with_a_png_of_its_classes() -> None:
    backend = DenseBackend()
    async with client_of(backend) as asking:
        headers = {"Content-Type": "image/png", "Accept": "image/png"}
        response = await asking.post("/predict", content=FILES[0], headers=headers)
    assert response.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(response.content))
    palette = image.getpalette()
    assert palette is not None
    assert (image.mode, len({tuple(palette[at : at + 3]) for at in range(0, len(palette), 3)})) == ("P", 4)
    np.testing.assert_array_equal(np.asarray(image), backend.right[0][0])


async def test_coordinates_are_rounded_in_json_but_not_in_arrays() -> None:
    body = PoseTask(BODY.joint_names, heatmap_side=8, image_side=27, tolerance=4.0)
    backend = DenseBackend(dense=body, outputs=HEATMAPS + torch.linspace(0, 1e-3, 64).reshape(8, 8))
    exact = backend.right[0][0]
    for way in (by_v2_json, by_v2_bytes, by_grpc, by_client):
        np.testing.assert_array_equal((await way(backend))[0][0], exact)
    words = (await by_predict(backend))[0][0]
    assert not np.array_equal(words, exact)
    np.testing.assert_allclose(words[:, :2], exact[:, :2], rtol=0, atol=0.0006)
    np.testing.assert_allclose(words[:, 2], exact[:, 2], rtol=0, atol=1e-6)


async def test_a_class_map_in_json_has_the_classes_and_colours_of_its_png() -> None:
    async with client_of(DenseBackend()) as asking:
        said = (await asking.post("/predict", json={"inputs": IN_BASE64[0]})).json()
    shares = {each["name"]: each["share"] for each in said["classes"]}
    assert set(shares) == {"road", "car", "sky"}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    palette = Image.open(io.BytesIO(base64.b64decode(said["class_map"]))).getpalette()
    assert palette is not None
    for each in said["classes"]:
        assert each["colour"] == "#{:02x}{:02x}{:02x}".format(*palette[3 * each["id"] :])
        assert STREET.class_names[each["id"]] == each["name"]


async def test_metadata_and_openapi_have_the_shapes(backend: DenseBackend) -> None:
    async with client_of(backend) as asking:
        [dense, score, left] = (await asking.get("/v2/models/intents")).json()["outputs"]
    assert dense["shape"] == [-1, *backend.right[0][0].shape]
    assert (score["shape"], left["shape"]) == ([-1], [-1])
    request = message_class("ModelMetadataRequest")(name="intents")
    told = await Rpcs(backend).call("ModelMetadata", request.SerializeToString(), FakeContext())
    assert list(told.outputs[0].shape) == dense["shape"]
    schemas = openapi_document(backend.signature)["components"]["schemas"]
    shape = ", ".join(map(str, ["rows", *dense["shape"][1:]]))
    assert f"{dense['name']}: {dense['datatype']} [{shape}]" in schemas["V2AnswerTensor"]["description"]
    assert set(schemas["PredictOne"]["properties"]) == {*backend.task.json_schema, "exit", "request_id"}
    for signature, types in ((DenseBackend().signature, {JSON, PNG}), (TEXT, {JSON})):
        answer = openapi_document(signature)["paths"]["/predict"]["post"]["responses"]["200"]
        assert set(answer["content"]) == types


# Forms of an answer over HTTP


SIDE = 60
STRIPES = np.tile((np.arange(SIDE) // 20).astype(np.uint8), (SIDE, 1))


@dataclass
class Wide(DenseBackend):
    """Answers each image with a large map of three stripes."""

    dense: Task = field(default_factory=lambda: SegmentationTask(tuple("abc"), height=SIDE, width=SIDE))

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        return [Answer(sample_id="", value=value, score=0.75, exit=1) for value in values_of(self.maps(request))]

    def maps(self, request: InferRequest) -> npt.NDArray[np.uint8]:
        return np.stack([STRIPES] * len(request.rows))


async def predict(backend: FakeBackend, inputs: object = IN_BASE64[0], **headers: str) -> httpx.Response:
    async with client_of(backend) as asking:
        response: httpx.Response = await asking.post("/predict", json={"inputs": inputs}, headers=headers)
    return response


@pytest.mark.parametrize(
    ("backend", "inputs", "accept", "allowed"),
    [
        (FakeBackend(), "pay", "image/png", "this model answers application/json"),
        (BACKENDS["pose"](), IN_BASE64[0], "image/png", "this model answers application/json"),
        (DenseBackend(), IN_BASE64[0], "image/jpeg", "application/json, or image/png for a single input"),
        (DenseBackend(), IN_BASE64, "image/png", "application/json, or image/png for a single input"),
    ],
    ids=["labels", "keypoints", "another-picture", "a-list"],
)
async def test_an_unavailable_content_type_is_refused_before_inference(
    backend: FakeBackend, inputs: object, accept: str, allowed: str
) -> None:
    response = await predict(backend, inputs, Accept=accept)
    assert response.status_code == 406
    error = response.json()["error"]
    assert (error["kind"], backend.requests, backend.counted) == ("not_acceptable", [], [("/predict", 406)])
    assert error["message"].startswith(f"accept '{accept}'; ")
    assert error["message"].endswith(allowed)


async def test_an_image_without_its_content_type_is_refused_with_the_types_that_the_model_takes() -> None:
    async with client_of(DenseBackend()) as asking:
        response = await asking.post("/predict", content=b"\x89PNG", headers={"Content-Type": "application/x"})
    took = "this model takes application/json, image/jpeg, image/png, image/webp"
    assert response.json()["error"]["message"] == f"content-type 'application/x'; {took}"


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "bytes"])
async def test_large_answers_are_compressed_for_callers_that_accept_it(binary: bool) -> None:
    answers = {}
    for encoding in ("identity", "", "gzip;q=0, *", "deflate, br, zstd", "gzip", "br, GZIP;q=0.5", "*"):
        asked = {"parameters": {"binary_data_output": binary}}
        answers[encoding] = await infer(Wide(), headers={"Accept-Encoding": encoding}, **asked)
    plain, packed = answers["identity"], answers["gzip"]
    assert [each.headers.get("content-encoding") for each in answers.values()] == [None] * 4 + ["gzip"] * 3
    assert {each.content for each in answers.values()} == {plain.content}
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 4
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    length = "inference-header-content-length"
    assert plain.headers.get(length) == packed.headers.get(length)


async def test_small_answers_images_and_page_files_are_not_compressed() -> None:
    async with client_of(FakeBackend()) as asking:
        asset = await asking.get("/dashboard/page.js", headers={"Accept-Encoding": "gzip"})
    assert len(asset.content) > 2000
    gzip = {"Accept-Encoding": "gzip"}
    for response in (
        await predict(FakeBackend(), "pay", **gzip),
        await predict(Wide(), Accept="image/png", **gzip),
        asset,
    ):
        assert (response.status_code, "content-encoding" in response.headers) == (200, False)


async def test_answers_with_many_maps_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(self: Task, value: Any, score: float) -> dict[str, Any]:
        threads.append(threading.current_thread() is threading.main_thread())
        return {"class_map": "", "score": score}

    monkeypatch.setattr(SegmentationTask, "to_json", noted)
    await predict(Wide(), IN_BASE64[:1])
    await predict(Wide(), IN_BASE64[:1] * 100)
    assert threads == [True] + [False] * 100


JSON, PNG = "application/json", "image/png"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param("*/*", JSON, id="anything"),
        pytest.param("application/json", JSON, id="JSON"),
        pytest.param("application/*", JSON, id="any-application"),
        pytest.param("image/png", PNG, id="PNG"),
        pytest.param("Image/PNG", PNG, id="large-letters"),
        pytest.param("image/*", PNG, id="any-image"),
        pytest.param("image/png, application/json", JSON, id="as-much-of-both"),
        pytest.param("image/png;q=0.9, application/json;q=0.8", PNG, id="weights"),
        pytest.param("image/avif,image/webp,image/png,image/*;q=0.8,*/*;q=0.5", PNG, id="a-browsers-images"),
        pytest.param("text/html,application/xml;q=0.9,*/*;q=0.8", JSON, id="a-browsers-pages"),
        pytest.param("*/*, application/json;q=0", PNG, id="anything-but-JSON"),
        pytest.param("application/json;charset=utf-8", JSON, id="other-parameters"),
        pytest.param("image/png;q=much, application/json;q=0.1", JSON, id="no-weight"),
        pytest.param("text/html", None, id="neither"),
        pytest.param("image/jpeg, image/png;q=0", None, id="refused"),
        pytest.param("image/png;q=2", None, id="a-weight-above-1"),
        pytest.param(";,;q=", None, id="noise"),
    ],
)
def test_the_preferred_content_type_is_selected(accept: str, content_type: str | None) -> None:
    assert preferred_type(accept, (JSON, PNG)) == content_type
