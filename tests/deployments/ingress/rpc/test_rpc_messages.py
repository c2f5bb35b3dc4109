from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2

from deployments.api.grpc.server import PARAMETER_CHOICE, message_class

NESTED = {
    "TensorMetadata": "ModelMetadataResponse",
    "InferInputTensor": "ModelInferRequest",
    "InferRequestedOutputTensor": "ModelInferRequest",
    "InferOutputTensor": "ModelInferResponse",
}
"""Messages that the protocol nests in others, which makes no difference on the wire."""


def tritons(name: str) -> Any:
    owner = service_pb2
    if name in NESTED:
        owner = getattr(service_pb2, NESTED[name])
    return getattr(owner, name).DESCRIPTOR


def kind_of(field: Any) -> str:
    if field.message_type is None:
        names = {value: name for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
        kind = names[field.type].removeprefix("TYPE_").lower()
    elif field.message_type.GetOptions().map_entry:
        return f"map of {field.message_type.fields_by_name['value'].message_type.name}"
    else:
        kind = field.message_type.name
    return f"repeated {kind}" if field.is_repeated else kind


def fields(descriptor: Any) -> Iterator[tuple[int, tuple[str, str]]]:
    for field in descriptor.fields:
        yield field.number, (field.name, kind_of(field))


def test_every_message_has_the_fields_that_tritons_client_sends() -> None:
    names = set(message_class("ModelInferRequest").DESCRIPTOR.file.message_types_by_name)
    names -= {"CheckRequest", "CheckResponse"}  # of gRPC's own health service
    assert len(names) == 18
    for name in names:
        assert dict(fields(message_class(name).DESCRIPTOR)) == dict(fields(tritons(name)))


def test_parameters_have_one_value_as_in_the_protocol() -> None:
    for descriptor in (tritons("InferParameter"), message_class("InferParameter").DESCRIPTOR):
        [choice] = descriptor.oneofs
        assert choice.name == PARAMETER_CHOICE
        assert list(choice.fields) == list(descriptor.fields)


def test_tritons_client_and_we_read_each_others_messages() -> None:
    sent = service_pb2.ModelInferRequest(model_name="intents", id="7", raw_input_contents=[b"\x03\0\0\0pay"])
    sent.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    sent.parameters["timeout"].int64_param = 5
    ours = message_class("ModelInferRequest").FromString(sent.SerializeToString())
    assert (ours.model_name, ours.inputs[0].shape, ours.parameters["timeout"].int64_param) == ("intents", [1, 1], 5)
    assert service_pb2.ModelInferRequest.FromString(ours.SerializeToString()) == sent
