from __future__ import annotations

import struct
from typing import Any

import pytest

from deployments.ingress.api.bodies import InferRequest, V2Reply
from deployments.ingress.rpc.conversion import infer_response, read_message
from deployments.ingress.rpc.conversion import parse_infer as parse_infer_of
from deployments.ingress.rpc.messages import message_class
from earlyexit.errors import InputError
from earlyexit.wire import Answer
from tests.deployments.ingress.api.signatures import TASK, TEXT


def parse_infer(message: Any) -> tuple[InferRequest, V2Reply]:
    return parse_infer_of(message, TEXT)


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def request(
    *, raw: list[bytes] | None = None, contents: list[bytes] | None = None, shape: tuple[int, ...] = (2,), **fields: Any
) -> Any:
    tensor = {"name": "text", "datatype": "BYTES", "shape": shape} | fields.pop("tensor", {})
    message = message_class("ModelInferRequest")(model_name="intents", raw_input_contents=raw or [], **fields)
    message.inputs.add(**tensor)
    if contents is not None:
        message.inputs[0].contents.bytes_contents.extend(contents)
    return message


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
def test_texts_come_as_raw_bytes_or_inside_the_tensor(shape: tuple[int, ...]) -> None:
    raw, _ = parse_infer(request(raw=[packed(b"pay", "café".encode())], shape=shape))
    inside, _ = parse_infer(request(contents=[b"pay", "café".encode()], shape=shape))
    assert raw.rows == inside.rows == ("pay", "café")


def test_parameters_mean_what_they_mean_in_json() -> None:
    message = request(contents=[b"pay", b"bill"])
    message.parameters["timeout"].int64_param = 250_000
    message.parameters["truncate"].bool_param = True
    message.parameters["ids"].string_param = '["a", "b"]'
    message.parameters["priority"].uint64_param = 3
    parsed, _ = parse_infer(message)
    assert (parsed.timeout_s, parsed.truncate, parsed.ids) == (0.25, True, ("a", "b"))


def test_no_parameters_are_those_of_json_that_names_none() -> None:
    parsed, reply = parse_infer(request(contents=[b"pay", b"bill"]))
    assert (parsed.timeout_s, parsed.truncate, parsed.ids) == (None, False, ("", ""))
    assert (reply.id, reply.outputs) == (None, ("label", "score", "exit"))


def test_only_the_outputs_that_are_asked_for_are_sent() -> None:
    message = request(contents=[b"pay", b"bill"], id="r7")
    message.outputs.add(name="exit")
    message.outputs.add(name="label")
    _, reply = parse_infer(message)
    assert (reply.id, reply.outputs) == ("r7", ("exit", "label"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "inputs.0: no elements; at least one row is needed"),
        ({"contents": [b"pay", b""]}, "text: element 1 is empty"),
        ({"contents": [b"pay"]}, r"inputs.0.shape: \[2\] does not fit 1 elements; \[1\] or \[1, 1\] would"),
        ({"contents": [b"pay", b"\xff"]}, "text: element 1 is not UTF-8 at byte 0"),
        ({"raw": [packed(b"pay") + b"\x09\0\0\0x"]}, "inputs.0: element 1 ends beyond the bytes that were sent"),
        ({"raw": [b"", b""]}, "raw_input_contents: 2 of them for 1 inputs"),
        ({"raw": [packed(b"pay", b"bill")], "contents": [b"pay"]}, "inputs.0.contents: must be absent"),
        ({"tensor": {"name": "image"}}, "inputs.0.name: unknown input 'image'; the model takes 'text'"),
        ({"tensor": {"datatype": "FP32"}}, "inputs.0.datatype: 'FP32'; 'text' is BYTES"),
    ],
)
def test_a_bad_tensor_is_refused_in_the_words_of_json(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_infer(request(**fields))


@pytest.mark.parametrize(
    ("name", "choice", "value", "words"),
    [
        ("timeout", "string_param", "1", "parameters.timeout: int is needed, not str"),
        ("timeout", "int64_param", -1, "parameters.timeout: -1 microseconds; it must not be negative"),
        ("truncate", "int64_param", 1, "parameters.truncate: bool is needed, not int"),
        ("ids", "string_param", "a", "parameters.ids: a list of 2 strings is needed"),
        ("ids", "string_param", '["a"]', "parameters.ids: a list of 2 strings is needed"),
    ],
)
def test_a_bad_parameter_is_refused_in_the_words_of_json(name: str, choice: str, value: Any, words: str) -> None:
    message = request(contents=[b"pay", b"bill"])
    setattr(message.parameters[name], choice, value)
    with pytest.raises(InputError, match=words):
        parse_infer(message)


def test_other_than_one_input_and_unknown_outputs_are_refused() -> None:
    with pytest.raises(InputError, match="inputs: 'text' missing; the model takes 'text'"):
        parse_infer(message_class("ModelInferRequest")(model_name="intents"))
    message = request(contents=[b"pay", b"bill"])
    message.outputs.add(name="logits")
    with pytest.raises(InputError, match=r"outputs: unknown \['logits'\]; the model has label, score, exit"):
        parse_infer(message)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InputError, match="the message is not a ModelInferRequest"):
        read_message("ModelInferRequest", b"\xff\xff\xff")


def test_answers_are_tensors_of_bytes() -> None:
    answers = [Answer(sample_id="", value=1, score=0.75, exit=2), Answer(sample_id="", value=0, score=0.5, exit=11)]
    reply = V2Reply(id="r7", outputs=("exit", "label", "score"), binary=frozenset())
    response = infer_response(answers, TASK, reply, "intents", "1")
    assert (response.id, response.model_name, response.model_version) == ("r7", "intents", "1")
    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("exit", "INT32", [2]),
        ("label", "BYTES", [2]),
        ("score", "FP32", [2]),
    ]
    assert list(response.raw_output_contents) == [
        struct.pack("<ii", 2, 11),
        packed("café".encode(), b"bill"),
        struct.pack("<ff", 0.75, 0.5),
    ]
