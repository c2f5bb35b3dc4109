"""One request of the v2 protocol in each of its forms, and what a parser says of bad ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from deployments.api.bodies import InferRequest, V2Reply
from deployments.api.grpc.calls import parse_infer
from deployments.api.grpc.messages import message_class
from deployments.api.parsing import parse_v2 as parse_v2_of
from earlyexit.errors import InputError
from tests.deployments.ingress.api.signatures import TEXT

Parsed = tuple[InferRequest, V2Reply]
KINDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


def parse_v2(body: bytes, json_length: int | None = None) -> Parsed:
    return parse_v2_of(body, json_length, TEXT)


def v2_json(*, tensor: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
    text = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["pay", "bill"]} | dict(tensor or {})
    return json.dumps({"inputs": [text]} | fields).encode()


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def by_json(**asked: Any) -> Parsed:
    """`tensor`: fields of the input that are not the usual; `parameters`, `outputs`, `id` as in JSON."""
    return parse_v2(v2_json(**asked))


def by_bytes(*, tensor: Mapping[str, Any] | None = None, **fields: Any) -> Parsed:
    """The texts behind the JSON."""
    tail = packed(*_texts((tensor or {}).get("data", ["pay", "bill"])))
    given = {key: value for key, value in (tensor or {}).items() if key != "data"}
    text = {"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(tail)}} | given
    head = json.dumps({"inputs": [text]} | fields).encode()
    return parse_v2(head + tail, len(head))


def a_message(*, tensor: Mapping[str, Any] | None = None, raw: bool = False, **fields: Any) -> Any:
    given = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["pay", "bill"]} | dict(tensor or {})
    message = message_class("ModelInferRequest")(model_name="intents", id=fields.get("id", ""))
    message.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
    if raw:
        message.raw_input_contents.append(packed(*_texts(given["data"])))
    else:
        message.inputs[0].contents.bytes_contents.extend(_texts(given["data"]))
    _set(message.parameters, fields.get("parameters", {}))
    for output in fields.get("outputs", ()):
        _set(message.outputs.add(name=output["name"]).parameters, output.get("parameters", {}))
    return message


def by_message(**asked: Any) -> Parsed:
    """The same over gRPC, the texts inside of the tensor."""
    return parse_infer(a_message(**asked), TEXT)


def by_raw_message(**asked: Any) -> Parsed:
    """The same over gRPC, the texts as bytes."""
    return parse_infer(a_message(raw=True, **asked), TEXT)


WAYS: dict[str, Callable[..., Parsed]] = {
    "JSON": by_json,
    "bytes": by_bytes,
    "gRPC": by_message,
    "gRPC, raw": by_raw_message,
}


def _texts(data: Iterable[Any]) -> list[bytes]:
    return [each.encode() if isinstance(each, str) else each for each in data]


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        said = json.dumps(value) if isinstance(value, list) else value  # gRPC's parameters are no lists
        setattr(parameters[name], KINDS[type(said)], said)


def refusal(parse: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        parse()
    return str(caught.value)


def check_refused(cases: Mapping[str, tuple[Any, str]], parse: Callable[[Any], object]) -> None:
    """Each is refused with an error that begins with these words, which name the field."""
    said = {name: refusal(lambda given=given: parse(given)) for name, (given, _) in cases.items()}  # type: ignore[misc] # binds the value
    assert {name: words for name, words in said.items() if not words.startswith(cases[name][1])} == {}
