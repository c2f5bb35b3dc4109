"""Any body is either parsed or refused with a message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.operations import InferRequest, parse_predict
from deployments.api.v2 import parse_v2
from earlyexit.errors import InputError
from tests.deployments.ingress.api.faces import packed
from tests.deployments.ingress.api.signatures import TEXT


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
    """Draws a valid body in which something is replaced, dropped or added."""
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
    """Draws a valid body, including its binary tensor, in which a run of bytes is replaced."""
    body = json.dumps(draw(st.sampled_from(VALID))).encode() + draw(st.sampled_from([b"", packed(b"a")]))
    start = draw(st.integers(0, len(body)))
    return body[:start] + draw(st.binary(max_size=4)) + body[start + draw(st.integers(0, 8)) :]


BODIES = st.binary() | JSON_VALUES.map(lambda value: json.dumps(value).encode()) | mutated_documents() | mutated_bytes()


def is_sound_or_refused_in_words(parse: Callable[[], tuple[InferRequest, object]]) -> bool:
    """Checks that the request is valid, or refused with a message; other errors are raised."""
    try:
        request, _ = parse()
    except InputError as error:
        return bool(str(error).encode().strip())
    whole = bool(request.rows) and all(request.rows) and len(request.ids) == len(request.rows)
    in_time = request.timeout_s is None or request.timeout_s > 0
    return whole and in_time and isinstance(request.truncate, bool)


@settings(max_examples=200, deadline=None)
@given(body=BODIES)
def test_any_body_sent_to_predict_is_parsed_or_refused(body: bytes) -> None:
    assert is_sound_or_refused_in_words(lambda: parse_predict(body, TEXT.codec))


@settings(max_examples=200, deadline=None)
@given(body=BODIES, data=st.data())
def test_any_body_sent_to_v2_is_parsed_or_refused(body: bytes, data: st.DataObject) -> None:
    lengths = st.none() | st.integers(0, len(body)) | st.just(max(0, len(body) - 5)) | st.integers()
    json_length = data.draw(lengths)
    header = None if json_length is None else str(json_length)
    assert is_sound_or_refused_in_words(lambda: parse_v2(body, header, TEXT))
