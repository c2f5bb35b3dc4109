"""The protocol's messages, with the field numbers that everybody uses.

In a descriptor pool of their own: a program that also loads a client's generated messages, Triton's or KServe's, would
otherwise define `inference.ModelInferRequest` twice, which protobuf refuses. Made here rather than by protoc: generated
code runs only with the protobuf of its own major version and the next, and Triton's package asks for an older one than
Ray's gRPC needs. The test holds every field against that of Triton's client.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
MAP = "map of "
REPEATED = "repeated "
FIELDS: dict[str, dict[int, tuple[str, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {1: ("live", "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {1: ("ready", "bool")},
    "ModelReadyRequest": {1: ("name", "string"), 2: ("version", "string")},
    "ModelReadyResponse": {1: ("ready", "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {
        1: ("name", "string"),
        2: ("version", "string"),
        3: ("extensions", "repeated string"),
    },
    "ModelMetadataRequest": {1: ("name", "string"), 2: ("version", "string")},
    "TensorMetadata": {1: ("name", "string"), 2: ("datatype", "string"), 3: ("shape", "repeated int64")},
    "ModelMetadataResponse": {
        1: ("name", "string"),
        2: ("versions", "repeated string"),
        3: ("platform", "string"),
        4: ("inputs", "repeated TensorMetadata"),
        5: ("outputs", "repeated TensorMetadata"),
    },
    "InferParameter": {
        1: ("bool_param", "bool"),
        2: ("int64_param", "int64"),
        3: ("string_param", "string"),
        4: ("double_param", "double"),
        5: ("uint64_param", "uint64"),
    },
    "InferTensorContents": {
        1: ("bool_contents", "repeated bool"),
        2: ("int_contents", "repeated int32"),
        3: ("int64_contents", "repeated int64"),
        4: ("uint_contents", "repeated uint32"),
        5: ("uint64_contents", "repeated uint64"),
        6: ("fp32_contents", "repeated float"),
        7: ("fp64_contents", "repeated double"),
        8: ("bytes_contents", "repeated bytes"),
    },
    "InferInputTensor": {
        1: ("name", "string"),
        2: ("datatype", "string"),
        3: ("shape", "repeated int64"),
        4: ("parameters", "map of InferParameter"),
        5: ("contents", "InferTensorContents"),
    },
    "InferRequestedOutputTensor": {1: ("name", "string"), 2: ("parameters", "map of InferParameter")},
    "ModelInferRequest": {
        1: ("model_name", "string"),
        2: ("model_version", "string"),
        3: ("id", "string"),
        4: ("parameters", "map of InferParameter"),
        5: ("inputs", "repeated InferInputTensor"),
        6: ("outputs", "repeated InferRequestedOutputTensor"),
        7: ("raw_input_contents", "repeated bytes"),
    },
    "InferOutputTensor": {
        1: ("name", "string"),
        2: ("datatype", "string"),
        3: ("shape", "repeated int64"),
        4: ("parameters", "map of InferParameter"),
        5: ("contents", "InferTensorContents"),
    },
    "ModelInferResponse": {
        1: ("model_name", "string"),
        2: ("model_version", "string"),
        3: ("id", "string"),
        4: ("parameters", "map of InferParameter"),
        5: ("outputs", "repeated InferOutputTensor"),
        6: ("raw_output_contents", "repeated bytes"),
    },
}
ONE_OF = {"InferParameter": "parameter_choice"}
"""Messages of which only one field is set."""


@cache
def message_class(name: str) -> Any:
    """The class of a message, in protobuf's own implementation."""
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
