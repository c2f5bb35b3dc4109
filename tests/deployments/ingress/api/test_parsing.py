"""Valid requests, and the columns that an ingress parses; refusals are in refused_requests.yaml."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from deployments.api.exchange import LARGE_BYTES, RequestBodies
from deployments.api.grpc.server import CONTENT_FIELDS, message_class, parse_infer
from deployments.api.operations import InferRequest, Signature
from deployments.api.v2 import pack_elements, parse_v2, tensors_of
from earlyexit.codecs.text import TextCodec
from earlyexit.network.boundary import DATATYPES
from tests.deployments.ingress.api.faces import V2_INFER, WAYS, Ask, FakeBackend, client_of, infer_json
from tests.deployments.ingress.api.signatures import IMAGE, NUMBERS, PAIR, tensor, tensors


def request_of(*rows: str, request_id: str, **more: Any) -> InferRequest:
    fields: dict[str, Any] = {"ids": ("",) * len(rows), "truncate": False, "timeout_s": None} | more
    return InferRequest(rows=rows, request_id=request_id, **fields)


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_a_v2_request_is_the_same_over_every_protocol(ask: Ask, backend: FakeBackend) -> None:
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


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_large_requests_are_parsed_in_a_thread(
    ask: Ask, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def noted(self: TextCodec, inputs: Any, *_: str) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return inputs if isinstance(inputs, str) else inputs["text"]

    monkeypatch.setattr(TextCodec, "from_columns", noted)
    monkeypatch.setattr(TextCodec, "row_from_json", noted)
    backend.bodies = RequestBodies(1_000_000, 1_000_000)
    for text in ("pay", "x" * LARGE_BYTES):
        await ask(backend, text)
        async with client_of(backend) as client:
            await client.post("/predict", json={"inputs": text})
    assert threads == [True, True, False, False]


async def test_outputs_come_in_json_or_as_bytes_in_their_order(backend: FakeBackend) -> None:
    outputs = [{"name": "exit", "parameters": {"binary_data": False}}, {"name": "label"}, {"name": "score"}]
    content, headers = infer_json(
        "café", "my", binary=True, outputs=outputs, parameters={"binary_data_output": True}, id="r7"
    )
    async with client_of(backend) as client:
        response = await client.post(V2_INFER, content=content, headers=headers)
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert json.loads(response.content[:length]) == {
        "model_name": "intents",
        "model_version": "1",
        "id": "r7",
        "outputs": [
            {"name": "exit", "datatype": "INT32", "shape": [2], "data": [1, 1]},
            {"name": "label", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 16}},
            {"name": "score", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert response.content[length:] == b"\4\0\0\0bill" * 2 + b"\0\0\x40\x3f" * 2


def numbers(datatype: str) -> npt.NDArray[Any]:
    """Returns two rows of shape (2, 3) that include the smallest and the largest value of a datatype."""
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if dtype.kind == "b":
        return np.array([False, True] * 6).reshape(2, 2, 3)
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = np.arange(12).astype(dtype)
    values[-1], values[-2] = limits.max, limits.min
    values.shape = (2, 2, 3)
    return values


def json_body(datatype: str, shape: list[int], data: object, name: str = "x") -> bytes:
    given = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"inputs": [given]}).encode()


def message(signature: Signature, datatype: str, array: npt.NDArray[Any], *, raw: bool) -> Any:
    request = message_class("ModelInferRequest")(model_name="m")
    request.inputs.add(name=signature.inputs[0].name, datatype=datatype, shape=array.shape)
    if raw:
        request.raw_input_contents.append(pack_elements(datatype, array))
    else:
        getattr(request.inputs[0].contents, CONTENT_FIELDS[datatype]).extend(array.ravel().tolist())
    return request


def rows_of(signature: Signature, body: bytes, json_length: str | None = None) -> npt.NDArray[Any]:
    request, _ = parse_v2(body, json_length, signature)
    return np.stack([row[0] for row in request.rows])


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_datatype_is_the_same_over_every_protocol(datatype: str) -> None:
    sent, signature = numbers(datatype), tensor(datatype, 2, 3)
    triton = InferInput("x", list(sent.shape), datatype).set_data_from_numpy(sent)
    binary, length = InferenceServerClient.generate_request_body([triton])
    ways = {
        "REST, nested JSON": rows_of(signature, json_body(datatype, [2, 2, 3], sent.tolist())),
        "REST, flat JSON": rows_of(signature, json_body(datatype, [2, 2, 3], sent.ravel().tolist())),
        "REST, bytes": rows_of(signature, binary, str(length)),
        "gRPC, raw": np.stack(
            [row[0] for row in parse_infer(message(signature, datatype, sent, raw=True), signature)[0].rows]
        ),
    }
    if datatype in CONTENT_FIELDS:
        request, _ = parse_infer(message(signature, datatype, sent, raw=False), signature)
        ways["gRPC, typed"] = np.stack([row[0] for row in request.rows])
    for way, received in ways.items():
        assert received.dtype == DATATYPES[datatype], way
        np.testing.assert_array_equal(received, sent, err_msg=way)


def test_several_tensors_follow_the_json_in_their_order() -> None:
    triton = [
        InferInput(name, [2], "BYTES").set_data_from_numpy(np.array([f"{name} 1", f"{name} 2"], dtype=object))
        for name in ("text_pair", "text")
    ]
    body, length = InferenceServerClient.generate_request_body(triton)
    request, _ = parse_v2(body, str(length), PAIR)
    assert request.rows == (("text 1", "text_pair 1"), ("text 2", "text_pair 2"))


def test_metadata_has_the_preferred_form() -> None:
    assert [each["name"] for each in tensors_of(PAIR.inputs)] == ["text", "text_pair"]
    assert tensors_of(IMAGE.inputs) == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    several = tensors(
        {"name": "a", "datatype": "FP32", "shape": [2, 3]}, {"name": "b", "datatype": "INT8", "shape": []}
    )
    assert [(each["name"], each["shape"]) for each in tensors_of(several.inputs)] == [("a", [-1, 2, 3]), ("b", [-1])]
