"""The messages of the protocol, with their field numbers.

They are in their own descriptor pool: otherwise a program that also loads the generated messages of a client, such as
Triton's, would define `inference.ModelInferRequest` twice, which protobuf refuses. They are built here instead of by
protoc, because generated code runs only with the protobuf of its own major version and the next, and Triton's package
needs an older one than Ray's gRPC. A test compares all fields with those of Triton's client.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
MAP = "map of "
REPEATED = "repeated "
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready bool",
    "ModelReadyRequest": "name string, version string",
    "ModelReadyResponse": "ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name string, version string, extensions repeated string",
    "ModelMetadataRequest": "name string, version string",
    "TensorMetadata": "name string, datatype string, shape repeated int64",
    "ModelMetadataResponse": (
        "name string, versions repeated string, platform string, inputs repeated TensorMetadata, "
        "outputs repeated TensorMetadata"
    ),
    "InferParameter": (
        "bool_param bool, int64_param int64, string_param string, double_param double, uint64_param uint64"
    ),
    "InferTensorContents": (
        "bool_contents repeated bool, int_contents repeated int32, int64_contents repeated int64, "
        "uint_contents repeated uint32, uint64_contents repeated uint64, fp32_contents repeated float, "
        "fp64_contents repeated double, bytes_contents repeated bytes"
    ),
    "InferInputTensor": (
        "name string, datatype string, shape repeated int64, parameters map of InferParameter, "
        "contents InferTensorContents"
    ),
    "InferRequestedOutputTensor": "name string, parameters map of InferParameter",
    "ModelInferRequest": (
        "model_name string, model_version string, id string, parameters map of InferParameter, "
        "inputs repeated InferInputTensor, outputs repeated InferRequestedOutputTensor, "
        "raw_input_contents repeated bytes"
    ),
    "InferOutputTensor": (
        "name string, datatype string, shape repeated int64, parameters map of InferParameter, "
        "contents InferTensorContents"
    ),
    "ModelInferResponse": (
        "model_name string, model_version string, id string, parameters map of InferParameter, "
        "outputs repeated InferOutputTensor, raw_output_contents repeated bytes"
    ),
}
"""The fields of each message, in the order of their numbers."""
FIELDS: dict[str, dict[int, tuple[str, str]]] = {
    message: {
        number: (field, kind)
        for number, (field, _, kind) in enumerate((each.partition(" ") for each in fields.split(", ") if each), 1)
    }
    for message, fields in MESSAGES.items()
}
"""Names and kinds of the fields of each message, by number."""
ONE_OF = {"InferParameter": "parameter_choice"}
"""Messages with only one field set."""


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name in ONE_OF:
            message.oneof_decl.add(name=ONE_OF[name])
        for number, (field, kind) in fields.items():
            _add_field(message, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    if kind.startswith(MAP):  # a repeated pair, on the wire
        pair = message.nested_type.add(name=f"{name.capitalize()}Entry")
        pair.options.map_entry = True
        _add_field(pair, 1, "key", "string")
        _add_field(pair, 2, "value", kind.removeprefix(MAP))
        kind = f"{REPEATED}{message.name}.{pair.name}"
    field = message.field.add(name=name, number=number)
    types = descriptor_pb2.FieldDescriptorProto
    field.label = types.LABEL_REPEATED if kind.startswith(REPEATED) else types.LABEL_OPTIONAL
    kind = kind.removeprefix(REPEATED)
    if kind.islower():
        field.type = types.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = types.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if message.name in ONE_OF:
        field.oneof_index = 0
