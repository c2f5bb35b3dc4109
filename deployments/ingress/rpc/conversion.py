"""Messages of the protocol to checked requests, and answers to messages; what they must hold is said for JSON too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from deployments.ingress.api.answers import v2_columns
from deployments.ingress.api.bodies import InferRequest, V2Reply
from deployments.ingress.api.columns import GivenTensor
from deployments.ingress.api.parsing import v2_reply, v2_request
from deployments.ingress.api.signature import Signature
from deployments.ingress.api.tensors import packed
from deployments.ingress.rpc.messages import ONE_OF, message_class
from earlyexit.errors import InputError
from earlyexit.tasks.base import Task
from earlyexit.wire import Answer

CHOICE = ONE_OF["InferParameter"]
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where a tensor's values are that do not come raw; FP16 has no such place."""


def read_message(name: str, data: bytes) -> Any:
    """A message of a class; raises InputError."""
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InputError(f"the message is not a {name}") from error


def parse_infer(message: Any, signature: Signature) -> tuple[InferRequest, V2Reply]:
    """The request of a ModelInferRequest; raises InputError."""
    parameters = _values(message.parameters)
    asked = [(output.name, _values(output.parameters)) for output in message.outputs]
    request = v2_request(_given(message), parameters, signature)
    return request, v2_reply(message.id or None, asked or None, parameters, signature)


def infer_response(answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str) -> Any:
    """A ModelInferResponse; its tensors are bytes, as Triton sends them."""
    columns = v2_columns(answers, task)
    response = message_class("ModelInferResponse")(model_name=model, model_version=version, id=reply.id or "")
    for name in reply.outputs:
        datatype, shape, column = columns[name]
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(packed(datatype, column))
    return response


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON would hold them."""
    chosen = {name: parameter.WhichOneof(CHOICE) for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice is not None}


def _given(message: Any) -> list[GivenTensor]:
    tensors, raw = message.inputs, message.raw_input_contents
    if raw and len(raw) != len(tensors):
        raise InputError(f"raw_input_contents: {len(raw)} of them for {len(tensors)} inputs")
    given = []
    for k, tensor in enumerate(tensors):
        if raw and tensor.HasField("contents"):
            raise InputError(f"inputs.{k}.contents: must be absent where raw_input_contents is given")
        content = raw[k] if raw else _contents(tensor, f"inputs.{k}")
        given.append(GivenTensor(tensor.name, tensor.datatype, tensor.shape, content))
    return given


def _contents(tensor: Any, where: str) -> list[Any]:
    place = CONTENTS.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != place:
            taken = "raw_input_contents alone" if place is None else place
            raise InputError(f"{where}.contents: {field.name}; {tensor.datatype} is taken from {taken}")
    return [] if place is None else list(getattr(tensor.contents, place))
