from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api.bodies import InferRequest, V2Reply
from deployments.api.grpc.calls import parse_infer, read_message
from deployments.api.grpc.messages import message_class
from deployments.api.parsing import parse_predict as parse_predict_of
from tests.deployments.ingress.api.signatures import TEXT
from tests.deployments.ingress.api.v2_requests import (
    WAYS,
    Parsed,
    a_message,
    by_bytes,
    by_json,
    check_refused,
    packed,
    parse_v2,
    refusal,
    v2_json,
)


def parse_predict(body: bytes) -> tuple[InferRequest, bool]:
    return parse_predict_of(body, TEXT.codec)


def predict_json(**fields: Any) -> bytes:
    return json.dumps({"inputs": "pay my bill"} | fields).encode()


# /predict


def test_a_single_text_is_a_request_of_one_that_wants_one_answer() -> None:
    request = InferRequest(rows=("pay my bill",), ids=("",), truncate=False, timeout_s=None)
    assert parse_predict(predict_json()) == (request, False)
    request, many = parse_predict(predict_json(inputs=["pay"]))
    assert (request.rows, many) == (("pay",), True)


def test_a_predict_body_may_carry_ids_truncation_and_a_timeout() -> None:
    request, _ = parse_predict(predict_json(inputs=["a", "b"], ids=["x", "y"], truncate=True, timeout_s=2))
    assert request == InferRequest(rows=("a", "b"), ids=("x", "y"), truncate=True, timeout_s=2.0)


def test_texts_keep_every_character_they_were_sent_with() -> None:
    request, _ = parse_predict(b'{"inputs": " caf\\u00e9 \\ud83d\\ude00\\u0000\\n"}')
    assert request.rows == (" café 😀\0\n",)


NEEDED = "inputs: a text or a list of texts is needed"
BAD_PREDICTS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "the body is not valid JSON: "),
    "cut off": (b'{"inputs": ', "the body is not valid JSON: "),
    "not utf-8": (b"\xff\xfe", "the body is not valid JSON"),
    "text not utf-8": (b'{"inputs": "\xff"}', "the body is not valid JSON"),
    "lone surrogate": (b'{"inputs": "\\ud800"}', "the body is not valid JSON"),
    "deep": (b"[" * 100_000, "the body is not valid JSON: "),
    "list": (b"[]", "the body: "),
    "no inputs": (b"{}", "inputs: "),
    "number": (predict_json(inputs=5), NEEDED),
    "none": (predict_json(inputs=None), NEEDED),
    "object": (predict_json(inputs={"a": 1}), NEEDED),
    "empty list": (predict_json(inputs=[]), NEEDED),
    "empty text": (predict_json(inputs=""), "inputs: the text is empty"),
    "empty second": (predict_json(inputs=["a", ""]), "inputs.1: the text is empty"),
    "number in list": (predict_json(inputs=["a", 3]), "inputs.1: a text is needed, not int"),
    "nested list": (predict_json(inputs=[["a"]]), "inputs.0: a text is needed, not list"),
    "unknown field": (predict_json(input="a"), "input: "),
    "truncate text": (predict_json(truncate="yes"), "truncate: "),
    "truncate number": (predict_json(truncate=1), "truncate: "),
    "timeout zero": (predict_json(timeout_s=0), "timeout_s: "),
    "timeout text": (predict_json(timeout_s="1"), "timeout_s: "),
    "timeout bool": (predict_json(timeout_s=True), "timeout_s: "),
    "timeout nan": (predict_json(timeout_s=math.nan), "timeout_s: "),
    "timeout infinite": (predict_json(timeout_s=math.inf), "timeout_s: "),
    "timeout 1e400": (b'{"inputs": "a", "timeout_s": 1e400}', "timeout_s: "),
    "ids": (predict_json(ids=["a", "b"]), "ids: 2 for 1 inputs; one for every input is needed"),
    "ids numbers": (predict_json(ids=[1]), "ids.0: "),
}


def test_a_bad_predict_body_is_refused_with_what_is_wrong() -> None:
    check_refused(BAD_PREDICTS, parse_predict)
    assert refusal(lambda: parse_predict(predict_json(ids=[0] * 1000))).count("ids.") == 3  # no more are listed


def test_an_absurd_but_finite_timeout_is_left_to_the_service_that_knows_the_limit() -> None:
    request, _ = parse_predict(predict_json(timeout_s=10**30))
    assert request.timeout_s == 1e30
    for digits in (30, 400, 4000):
        request, _ = parse_v2(v2_json(parameters={"timeout": 10**digits}))
        assert request.timeout_s is not None
        assert request.timeout_s >= 1e24


# /v2, by REST and gRPC


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def parse(request: pytest.FixtureRequest) -> Callable[..., Parsed]:
    way: Callable[..., Parsed] = request.param
    return way


