"""Requests that are taken, and what an ingress reads out of them; refusals are in refused_requests.yaml."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.api.parsing import InferRequest
from tests.deployments.ingress.api.faces import V2_INFER, WAYS, Ask, FakeBackend, client_of, infer_json, packed


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def ask(request: pytest.FixtureRequest) -> Ask:
    way: Ask = request.param
    return way


def request_of(*rows: str, request_id: str, **more: Any) -> InferRequest:
    fields: dict[str, Any] = {"ids": ("",) * len(rows), "truncate": False, "timeout_s": None} | more
    return InferRequest(rows=rows, request_id=request_id, **fields)


async def test_a_v2_request_is_the_same_whichever_way_it_comes(ask: Ask, backend: FakeBackend) -> None:
    named = {"headers": {"x-request-id": "r"}}
    said = await ask(backend, "pay", "bill", id="", **named)
    assert (said.outputs, said.id) == (("label", "score", "exit"), "")
    said = await ask(
        backend,
        *("pay", "bill"),
        id="r7",
        parameters={"truncate": True, "timeout": 250_000, "ids": ["x", "y"], "priority": 3},
        outputs=[{"name": "exit"}, {"name": "label", "parameters": {"binary_data": True}}],
        **named,
    )
    assert (said.outputs, said.id) == (("exit", "label"), "r7")
    await ask(backend, "pay", "bill", parameters={"timeout": 0}, **named)
    for shape in ([2], [2, 1], [1, 2]):
        await ask(backend, "pay", "bill", tensor={"shape": shape, "data": ["pay", "café"]}, **named)
    plain, full = (
        request_of("pay", "bill", request_id="r", **more)
        for more in ({}, {"ids": ("x", "y"), "truncate": True, "timeout_s": 0.25})
    )
    assert backend.requests == [plain, full, plain, *[request_of("pay", "café", request_id="r")] * 3]


async def test_outputs_come_in_json_or_as_bytes_in_their_order(backend: FakeBackend) -> None:
    outputs = [{"name": "exit"}, {"name": "label", "parameters": {"binary_data": False}}, {"name": "score"}]
    content, _ = infer_json("pay", "my", outputs=outputs, parameters={"binary_data_output": True}, id="r7")
    async with client_of(backend) as client:
        response = await client.post(V2_INFER, content=content)
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert json.loads(response.content[:length]) == {
        "model_name": "intents",
        "model_version": "1",
        "id": "r7",
        "outputs": [
            {"name": "exit", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}},
            {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["card", "bill"]},
            {"name": "score", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert response.content[length:] == b"\1\0\0\0" * 2 + b"\0\0\x40\x3f" * 2


async def test_texts_as_bytes_are_answered_as_bytes(backend: FakeBackend) -> None:
    content, headers = infer_json("café", binary=True, outputs=[{"name": "label", "parameters": {"binary_data": True}}])
    async with client_of(backend) as client:
        response = await client.post(V2_INFER, content=content, headers=headers)
    assert backend.requests[0].rows == ("café",)
    assert response.content.endswith(packed(b"bill"))
