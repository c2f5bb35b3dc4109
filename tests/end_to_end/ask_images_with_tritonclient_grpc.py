"""Asks a server of images over gRPC with Triton's own client: files, pixels raw and in the message; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc


def infer(client: Any, array: npt.NDArray[Any], datatype: str) -> list[Any]:
    tensor = triton.InferInput("image", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return answer(client.infer("tiny", [tensor]))


def answer(result: Any) -> list[Any]:
    return [result.as_numpy("label")[0].decode(), *(result.as_numpy(name)[0].item() for name in ("score", "exit"))]


def typed(stub: Any, pixels: npt.NDArray[np.uint8]) -> list[Any]:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    tensor = request.inputs.add(name="image", datatype="UINT8", shape=pixels.shape)
    tensor.contents.uint_contents.extend(pixels.ravel().tolist())
    return answer(triton.InferResult(stub.ModelInfer(request)))


def main(address: str, folder: Path) -> dict[str, Any]:
    pixels = np.load(folder / "photo.npy")[None]
    with triton.InferenceServerClient(address) as client, grpc.insecure_channel(address) as channel:
        file = np.array([(folder / "photo.png").read_bytes()], dtype=np.object_)
        return {
            "inputs": client.get_model_metadata("tiny", as_json=True)["inputs"],
            "answers": {
                "png": infer(client, file, "BYTES"),
                "uint8": infer(client, pixels, "UINT8"),
                "fp32": infer(client, (pixels / 255).astype(np.float32), "FP32"),
                "typed": typed(service_pb2_grpc.GRPCInferenceServiceStub(channel), pixels),
            },
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201 # the test reads it
