"""Asks a server over the Open Inference Protocol with Triton's own client; prints what it got as JSON.

A process of its own, because the client brings gevent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tritonclient.http as triton


def infer(client: Any, model: str, texts: list[str], *, binary: bool, **options: Any) -> dict[str, list[Any]]:
    tensor = triton.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("label", "score", "exit")]
    result = client.infer(model, [tensor], outputs=outputs, **options)
    labels = [label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")]
    return {"label": labels, "score": result.as_numpy("score").tolist(), "exit": result.as_numpy("exit").tolist()}


def refusal(client: Any, model: str, texts: list[str], **options: Any) -> list[str]:
    try:
        infer(client, model, texts, binary=True, **options)
    except triton.InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return []


def main(address: str, model: str, texts: list[str]) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(model),
            "other_ready": client.is_model_ready("other"),
            "server": client.get_server_metadata(),
            "model": client.get_model_metadata(model),
            "json": infer(client, model, texts, binary=False),
            "binary": infer(client, model, texts, binary=True, request_id="r7"),
            "unknown_model": refusal(client, "other", texts),
            "empty_text": refusal(client, model, [""]),
            "no_time": refusal(client, model, texts, timeout=1),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))  # noqa: T201 # the test reads it
