"""Asks about images over both transports of the Open Inference Protocol with Triton's own clients.

Prints, for each way in, label and exit of the images given (files whose pixels are the same) as JSON.
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from PIL import Image


def infer(module: Any, client: Any, model: str, values: Any, datatype: str) -> list[Any]:
    tensor = module.InferInput("image", list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    result = client.infer(model, [tensor])
    return [[label.decode() for label in result.as_numpy("label")], result.as_numpy("exit").tolist()]


def main(http: str, grpc: str, model: str, paths: list[str]) -> dict[str, Any]:
    contents = [Path(path).read_bytes() for path in paths]
    files = np.empty(len(paths), dtype=np.object_)
    files[:] = contents
    pixels = np.stack([np.asarray(Image.open(BytesIO(content))) for content in contents])
    answers = {}
    for module, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
        with module.InferenceServerClient(address) as client:
            answers[f"{module.__name__} files"] = infer(module, client, model, files, "BYTES")
            answers[f"{module.__name__} pixels"] = infer(module, client, model, pixels, "UINT8")
    return answers


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])))  # noqa: T201 # the test reads it
