"""Messages of the protocol to checked requests, and answers to messages; what they must hold is said for JSON too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from deployments.ingress.api.bodies import (
    OUTPUTS,
    InferRequest,
    V2Reply,
    check_input,
    v2_columns,
    v2_reply,
    v2_request,
)
from deployments.ingress.api.tensors import decoded, packed, unpacked_texts
from deployments.ingress.rpc.messages import ONE_OF, message_class
from earlyexit.errors import InputError
from earlyexit.wire import Answer

CHOICE = ONE_OF["InferParameter"]


def read_message(name: str, data: bytes) -> Any:
    """A message of a class; raises InputError."""
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InputError(f"the message is not a {name}") from error


def parse_infer(message: Any) -> tuple[InferRequest, V2Reply]:
    """The request of a ModelInferRequest; raises InputError."""
    if len(message.inputs) != 1:
        raise InputError(f"inputs: {len(message.inputs)} tensors; one is needed, 'text'")
    tensor = message.inputs[0]
    check_input(tensor.name, tensor.datatype)
    parameters = _values(message.parameters)
    asked = [(output.name, _values(output.parameters)) for output in message.outputs]
    request = v2_request(_texts(message), list(tensor.shape), parameters)
    return request, v2_reply(message.id or None, asked or None, parameters)


def infer_response(answers: Sequence[Answer], labels: Sequence[str], reply: V2Reply, model: str, version: str) -> Any:
    """A ModelInferResponse; its tensors are bytes, as Triton sends them."""
    columns = v2_columns(answers, labels)
    response = message_class("ModelInferResponse")(model_name=model, model_version=version, id=reply.id or "")
    for name in reply.outputs:
        response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(answers)])
        response.raw_output_contents.append(packed(OUTPUTS[name], columns[name]))
    return response


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON would hold them."""
    chosen = {name: parameter.WhichOneof(CHOICE) for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice is not None}


def _texts(message: Any) -> list[str]:
    [tensor], raw = message.inputs, message.raw_input_contents
    if not raw:
        return [decoded(element, index) for index, element in enumerate(tensor.contents.bytes_contents)]
    if len(raw) != 1:
        raise InputError(f"raw_input_contents: {len(raw)} of them for one input")
    if tensor.HasField("contents"):
        raise InputError("inputs.0.contents: must be absent where raw_input_contents is given")
    return unpacked_texts(raw[0])
