from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.api.bodies import InferRequest, V2Reply
from deployments.ingress.api.parsing import parse_predict as parse_predict_of
from deployments.ingress.api.parsing import parse_v2 as parse_v2_of
from earlyexit.errors import InputError
from tests.deployments.ingress.api.signatures import TEXT


def parse_predict(body: bytes) -> tuple[InferRequest, bool]:
    return parse_predict_of(body, TEXT.codec)


def parse_v2(body: bytes, json_length: int | None) -> tuple[InferRequest, V2Reply]:
    return parse_v2_of(body, json_length, TEXT)


def predict_json(**fields: Any) -> bytes:
    return json.dumps({"inputs": "pay my bill"} | fields).encode()


def v2_json(*, tensor: dict[str, Any] | None = None, **fields: Any) -> bytes:
    text = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["pay", "bill"]} | (tensor or {})
    return json.dumps({"inputs": [text]} | fields).encode()


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def v2_binary(tail: bytes, *, shape: list[int], size: object = None, **fields: Any) -> tuple[bytes, int]:
    """A body with the tensor in bytes, and the length of its JSON."""
    parameters = {"binary_data_size": len(tail) if size is None else size}
    text = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": parameters}
    head = json.dumps({"inputs": [text]} | fields).encode()
    return head + tail, len(head)


def refusal(parse: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        parse()
    return str(caught.value)


# /predict, in


def test_a_single_text_is_a_request_of_one_that_wants_one_answer() -> None:
    request = InferRequest(rows=("pay my bill",), ids=("",), truncate=False, timeout_s=None)
    assert parse_predict(predict_json()) == (request, False)


def test_a_list_of_one_text_is_still_a_list() -> None:
    request, many = parse_predict(predict_json(inputs=["pay"]))
    assert (request.rows, many) == (("pay",), True)


def test_a_predict_body_may_carry_ids_truncation_and_a_timeout() -> None:
    request, _ = parse_predict(predict_json(inputs=["a", "b"], ids=["x", "y"], truncate=True, timeout_s=2))
    assert request == InferRequest(rows=("a", "b"), ids=("x", "y"), truncate=True, timeout_s=2.0)


def test_texts_keep_every_character_they_were_sent_with() -> None:
    request, _ = parse_predict(b'{"inputs": " caf\\u00e9 \\ud83d\\ude00\\u0000\\n"}')
    assert request.rows == (" café 😀\0\n",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"", "the body is not valid JSON: EOF while parsing a value at line 1 column 0", id="empty"),
        pytest.param(b'{"inputs": ', "the body is not valid JSON: EOF", id="cut-off"),
        pytest.param(b"\xff\xfe", "the body is not valid JSON", id="not-utf-8"),
        pytest.param(b'{"inputs": "\xff"}', "the body is not valid JSON", id="text-not-utf-8"),
        pytest.param(b'{"inputs": "\\ud800"}', "the body is not valid JSON", id="lone-surrogate"),
        pytest.param(b"[" * 100_000, "the body is not valid JSON: recursion limit exceeded", id="deep"),
        pytest.param(b"[]", "the body: Input should be an object", id="list"),
        pytest.param(b"null", "the body: Input should be an object", id="null"),
        pytest.param(b"{}", "inputs: Field required", id="no-inputs"),
        pytest.param(predict_json(inputs=5), "inputs: a text or a list of texts is needed", id="number"),
        pytest.param(predict_json(inputs=None), "inputs: a text or a list of texts is needed", id="none"),
        pytest.param(predict_json(inputs={"a": 1}), "inputs: a text or a list of texts is needed", id="object"),
        pytest.param(predict_json(inputs=[]), "inputs: a text or a list of texts is needed", id="empty-list"),
        pytest.param(predict_json(inputs=""), "inputs: the text is empty", id="empty-text"),
        pytest.param(predict_json(inputs=["a", ""]), "inputs.1: the text is empty", id="empty-second"),
        pytest.param(predict_json(inputs=["a", 3]), "inputs.1: a text is needed, not int", id="number-in-list"),
        pytest.param(predict_json(inputs=[["a"]]), "inputs.0: a text is needed, not list", id="nested-list"),
        pytest.param(predict_json(input="a"), "input: Extra inputs are not permitted", id="unknown-field"),
        pytest.param(predict_json(truncate="yes"), "truncate: Input should be a valid boolean", id="truncate-text"),
        pytest.param(predict_json(truncate=1), "truncate: Input should be a valid boolean", id="truncate-number"),
        pytest.param(predict_json(timeout_s=0), "timeout_s: Input should be greater than 0", id="timeout-zero"),
        pytest.param(predict_json(timeout_s=-1), "timeout_s: Input should be greater than 0", id="timeout-negative"),
        pytest.param(predict_json(timeout_s="1"), "timeout_s: Input should be a valid number", id="timeout-text"),
        pytest.param(predict_json(timeout_s=True), "timeout_s: Input should be a valid number", id="timeout-bool"),
        pytest.param(predict_json(timeout_s=math.nan), "timeout_s: Input should be a finite", id="timeout-nan"),
        pytest.param(predict_json(timeout_s=math.inf), "timeout_s: Input should be a finite", id="timeout-infinite"),
        pytest.param(b'{"inputs": "a", "timeout_s": 1e400}', "timeout_s: Input should be a finite", id="timeout-1e400"),
        pytest.param(predict_json(ids=["a", "b"]), "ids: 2 for 1 inputs; one for every input is needed", id="ids"),
        pytest.param(predict_json(ids=[1]), "ids.0: Input should be a valid string", id="ids-numbers"),
    ],
)
def test_a_bad_predict_body_is_refused_with_what_is_wrong(body: bytes, message: str) -> None:
    assert refusal(lambda: parse_predict(body)).startswith(message)