def test_a_tensor_is_a_request_without_limits_that_wants_everything(parse: Callable[..., Parsed]) -> None:
    request, reply = parse()
    assert request == InferRequest(rows=("pay", "bill"), ids=("", ""), truncate=False, timeout_s=None)
    assert reply == V2Reply(id=None, outputs=("label", "score", "exit"), binary=frozenset())
    for shape in ([2], [2, 1], [1, 2]):
        assert parse(tensor={"shape": shape, "data": ["pay", "café"]})[0].rows == ("pay", "café")


def test_a_request_may_carry_an_id_parameters_and_the_outputs_it_wants(parse: Callable[..., Parsed]) -> None:
    request, reply = parse(
        id="r7",
        parameters={"truncate": True, "timeout": 250_000, "ids": ["x", "y"], "priority": 3},
        outputs=[{"name": "exit"}, {"name": "label", "parameters": {"binary_data": True}}],
    )
    assert request == InferRequest(rows=("pay", "bill"), ids=("x", "y"), truncate=True, timeout_s=0.25)
    assert reply == V2Reply(id="r7", outputs=("exit", "label"), binary=frozenset({"label"}))
    assert parse(parameters={"timeout": 0})[0].timeout_s is None


def test_binary_data_output_asks_for_all_outputs_in_bytes_but_those_that_say_otherwise(
    parse: Callable[..., Parsed],
) -> None:
    outputs = [{"name": "label", "parameters": {"binary_data": False}}, {"name": "score"}]
    _, reply = parse(outputs=outputs, parameters={"binary_data_output": True})
    assert reply.binary == frozenset({"score"})


BAD_EVERYWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"tensor": {"name": "image"}}, "inputs.0.name: unknown input 'image'; the model takes 'text'"),
    "empty text": ({"tensor": {"data": ["a", ""]}}, "text: element 1 is empty"),
    "no elements": ({"tensor": {"data": [], "shape": [0]}}, "inputs.0: no elements; at least one row is needed"),
    "shape": ({"tensor": {"shape": [3]}}, "inputs.0.shape: [3] does not fit 2 elements; [2] or [2, 1] would"),
    "shape 2x2": ({"tensor": {"shape": [2, 2]}}, "inputs.0.shape: [2, 2] does not fit 2 elements"),
    "shape 3d": ({"tensor": {"shape": [2, 1, 1]}}, "inputs.0.shape: [2, 1, 1] does not fit 2 elements"),
    "timeout negative": ({"parameters": {"timeout": -1}}, "parameters.timeout: -1 microseconds"),
    "timeout bool": ({"parameters": {"timeout": True}}, "parameters.timeout: int is needed, not bool"),
    "timeout float": ({"parameters": {"timeout": 1.5}}, "parameters.timeout: int is needed, not float"),
    "timeout text": ({"parameters": {"timeout": "1"}}, "parameters.timeout: int is needed, not str"),
    "truncate": ({"parameters": {"truncate": 1}}, "parameters.truncate: bool is needed, not int"),
    "ids text": ({"parameters": {"ids": "a"}}, "parameters.ids: a list of 2 strings is needed"),
    "ids few": ({"parameters": {"ids": ["a"]}}, "parameters.ids: a list of 2 strings is needed"),
    "ids type": ({"parameters": {"ids": [1, 2]}}, "parameters.ids: a list of 2 strings is needed"),
    "binary output": ({"parameters": {"binary_data_output": "no"}}, "parameters.binary_data_output: bool is needed"),
    "binary data": (
        {"outputs": [{"name": "label", "parameters": {"binary_data": 1}}]},
        "parameters.binary_data: bool is needed, not int",
    ),
    "output": ({"outputs": [{"name": "logits"}]}, "outputs: unknown ['logits']; the model has label, score, exit"),
}


def test_a_bad_request_is_refused_in_the_same_words_whichever_way_it_came(parse: Callable[..., Parsed]) -> None:
    check_refused(BAD_EVERYWHERE, lambda asked: parse(**asked))


# /v2, in JSON


def test_texts_may_be_nested_as_their_shape_says() -> None:
    for shape, data in (([2, 1], [["a"], ["b"]]), ([1, 2], [["a", "b"]])):
        assert by_json(tensor={"shape": shape, "data": data})[0].rows == ("a", "b")


def tensor_of(**fields: Any) -> bytes:
    return v2_json(tensor=fields)


