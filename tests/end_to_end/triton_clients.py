"""Calls both transports of the Open Inference Protocol with Triton's own clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc

COLUMNS = ("label", "score", "exit")


def answers(result: Any) -> dict[str, list[Any]]:
    labels = [label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")]
    return {"label": labels, "score": result.as_numpy("score").tolist(), "exit": result.as_numpy("exit").tolist()}


def over_http(client: Any, model: str, texts: Sequence[str], *, binary: bool = True, **options: Any) -> Any:
    tensor = tritonclient.http.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=binary)
    outputs = [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in COLUMNS]
    return client.infer(model, [tensor], outputs=outputs, **options)


def over_grpc(client: Any, model: str, texts: Sequence[str], **options: Any) -> Any:
    tensor = tritonclient.grpc.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_))
    return client.infer(model, [tensor], **options)


def refusal(infer: Any, *arguments: Any, **options: Any) -> Sequence[str]:
    try:
        infer(*arguments, **options)
    except (tritonclient.http.InferenceServerException, tritonclient.grpc.InferenceServerException) as error:
        return [str(error.status()), str(error.message())]
    return []


def refusals(infer: Any, client: Any, model: str, texts: Sequence[str]) -> dict[str, Sequence[str]]:
    return {
        "unknown_model": refusal(infer, client, "other", texts),
        "empty_text": refusal(infer, client, model, [""]),
        "no_time": refusal(infer, client, model, texts, timeout=1),
    }


def metadata_of_refusal(stub: Any, request: Any, **options: Any) -> list[Any]:
    """Returns status, details, and the trailing metadata."""
    try:
        stub.ModelInfer(request, **options)
    except grpc.RpcError as error:
        return [error.code().name, error.details(), dict(error.trailing_metadata())]
    return []


def only_labels(stub: Any, model: str, texts: Sequence[str]) -> Sequence[str]:
    """Requests one output, for a tensor whose texts are in the message itself."""
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    request.outputs.add(name="label")
    response = stub.ModelInfer(request)
    assert [output.name for output in response.outputs] == ["label"]
    return [label.decode() for label in tritonclient.grpc.InferResult(response).as_numpy("label")]


def health(client: Any, model: str) -> list[bool]:
    """Returns the health of the server, of the model, and of a missing model."""
    return [
        client.is_server_live(),
        client.is_server_ready(),
        client.is_model_ready(model),
        client.is_model_ready("other"),
    ]


def ask_http(address: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    with tritonclient.http.InferenceServerClient(address) as client:
        return {
            "health": health(client, model),
            "server": client.get_server_metadata(),
            "model": client.get_model_metadata(model),
            "json": answers(over_http(client, model, texts, binary=False)),
            "binary": answers(over_http(client, model, texts, request_id="r7")),
            **refusals(over_http, client, model, texts),
        }


def ask_grpc(address: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    with tritonclient.grpc.InferenceServerClient(address) as client, grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        result = over_grpc(client, model, texts, request_id="r7")
        response = result.get_response()
        nothing = service_pb2.ModelInferRequest(model_name=model)
        return {
            "health": health(client, model),
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(model, as_json=True),
            "answers": answers(result),
            "said": [response.id, response.model_name, response.model_version],
            "labels": only_labels(stub, model, texts),
            "check": channel.unary_unary("/grpc.health.v1.Health/Check")(b""),
            **refusals(over_grpc, client, model, texts),
            "too_long": refusal(over_grpc, client, model, ["pay " * 100]),
            "too_large": refusal(over_grpc, client, model, ["pay " * 6000]),
            "no_deadline_left": refusal(over_grpc, client, model, texts, client_timeout=1e-4),
            "nothing": metadata_of_refusal(stub, nothing, metadata=(("x-request-id", "r8"),)),
        }