def test_an_absurd_but_finite_timeout_is_left_to_the_service_that_knows_the_limit() -> None:
    request, _ = parse_predict(predict_json(timeout_s=10**30))
    assert request.timeout_s == 1e30


def test_no_more_than_three_mistakes_are_listed() -> None:
    assert refusal(lambda: parse_predict(predict_json(ids=[0] * 1000))).count("valid string") == 3


# /v2, in


def test_a_v2_tensor_in_json_is_a_request_without_limits_that_wants_everything_in_json() -> None:
    request, reply = parse_v2(v2_json(), None)
    assert request == InferRequest(rows=("pay", "bill"), ids=("", ""), truncate=False, timeout_s=None)
    assert reply == V2Reply(id=None, outputs=("label", "score", "exit"), binary=frozenset())


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        pytest.param([2], ["a", "b"], id="flat"),
        pytest.param([2, 1], ["a", "b"], id="column-flat"),
        pytest.param([2, 1], [["a"], ["b"]], id="column-nested"),
        pytest.param([1, 2], ["a", "b"], id="row-flat"),
        pytest.param([1, 2], [["a", "b"]], id="row-nested"),
    ],
)
def test_the_same_texts_may_come_in_several_shapes(shape: list[int], data: list[Any]) -> None:
    request, _ = parse_v2(v2_json(tensor={"shape": shape, "data": data}), None)
    assert request.rows == ("a", "b")


def test_a_v2_body_may_carry_an_id_parameters_and_the_outputs_it_wants() -> None:
    body = v2_json(
        id="r7",
        parameters={"truncate": True, "timeout": 250_000, "ids": ["x", "y"]},
        outputs=[{"name": "exit"}, {"name": "label", "parameters": {"binary_data": True}}],
    )
    request, reply = parse_v2(body, None)
    assert request == InferRequest(rows=("pay", "bill"), ids=("x", "y"), truncate=True, timeout_s=0.25)
    assert reply == V2Reply(id="r7", outputs=("exit", "label"), binary=frozenset({"label"}))