NESTING = "inputs.0.data: its nesting does not fit the shape "
BAD_JSON: dict[str, tuple[Any, str]] = {
    "cut off": (b"{", "the body is not valid JSON: "),
    "list": (b"[]", "the body: "),
    "no tensor": (b'{"inputs": []}', "inputs: "),
    "bare": (b'{"inputs": [{}]}', "inputs.0.name: "),
    "datatype": (tensor_of(datatype="FP32"), "inputs.0.datatype: 'FP32'; 'text' is BYTES"),
    "number": (tensor_of(data=["a", 5]), "inputs.0.data.1: a string is needed, not int"),
    "null": (tensor_of(data=["a", None]), "inputs.0.data.1: a string is needed, not NoneType"),
    "nested too deep": (tensor_of(data=[[["a"]], [["b"]]], shape=[2, 1]), NESTING + "[2]"),
    "ragged": (tensor_of(data=[["a", "b"], ["c"]], shape=[3]), NESTING + "[3]"),
    "half nested": (tensor_of(data=[["a"], "b"], shape=[2, 1]), NESTING + "[2, 1]"),
    "no data": (tensor_of(data=None), "inputs.0.data: missing"),
    "data not a list": (tensor_of(data="ab"), "inputs.0.data: "),
    "shape 17d": (tensor_of(shape=[1] * 17), "inputs.0.shape: "),
    "shape empty": (tensor_of(shape=[]), "inputs.0.shape: "),
    "shape negative": (tensor_of(shape=[-2]), "inputs.0.shape.0: "),
    "shape text": (tensor_of(shape=["2"]), "inputs.0.shape.0: "),
    "shape bool": (tensor_of(shape=[2, True]), "inputs.0.shape.1: "),
    "shape huge": (tensor_of(shape=[10**400]), "inputs.0.shape: [1000"),
    "id number": (v2_json(id=5), "id: "),
    "unknown field": (v2_json(extra=1), "extra: "),
    "no outputs": (v2_json(outputs=[]), "outputs: unknown []; the model has label, score, exit"),
}


def test_a_bad_v2_body_is_refused_with_what_is_wrong() -> None:
    check_refused(BAD_JSON, parse_v2)


# /v2, in bytes behind the JSON


def v2_binary(tail: bytes, *, size: object = None) -> tuple[bytes, int]:
    """A body with one text in bytes, and the length of its JSON."""
    parameters = {"binary_data_size": len(tail) if size is None else size}
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": parameters}
    head = json.dumps({"inputs": [text]}).encode()
    return head + tail, len(head)


SIZE = "inputs.0.parameters.binary_data_size is "
BAD_BYTES: dict[str, tuple[tuple[bytes, int], str]] = {
    "length beyond": ((b"{}", 3), "Inference-Header-Content-Length is 3, the body has 2 bytes"),
    "trailing": (v2_binary(packed(b"a") + b"xyz"), "inputs.0: element 1 ends beyond the bytes that were sent"),
    "4-GiB element": (v2_binary(b"\xff\xff\xff\xffab"), "inputs.0: element 0 ends beyond"),
    "utf-8": (v2_binary(packed(b"a\xff")), "text: element 0 is not UTF-8 at byte 1"),
    "surrogate": (v2_binary(packed(b"\xed\xa0\x80")), "text: element 0 is not UTF-8"),
    "size": (v2_binary(packed(b"a"), size=99), SIZE + "99, 5 bytes follow the JSON"),
    "size text": (v2_binary(packed(b"a"), size="5"), SIZE + "'5'"),
    "nobody announced them": (
        (v2_json() + b"tail", len(v2_json())),
        "4 bytes follow the JSON that no binary_data_size of an input announces",
    ),
}


def test_bad_bytes_behind_the_json_are_refused_with_what_is_wrong() -> None:
    check_refused(BAD_BYTES, lambda given: parse_v2(*given))
    assert by_bytes(tensor={"data": [b"caf\xc3\xa9", b"b"], "shape": [2, 1]})[0].rows == ("café", "b")


# /v2, as messages


def test_what_only_messages_can_have_wrong_is_refused() -> None:
    both, several, inside = a_message(), a_message(raw=True), a_message(tensor={"data": [b"pay", b"\xff"]})
    both.raw_input_contents.append(packed(b"pay", b"bill"))
    several.raw_input_contents.append(b"")
    nothing = message_class("ModelInferRequest")(model_name="intents")
    bad = {
        "raw beside typed": (both, "inputs.0.contents: must be absent where raw_input_contents is given"),
        "one too many": (several, "raw_input_contents: 2 of them for 1 inputs"),
        "no input": (nothing, "inputs: 'text' missing; the model takes 'text'"),
        "utf-8": (inside, "text: element 1 is not UTF-8 at byte 0"),
    }
    check_refused(bad, lambda message: parse_infer(message, TEXT))
    assert (
        refusal(lambda: read_message("ModelInferRequest", b"\xff\xff\xff")) == "the message is not a ModelInferRequest"
    )
