"""Requests over HTTP and gRPC: every entry of answered_requests.yaml and of refused_requests.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.api.exchange import RequestBodies
from deployments.api.grpc.server import Rpcs, message_class
from deployments.api.http import HEADER_LENGTH
from deployments.api.operations import Signature
from tests.deployments.ingress.api.faces import (
    V2_BODY,
    V2_INFER,
    WAYS,
    FakeBackend,
    FakeContext,
    client_of,
    infer_bytes,
    infer_json,
)
from tests.deployments.ingress.api.signatures import IMAGE, PAIR, TEXT, tensors
from tests.deployments.ingress.completions import generating
from tests.earlyexit.codecs.prompts import prompt_codec

Case = dict[str, Any]
GOLDEN: dict[str, list[Case]] = {}
for table in ("answered_requests.yaml", "refused_requests.yaml"):
    GOLDEN |= yaml.safe_load(Path(__file__).with_name(table).read_text(encoding="utf-8"))
OPENAI = {"/v1/completions": generating.TEXT, "/v1/chat/completions": generating.CHAT}
LONG: dict[str, Any] = {"prompt": "a" * 200, "messages": [{"role": "user", "content": "a" * 200}]}


@dataclass
class OwnSignature(FakeBackend):
    """A backend with inputs of another kind."""

    own: Signature = field(default_factory=lambda: TEXT)
    bodies: RequestBodies = field(default_factory=lambda: RequestBodies(1_000_000, 10_000_000))

    @property
    def signature(self) -> Signature:
        return self.own


def entries(section: str) -> pytest.MarkDecorator:
    """Parametrizes a test by a section of the tables."""
    cases = GOLDEN[section]
    names = [str(case.get("says", case.get("post", case.get("get")))) for case in cases]
    return pytest.mark.parametrize("case", cases, ids=[f"{k}-{name[:40]}" for k, name in enumerate(names)])


def part_of(whole: Any, wanted: Any) -> Any:
    """Returns the fields of a body that the table names."""
    if isinstance(wanted, Mapping) and isinstance(whole, Mapping):
        return {key: part_of(whole.get(key), each) for key, each in wanted.items()}
    if isinstance(wanted, list) and isinstance(whole, list) and len(wanted) == len(whole):
        return [part_of(one, other) for one, other in zip(whole, wanted, strict=True)]
    return whole


async def check_answer(case: Case, client: Any, asked: list[Any]) -> None:
    method = "post" if "post" in case else "get"
    response = await client.request(method.upper(), case[method], json=case.get("json"), headers={"x-request-id": "r7"})
    assert response.status_code == 200, response.text
    wanted = case.get("answer", case.get("has"))
    assert (response.json() if "answer" in case else part_of(response.json(), wanted)) == wanted
    for name, value in case.get("asked", {}).items():
        found = getattr(asked[-1], name)
        assert (list(found) if isinstance(found, tuple) else found) == value, name


@entries("texts")
async def test_a_text_is_answered(case: Case) -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        await check_answer(case, client, backend.requests)


@entries("tokens")
async def test_a_prompt_is_answered(case: Case, tmp_path: Path) -> None:
    teller = generating.Teller(codec=prompt_codec(tmp_path))
    async with generating.client_of(teller) as client:
        await check_answer(case, client, teller.asked)
        if "streams" in case:
            response = await client.post(case["post"], json=case["json"] | {"stream": True})
            assert generating.text_of(generating.events(response.text)) == case["streams"]


def check(case: Case, status: int, message: str) -> None:
    assert status == case.get("status", 400), message
    expected: str = case["says"]
    assert expected[3:] in message if expected.startswith("...") else message.startswith(expected), message


def content_of(case: Case) -> bytes:
    return case["body"].encode("latin-1") if "body" in case else json.dumps(case["json"]).encode()


def message_of(response: httpx.Response) -> str:
    """Returns the message of an error, and checks the error's format."""
    body = response.json()
    path = response.request.url.path
    if path.startswith("/v2"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path.startswith("/v1/"):
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert (set(body), set(body["error"])) == ({"error", "request_id"}, {"kind", "message"})
    return str(body["error"]["message"])


@entries("predict")
async def test_predict_refuses(case: Case) -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        response = await client.post("/predict", content=content_of(case), headers=case.get("headers"))
    check(case, response.status_code, message_of(response))
    assert (backend.requests, backend.counted) == ([], [("/predict", response.status_code)])


@pytest.mark.parametrize("way", WAYS)
@entries("v2")
async def test_v2_refuses_with_the_same_message_over_every_protocol(case: Case, way: str) -> None:
    backend = FakeBackend()
    said = await WAYS[way](backend, "pay", "bill", tensor=case.get("tensor"), **case.get("with", {}))
    check(case, said.status, said.message)
    assert said.code in ("", "INVALID_ARGUMENT")
    assert backend.requests == []


@entries("v2_json")
async def test_v2_refuses_json(case: Case) -> None:
    content, _ = infer_json("pay", "bill", tensor=case.get("tensor"), **case.get("with", {}))
    headers = [(HEADER_LENGTH.encode(), case["length"].encode())] if "length" in case else []
    async with client_of(FakeBackend()) as client:
        response = await client.post(V2_INFER, content=content_of(case) if "body" in case else content, headers=headers)
    check(case, response.status_code, message_of(response))


@entries("v2_bytes")
async def test_v2_refuses_invalid_binary_tensors(case: Case) -> None:
    tail = case["tail"].encode("latin-1")
    parameters = {"binary_data_size": case.get("size", len(tail))}
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": parameters, "data": ["a"]}
    head = json.dumps({"inputs": [tensor]}).encode()
    async with client_of(FakeBackend()) as client:
        response = await client.post(V2_INFER, content=head + tail, headers={HEADER_LENGTH: str(len(head))})
    check(case, response.status_code, message_of(response))


def signature_of(columns: Any) -> Signature:
    if not isinstance(columns, dict):
        return {"images": IMAGE, "pairs": PAIR}[columns]
    of = ({"name": name, "datatype": datatype, "shape": shape} for name, (datatype, *shape) in columns.items())
    return tensors(*of)


@entries("tensors")
async def test_a_tensor_that_does_not_fit_is_refused_with_the_expected_form(case: Case) -> None:
    backend = OwnSignature(own=signature_of(case["columns"]))
    given = [(name, datatype, shape) for name, (datatype, shape) in case["given"].items()]
    if "raw" in case:
        [(name, datatype, shape)] = given
        message = message_class("ModelInferRequest")(model_name="intents")
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(case["raw"].encode("latin-1"))
        context = FakeContext()
        await Rpcs(backend, None).call("ModelInfer", message.SerializeToString(), context)
        check(case, backend.counted[-1][1], context.details)
        return
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "data": case["data"] or ["a"] * sum(shape[:1])}
        for name, datatype, shape in given
    ]
    async with client_of(backend) as client:
        body = {"inputs": inputs * (2 if "twice" in case else 1)}
        response = await client.post(V2_INFER, json=body)
    check(case, response.status_code, message_of(response))