def test_a_v2_timeout_of_zero_means_none() -> None:
    request, _ = parse_v2(v2_json(parameters={"timeout": 0}), None)
    assert request.timeout_s is None


@pytest.mark.parametrize("digits", [30, 400, 4000])
def test_a_v2_timeout_of_any_size_is_a_number_for_the_service_to_refuse(digits: int) -> None:
    request, _ = parse_v2(v2_json(parameters={"timeout": 10**digits}), None)
    assert request.timeout_s is not None
    assert request.timeout_s >= 1e24


def test_binary_data_output_asks_for_all_outputs_in_bytes_but_those_that_say_otherwise() -> None:
    outputs = [{"name": "label", "parameters": {"binary_data": False}}, {"name": "score"}]
    _, reply = parse_v2(v2_json(outputs=outputs, parameters={"binary_data_output": True}), None)
    assert reply.binary == frozenset({"score"})


def test_texts_in_bytes_follow_the_json() -> None:
    body, length = v2_binary(packed("café".encode(), b"b"), shape=[2, 1])
    request, _ = parse_v2(body, length)
    assert request.rows == ("café", "b")


def tensor_of(**fields: Any) -> bytes:
    return v2_json(tensor=fields)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"{", "the body is not valid JSON: EOF", id="cut-off"),
        pytest.param(b"[]", "the body: Input should be an object", id="list"),
        pytest.param(b'{"inputs": []}', "inputs: List should have at least 1 item", id="no-tensor"),
        pytest.param(b'{"inputs": [{}]}', "inputs.0.name: Field required; inputs.0.shape: Field required", id="bare"),
        pytest.param(
            tensor_of(name="image"), "inputs.0.name: unknown input 'image'; the model takes 'text'", id="name"
        ),
        pytest.param(tensor_of(datatype="FP32"), "inputs.0.datatype: 'FP32'; 'text' is BYTES", id="datatype"),
        pytest.param(tensor_of(data=["a", 5]), "inputs.0.data.1: a string is needed, not int", id="number"),
        pytest.param(tensor_of(data=["a", None]), "inputs.0.data.1: a string is needed, not NoneType", id="null"),
        pytest.param(
            tensor_of(data=[[["a"]], [["b"]]], shape=[2, 1]),
            "inputs.0.data: its nesting does not fit the shape [2]",
            id="nested-too-deep",
        ),
        pytest.param(tensor_of(data=["a", ""]), "text: element 1 is empty", id="empty-text"),
        pytest.param(
            tensor_of(data=[], shape=[0]), "inputs.0: no elements; at least one row is needed", id="no-elements"
        ),
        pytest.param(tensor_of(data=None), "inputs.0.data: missing", id="no-data"),
        pytest.param(tensor_of(data="ab"), "inputs.0.data: Input should be a valid", id="data-not-a-list"),
        pytest.param(
            tensor_of(shape=[3]), "inputs.0.shape: [3] does not fit 2 elements; [2] or [2, 1] would", id="shape"
        ),
        pytest.param(tensor_of(shape=[2, 2]), "inputs.0.shape: [2, 2] does not fit 2 elements", id="shape-2x2"),
        pytest.param(tensor_of(shape=[2, 1, 1]), "inputs.0.shape: [2, 1, 1] does not fit 2 elements", id="shape-3d"),
        pytest.param(tensor_of(shape=[1] * 17), "inputs.0.shape: List should have at most 16 items", id="shape-17d"),
        pytest.param(tensor_of(shape=[]), "inputs.0.shape: List should have at least 1 item", id="shape-empty"),
        pytest.param(
            tensor_of(shape=[-2]), "inputs.0.shape.0: Input should be greater than or equal to 0", id="shape-neg"
        ),
        pytest.param(tensor_of(shape=["2"]), "inputs.0.shape.0: Input should be a valid integer", id="shape-text"),
        pytest.param(tensor_of(shape=[2, True]), "inputs.0.shape.1: Input should be a valid integer", id="shape-bool"),
        pytest.param(tensor_of(shape=[10**400]), "inputs.0.shape: [1000", id="shape-huge"),
        pytest.param(
            tensor_of(data=[["a", "b"], ["c"]], shape=[3]),
            "inputs.0.data: its nesting does not fit the shape [3]",
            id="ragged",
        ),
        pytest.param(
            tensor_of(data=[["a"], "b"], shape=[2, 1]),
            "inputs.0.data: its nesting does not fit the shape [2, 1]",
            id="half-nested",
        ),
        pytest.param(v2_json(id=5), "id: Input should be a valid string", id="id-number"),
        pytest.param(v2_json(extra=1), "extra: Extra inputs are not permitted", id="unknown-field"),
        pytest.param(v2_json(parameters={"timeout": -1}), "parameters.timeout: -1 microseconds", id="timeout-negative"),
        pytest.param(
            v2_json(parameters={"timeout": True}), "parameters.timeout: int is needed, not bool", id="timeout-bool"
        ),
        pytest.param(
            v2_json(parameters={"timeout": 1.5}), "parameters.timeout: int is needed, not float", id="timeout-float"
        ),
        pytest.param(
            v2_json(parameters={"truncate": "no"}), "parameters.truncate: bool is needed, not str", id="truncate"
        ),
        pytest.param(v2_json(parameters={"ids": "a"}), "parameters.ids: a list of 2 strings is needed", id="ids-text"),
        pytest.param(v2_json(parameters={"ids": ["a"]}), "parameters.ids: a list of 2 strings is needed", id="ids-few"),
        pytest.param(
            v2_json(parameters={"ids": [1, 2]}), "parameters.ids: a list of 2 strings is needed", id="ids-type"
        ),
        pytest.param(
            v2_json(parameters={"binary_data_output": "no"}),
            "parameters.binary_data_output: bool is needed, not str",
            id="binary-output",
        ),
        pytest.param(
            v2_json(outputs=[{"name": "label", "parameters": {"binary_data": 1}}]),
            "parameters.binary_data: bool is needed, not int",
            id="binary-data",
        ),
        pytest.param(
            v2_json(outputs=[{"name": "logits"}]),
            "outputs: unknown ['logits']; the model has label, score, exit",
            id="output",
        ),
        pytest.param(v2_json(outputs=[]), "outputs: unknown []; the model has label, score, exit", id="no-outputs"),
    ],
)
def test_a_bad_v2_body_is_refused_with_what_is_wrong(body: bytes, message: str) -> None:
    assert refusal(lambda: parse_v2(body, None)).startswith(message)


