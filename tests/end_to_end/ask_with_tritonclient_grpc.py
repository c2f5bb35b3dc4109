"""Asks a server over the Open Inference Protocol's gRPC with Triton's own client; prints what it got as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc


def infer(client: Any, model: str, texts: list[str], **options: Any) -> dict[str, Any]:
    tensor = triton.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_))
    result = client.infer(model, [tensor], **options)
    response = result.get_response()
    return {
        "label": [label.decode() for label in result.as_numpy("label")],
        "score": result.as_numpy("score").tolist(),
        "exit": result.as_numpy("exit").tolist(),
        "said": [response.id, response.model_name, response.model_version],
    }


def refusal(client: Any, model: str, texts: list[str], **options: Any) -> list[str]:
    try:
        infer(client, model, texts, **options)
    except triton.InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return []


def refused(stub: Any, request: Any, **options: Any) -> list[Any]:
    """Status, details, and the metadata that came behind."""
    try:
        stub.ModelInfer(request, **options)
    except grpc.RpcError as error:
        return [error.code().name, error.details(), dict(error.trailing_metadata())]
    return []


def only_labels(stub: Any, model: str, texts: list[str]) -> list[str]:
    """One output, for a tensor whose texts are in the message itself."""
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    request.outputs.add(name="label")
    response = stub.ModelInfer(request)
    assert [output.name for output in response.outputs] == ["label"]
    result = triton.InferResult(response)
    return [label.decode() for label in result.as_numpy("label")]


def main(address: str, model: str, texts: list[str]) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client, grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(model),
            "other_ready": client.is_model_ready("other"),
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(model, as_json=True),
            "answers": infer(client, model, texts, request_id="r7"),
            "labels": only_labels(stub, model, texts),
            "unknown_model": refusal(client, "other", texts),
            "empty_text": refusal(client, model, [""]),
            "too_long": refusal(client, model, ["pay " * 100]),
            "too_large": refusal(client, model, ["pay " * 6000]),
            "no_time": refusal(client, model, texts, timeout=1),
            "no_deadline_left": refusal(client, model, texts, client_timeout=1e-4),
            "nothing": refused(
                stub, service_pb2.ModelInferRequest(model_name=model), metadata=(("x-request-id", "r8"),)
            ),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))  # noqa: T201 # the test reads it