@entries("generate")
async def test_generation_refuses(case: Case, tmp_path: Path) -> None:
    teller = generating.Teller(codec=prompt_codec(tmp_path))
    for path in [case["path"]] if "path" in case else OPENAI:
        change = {case["long"]: LONG.get(case["long"], "a" * 200)} if "long" in case else case.get("with", {})
        body = case.get("json", OPENAI.get(path, generating.ASKED) | change)
        for streams in ({}, {"stream": True} if path in OPENAI and "stream_options" not in body else {}):
            async with generating.client_of(teller) as client:
                response = await client.post(path, json=body | streams)
            check(case, response.status_code, message_of(response))
            if path in OPENAI:
                error = response.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", case["param"])
                assert error["code"] == case.get("code", "input")
    asked = [each for each in teller.asked if each.prompt]
    assert all(each.max_tokens + len(each.prompt) > 128 for each in asked), "only lengths are refused so late"


@entries("paths")
async def test_a_path_is_refused(case: Case) -> None:
    [method] = {"get", "post", "put"} & set(case)
    async with client_of(FakeBackend()) as client:
        response = await client.request(method.upper(), case[method], json=case.get("json"))
    check(case, response.status_code, message_of(response))
    if "kind" in case:
        assert response.json()["error"]["kind"] == case["kind"]
    if response.status_code == 405:
        assert response.headers["allow"] == case.get("allow", "POST")


async def test_errors_that_only_grpc_messages_can_have_are_refused() -> None:
    new = message_class("ModelInferRequest").FromString
    both, several = new(infer_bytes("pay", "bill")), new(infer_bytes("pay", raw=True))
    both.raw_input_contents.append(b"\3\0\0\0pay")
    several.raw_input_contents.append(b"")
    half, double = (new(infer_bytes("pay", tensor={"name": "x", "datatype": each})) for each in ("FP16", "FP32"))
    for message, place in ((half, "fp32"), (double, "fp64")):
        message.inputs[0].ClearField("contents")
        getattr(message.inputs[0].contents, f"{place}_contents").extend([1, 2])
    bad: dict[str, bytes] = {
        "inputs.0.contents: must be absent if raw_input_contents is set": both.SerializeToString(),
        "raw_input_contents: 2 of them for 1 inputs": several.SerializeToString(),
        "inputs: 'text' missing; the model takes 'text'": new(b"\n\7intents").SerializeToString(),
        "text: element 1 is not UTF-8 at byte 0": infer_bytes("pay", "", tensor={"data": [b"pay", b"\xff"]}),
        "inputs.0.contents: values of FP16 must be in raw_input_contents (got fp32_contents)": half.SerializeToString(),
        "inputs.0.contents: values of FP32 must be in fp32_contents (got fp64_contents)": double.SerializeToString(),
        "the message is not a ModelInferRequest": b"\xff\xff\xff",
    }
    found = []
    for request in bad.values():
        context = FakeContext()
        await Rpcs(FakeBackend(), None).call("ModelInfer", request, context)
        found.append(context.details)
    assert found == list(bad)


async def test_the_message_about_a_body_names_at_most_three_fields() -> None:
    async with client_of(OwnSignature()) as client:
        unknown = {f"x{k}": 0 for k in range(1001)}
        too_many = await client.post("/predict", json={"inputs": "a"} | unknown)
        del unknown["x0"]
        many = await client.post("/predict", json={"inputs": "a"} | unknown)
        wrong_ids = await client.post("/predict", json={"inputs": "a", "ids": [0] * 1001})
        outputs = await client.post(V2_INFER, json=V2_BODY | {"outputs": [{"name": "label"}] * 1001})
        deep = await client.post("/predict", content=b"[" * 100_000)
    assert message_of(many).count("unknown field") == 3
    assert message_of(too_many) == "the body has 1001 wrong fields; see /openapi.json"
    assert message_of(outputs).startswith("outputs: List should have at most 1000 items")
    assert message_of(wrong_ids) == "ids.0: Input should be a valid string"
    assert message_of(deep).startswith("the body is not valid JSON: ")