@pytest.mark.parametrize(
    ("body", "json_length", "message"),
    [
        pytest.param(b"{}", 3, "Inference-Header-Content-Length is 3, the body has 2 bytes", id="length-beyond"),
        pytest.param(*v2_binary(packed(b"a") + b"xyz", shape=[1]), "inputs.0: element 1 ends beyond", id="trailing"),
        pytest.param(
            *v2_binary(b"\xff\xff\xff\xffab", shape=[1]), "inputs.0: element 0 ends beyond", id="4-GiB-element"
        ),
        pytest.param(*v2_binary(packed(b"a\xff"), shape=[1]), "text: element 0 is not UTF-8 at byte 1", id="utf-8"),
        pytest.param(*v2_binary(packed(b"\xed\xa0\x80"), shape=[1]), "text: element 0 is not UTF-8", id="surrogate"),
        pytest.param(*v2_binary(packed(b"a", b""), shape=[2]), "text: element 1 is empty", id="empty-text"),
        pytest.param(*v2_binary(b"", shape=[0]), "inputs.0: no elements", id="no-elements"),
        pytest.param(*v2_binary(packed(b"a"), shape=[2]), "inputs.0.shape: [2] does not fit 1 elements", id="shape"),
        pytest.param(
            *v2_binary(packed(b"a"), shape=[1], size=99),
            "inputs.0.parameters.binary_data_size is 99, 5 bytes follow the JSON",
            id="size",
        ),
        pytest.param(
            *v2_binary(packed(b"a"), shape=[1], size="5"), "inputs.0.parameters.binary_data_size is '5'", id="size-text"
        ),
        pytest.param(
            v2_json() + b"tail",
            len(v2_json()),
            "4 bytes follow the JSON that no binary_data_size of an input announces",
            id="bytes-nobody-announced",
        ),
    ],
)
def test_bad_bytes_behind_the_json_are_refused_with_what_is_wrong(body: bytes, json_length: int, message: str) -> None:
    assert refusal(lambda: parse_v2(body, json_length)).startswith(message)


