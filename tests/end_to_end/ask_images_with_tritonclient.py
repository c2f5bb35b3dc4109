"""Asks about images over both transports of the Open Inference Protocol with Triton's own clients; prints JSON.

Arguments: both addresses, the model, and files of the same pixels, in several formats by name: `0.jpg`, `0.png`, ...
For each way in: labels, scores and exits, in the order of the names.
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from tritonclient.grpc import service_pb2, service_pb2_grpc


def infer(module: Any, client: Any, model: str, values: Any, datatype: str) -> list[list[Any]]:
    tensor = module.InferInput("image", list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return answers(client.infer(model, [tensor]))


def answers(result: Any) -> list[list[Any]]:
    labels = [label.decode() for label in result.as_numpy("label")]
    return [labels, result.as_numpy("score").tolist(), result.as_numpy("exit").tolist()]


def typed(address: str, model: str, pixels: Any) -> list[list[Any]]:
    """Numbers in the message itself."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="UINT8", shape=pixels.shape).contents.uint_contents.extend(
        pixels.ravel().tolist()
    )
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return answers(tritonclient.grpc.InferResult(stub.ModelInfer(request)))


def main(http: str, grpc_address: str, model: str, paths: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ending in ("jpg", "png"):
        contents = [Path(path).read_bytes() for path in sorted(paths) if path.endswith(ending)]
        files = np.array(contents, dtype=np.object_)
        pixels = np.stack([np.asarray(Image.open(BytesIO(content))) for content in contents])
        values = {
            f"{ending} files": (files, "BYTES"),
            f"{ending} uint8": (pixels, "UINT8"),
            f"{ending} fp32": ((pixels / 255).astype(np.float32), "FP32"),
        }
        for module, address in ((tritonclient.http, http), (tritonclient.grpc, grpc_address)):
            with module.InferenceServerClient(address) as client:
                for name, (array, datatype) in values.items():
                    found[f"{module.__name__} {name}"] = infer(module, client, model, array, datatype)
        found[f"{ending} typed"] = typed(grpc_address, model, pixels)
    with tritonclient.grpc.InferenceServerClient(grpc_address) as client:
        return {"answers": found, "inputs": client.get_model_metadata(model, as_json=True)["inputs"]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])))  # noqa: T201 # the test reads it
