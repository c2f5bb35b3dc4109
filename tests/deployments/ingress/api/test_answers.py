from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from deployments.api.bodies import V2Reply
from deployments.api.grpc.calls import infer_response
from deployments.api.responses import predict_response, v2_response
from earlyexit.network.wire import Answer
from tests.deployments.ingress.api.signatures import TASK
from tests.deployments.ingress.api.v2_requests import packed

ANSWERS = (
    Answer(sample_id="#1.0", value=0, score=0.75, exit=2),
    Answer(sample_id="#2.0", value=1, score=0.5, exit=11),
)


# /predict, out


def test_the_answer_to_a_text_is_flat() -> None:
    answer = json.loads(predict_response(ANSWERS[:1], TASK, "r1", many=False))
    assert answer == {"label": "bill", "score": 0.75, "exit": 2, "request_id": "r1"}


def test_the_answer_to_a_list_keeps_its_order() -> None:
    answer = json.loads(predict_response(ANSWERS, TASK, "r1", many=True))
    assert answer == {
        "outputs": [{"label": "bill", "score": 0.75, "exit": 2}, {"label": "café", "score": 0.5, "exit": 11}],
        "request_id": "r1",
    }


# /v2, out


def reply_of(*outputs: str, binary: Sequence[str] = (), reply_id: str | None = None) -> V2Reply:
    return V2Reply(id=reply_id, outputs=outputs, binary=frozenset(binary))


def test_a_v2_answer_in_json_has_one_tensor_per_output_asked_for() -> None:
    body, json_length = v2_response(ANSWERS, TASK, reply_of("exit", "label", reply_id="r7"), "intents")
    assert json_length is None
    assert json.loads(body) == {
        "model_name": "intents",
        "model_version": "1",
        "id": "r7",
        "outputs": [
            {"name": "exit", "datatype": "INT32", "shape": [2], "data": [2, 11]},
            {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["bill", "café"]},
        ],
    }


def test_a_v2_answer_without_a_callers_id_has_none() -> None:
    body, _ = v2_response(ANSWERS, TASK, reply_of("exit"), "intents")
    assert "id" not in json.loads(body)


def test_a_v2_answer_in_bytes_has_its_tensors_behind_the_json_in_their_order() -> None:
    reply = reply_of("score", "label", "exit", binary=("score", "label", "exit"))
    body, json_length = v2_response(ANSWERS, TASK, reply, "intents")
    assert json_length is not None
    assert [output["parameters"]["binary_data_size"] for output in json.loads(body[:json_length])["outputs"]] == [
        8,
        17,
        8,
    ]
    assert body[json_length:] == struct.pack("<2f", 0.75, 0.5) + packed(b"bill", "café".encode()) + struct.pack(
        "<2i", 2, 11
    )


def test_a_v2_answer_may_mix_json_and_bytes() -> None:
    body, json_length = v2_response(ANSWERS, TASK, reply_of("label", "exit", binary=("exit",)), "intents")
    label, leaves = json.loads(body[:json_length])["outputs"]
    assert label["data"] == ["bill", "café"]
    assert "data" not in leaves
    assert body[json_length:] == struct.pack("<2i", 2, 11)


def test_the_answer_to_an_rpc_is_tensors_of_bytes() -> None:
    response = infer_response(ANSWERS, TASK, reply_of("exit", "label", "score", reply_id="r7"), "intents", "1")
    assert (response.id, response.model_name, response.model_version) == ("r7", "intents", "1")
    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("exit", "INT32", [2]),
        ("label", "BYTES", [2]),
        ("score", "FP32", [2]),
    ]
    assert list(response.raw_output_contents) == [
        struct.pack("<ii", 2, 11),
        packed(b"bill", "café".encode()),
        struct.pack("<ff", 0.75, 0.5),
    ]