# Anything at all


def nested_deeply(value: Any) -> Any:
    for _ in range(300):
        value = [value]
    return value


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**30), 10**400, 10**4000, 2**63, -1, 0, 1])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(exclude_categories=()))  # lone surrogates as well
    | st.sampled_from(["text", "BYTES", "label", "a"])
)
VALID: list[dict[str, Any]] = [
    {"inputs": ["a", "b"], "ids": ["x", "y"], "truncate": True, "timeout_s": 1.5},
    {"inputs": "a"},
    {
        "id": "r",
        "inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": [["a"], ["b"]], "parameters": {}}],
        "outputs": [{"name": "label", "parameters": {"binary_data": True}}],
        "parameters": {"timeout": 5, "truncate": False, "ids": ["x", "y"], "binary_data_output": False},
    },
    {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]},
]
KEYS = st.sampled_from(sorted(set(re.findall(r'"(\w+)":', json.dumps(VALID)))))
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5) | inner.map(nested_deeply),
    max_leaves=12,
)


@st.composite
def mutated_documents(draw: st.DrawFn) -> bytes:
    """A valid body with something in it replaced, dropped or added."""
    document = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 3))):
        mutate(draw, document)
    return json.dumps(document).encode()


def mutate(draw: st.DrawFn, node: Any) -> None:
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or draw(st.booleans()):
            break
        node = node[key]
    if draw(st.booleans()):
        node[key] = draw(JSON_VALUES)
    elif isinstance(node, dict) and draw(st.booleans()):
        node[draw(KEYS)] = draw(JSON_VALUES)
    else:
        del node[key]


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """A valid body, its binary tensor included, with a run of bytes replaced by others."""
    body = json.dumps(draw(st.sampled_from(VALID))).encode() + draw(st.sampled_from([b"", packed(b"a")]))
    start = draw(st.integers(0, len(body)))
    return body[:start] + draw(st.binary(max_size=4)) + body[start + draw(st.integers(0, 8)) :]


BODIES = st.binary() | JSON_VALUES.map(lambda value: json.dumps(value).encode()) | mutated_documents() | mutated_bytes()


def is_sound_or_refused_in_words(parse: Callable[[], tuple[InferRequest, object]]) -> bool:
    """Whether what was parsed can be served, or the refusal says something; another error is the caller's to see."""
    try:
        request, _ = parse()
    except InputError as error:
        return bool(str(error).encode().strip())
    whole = bool(request.rows) and all(request.rows) and len(request.ids) == len(request.rows)
    in_time = request.timeout_s is None or request.timeout_s > 0
    return whole and in_time and isinstance(request.truncate, bool)


@settings(max_examples=500, deadline=None)
@given(body=BODIES)
def test_whatever_is_sent_to_predict_is_parsed_or_refused_in_words(body: bytes) -> None:
    assert is_sound_or_refused_in_words(lambda: parse_predict(body))


@settings(max_examples=500, deadline=None)
@given(body=BODIES, data=st.data())
def test_whatever_is_sent_to_v2_is_parsed_or_refused_in_words(body: bytes, data: st.DataObject) -> None:
    lengths = st.none() | st.integers(0, len(body)) | st.just(max(0, len(body) - 5)) | st.integers()
    json_length = data.draw(lengths)
    assert is_sound_or_refused_in_words(lambda: parse_v2(body, json_length))
