"""Answers that are no JSON, and answers that are compressed, over HTTP."""

from __future__ import annotations

import gzip
import io
import json
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deployments.api.endpoint import READ
from deployments.api.openapi import openapi_document
from tests.deployments.ingress.api.faces import V2_BODY, V2_INFER, FakeBackend, client_of
from tests.deployments.ingress.api.own_maps import MapBackend, OwnMaps, map_of
from tests.deployments.ingress.api.signatures import TEXT


async def predict(backend: FakeBackend, inputs: object = "pay", **headers: str) -> Any:
    async with client_of(backend) as client:
        return await client.post("/predict", json={"inputs": inputs}, headers=headers)


async def test_one_answer_can_be_a_picture_with_its_score_and_exit_beside_it() -> None:
    response = await predict(MapBackend(), Accept="image/png")
    assert (response.status_code, response.headers["content-type"]) == (200, "image/png")
    assert (response.headers["x-offramp-score"], response.headers["x-offramp-exit"]) == ("0.75", "1")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(response.content))), map_of("pay"))
    assert {"X-Offramp-Score", "X-Offramp-Exit"} <= set(READ)


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/*", "text/html, */*;q=0.1", ""])
async def test_whoever_takes_anything_or_json_gets_json(accept: str) -> None:
    answer = (await predict(MapBackend(), Accept=accept)).json()
    assert (answer["score"], answer["exit"], answer["map"]) == (0.75, 1, map_of("pay").tolist())


@pytest.mark.parametrize(
    ("backend", "inputs", "accept", "allowed"),
    [
        (FakeBackend(), "pay", "image/png", "this model answers application/json"),
        (MapBackend(), "pay", "image/jpeg", "application/json, or image/png where one input is sent"),
        (MapBackend(), ["pay", "bill"], "image/png", "application/json, or image/png where one input is sent"),
        (MapBackend(), ["pay"], "text/html;q=0.5", "application/json, or image/png where one input is sent"),
    ],
    ids=["a-task-of-labels", "another-picture", "a-list", "a-page"],
)
async def test_an_answer_that_nobody_gives_is_refused_before_anything_is_computed(
    backend: FakeBackend, inputs: object, accept: str, allowed: str
) -> None:
    response = await predict(backend, inputs, Accept=accept)
    assert response.status_code == 406
    error = response.json()["error"]
    assert (error["kind"], backend.requests, backend.counted) == ("not_acceptable", [], [("/predict", 406)])
    assert error["message"].startswith(f"accept '{accept}'; ")
    assert error["message"].endswith(allowed)


async def test_a_header_of_several_lines_is_one_list() -> None:
    async with client_of(MapBackend()) as client:
        for lines in (("text/html", "image/png"), ("image/png", "text/html")):
            headers = [("Accept", line) for line in lines]
            response = await client.post("/predict", json={"inputs": "pay"}, headers=headers)
            assert (response.status_code, response.headers["content-type"]) == (200, "image/png")
        encodings = [("Accept-Encoding", "br"), ("Accept-Encoding", "gzip")]
        response = await client.post("/predict", json={"inputs": "pay"}, headers=encodings)
        assert response.headers["content-encoding"] == "gzip"


async def test_large_answers_are_compressed_for_whoever_takes_that_and_are_the_same() -> None:
    backend = MapBackend()
    plain = await predict(backend, "pay", **{"Accept-Encoding": "identity", "X-Request-ID": "r"})
    packed = await predict(backend, "pay", **{"Accept-Encoding": "gzip", "X-Request-ID": "r"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 10
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"


async def test_bytes_behind_json_are_compressed_together_with_it() -> None:
    body = V2_BODY | {"parameters": {"binary_data_output": True}}
    async with client_of(MapBackend()) as client:
        answers = [
            await client.post(V2_INFER, json=body, headers={"Accept-Encoding": encoding})
            for encoding in ("identity", "gzip")
        ]
    plain, packed = answers
    assert plain.content == packed.content
    assert plain.headers["inference-header-content-length"] == packed.headers["inference-header-content-length"]
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 4


@pytest.mark.parametrize("headers", [{}, {"Accept": "image/png"}], ids=["small", "a-picture"])
async def test_what_is_small_or_a_picture_stays_as_it_is(headers: dict[str, str]) -> None:
    backend = MapBackend() if headers else FakeBackend()
    response = await predict(backend, "pay", **{"Accept-Encoding": "gzip"}, **headers)
    assert (response.status_code, "content-encoding" in response.headers, "vary" in response.headers) == (
        200,
        False,
        False,
    )


async def test_a_file_of_the_page_is_known_by_its_etag_and_is_sent_as_it_is() -> None:
    async with client_of(FakeBackend()) as client:
        response = await client.get("/dashboard/page.js", headers={"Accept-Encoding": "gzip"})
    assert (len(response.content) > 2000, "content-encoding" in response.headers) == (True, False)


async def test_answers_of_many_maps_are_formed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(self: OwnMaps, value: Any, score: float) -> dict[str, Any]:
        threads.append(threading.current_thread() is threading.main_thread())
        return {"map": 0, "score": score}

    monkeypatch.setattr(OwnMaps, "to_json", noted)
    await predict(MapBackend(), ["pay"])
    await predict(MapBackend(), ["pay"] * 100)
    assert threads == [True] + [False] * 100


def test_the_description_says_which_pictures_there_are_and_what_shape_tensors_have() -> None:
    with_maps = openapi_document(MapBackend().signature)
    answered = with_maps["paths"]["/predict"]["post"]["responses"]["200"]
    assert set(answered["content"]) == {"application/json", "image/png"}
    assert set(answered["headers"]) == {"X-Offramp-Score", "X-Offramp-Exit"}
    said = with_maps["components"]["schemas"]["V2AnswerTensor"]["description"]
    assert said == "An output tensor: map: UINT8 [rows, 60, 60]; score: FP32 [rows]; exit: INT32 [rows]."
    of_labels = openapi_document(TEXT)["paths"]["/predict"]["post"]["responses"]
    assert set(of_labels["200"]["content"]) == {"application/json"}
    assert "406" in of_labels


async def test_compressed_json_is_what_any_reader_of_gzip_reads() -> None:
    async with (
        client_of(MapBackend()) as client,
        client.stream(
            "POST", "/predict", json={"inputs": ["pay", "bill"]}, headers={"Accept-Encoding": "gzip"}
        ) as response,
    ):
        raw = b"".join([part async for part in response.aiter_raw()])
    assert [each["map"] for each in json.loads(gzip.decompress(raw))["outputs"]] == [
        map_of("pay").tolist(),
        map_of("bill").tolist(),
    ]
