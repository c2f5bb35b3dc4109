"""Answers to response bodies; pure. gRPC's messages have the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from pydantic_core import to_json

from deployments.ingress.api.bodies import V2Reply
from deployments.ingress.api.signature import EXIT
from deployments.ingress.api.tensors import packed
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.wire import Answer


def predict_response(answers: Sequence[Answer], task: Task, request_id: str, *, many: bool) -> bytes:
    """JSON of a `/predict` answer."""
    outputs = [{**task.to_json(answer.value, answer.score), EXIT.name: answer.exit} for answer in answers]
    return to_json({"outputs": outputs, "request_id": request_id} if many else outputs[0] | {"request_id": request_id})


def v2_columns(answers: Sequence[Answer], task: Task) -> dict[str, tuple[str, list[int], list[Any] | ValueArray]]:
    """The model's outputs by name: datatype, shape, elements."""
    said = task.to_columns([answer.value for answer in answers], [answer.score for answer in answers])
    columns = {column.name: (column.datatype, said[column.name]) for column in task.columns}
    columns[EXIT.name] = (EXIT.datatype, [answer.exit for answer in answers])
    return {
        name: (datatype, list(column.shape) if isinstance(column, np.ndarray) else [len(answers)], column)
        for name, (datatype, column) in columns.items()
    }


def v2_response(
    answers: Sequence[Answer], task: Task, reply: V2Reply, model: str, version: str = "1"
) -> tuple[bytes, int | None]:
    """Body of a v2 answer, and the length of its JSON where bytes follow."""
    columns = v2_columns(answers, task)
    outputs: list[bytes] = []
    tail: list[bytes] = []
    for name in reply.outputs:
        datatype, shape, column = columns[name]
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if name in reply.binary:
            data = packed(datatype, column)
            outputs.append(to_json(output | {"parameters": {"binary_data_size": len(data)}}))
            tail.append(data)
        else:
            outputs.append(_with_member(to_json(output), b"data", _elements(column)))
    head = {"model_name": model, "model_version": version} | ({"id": reply.id} if reply.id else {})
    header = _with_member(to_json(head), b"outputs", b"[%b]" % b",".join(outputs))
    return (b"".join((header, *tail)), len(header)) if tail else (header, None)


def _with_member(object_: bytes, name: bytes, value: bytes) -> bytes:
    """An object of JSON, not empty, with one more member."""
    return b'%b,"%b":%b}' % (object_[:-1], name, value)


def _elements(column: list[Any] | ValueArray) -> bytes:
    """In JSON, one after the other; of large rows one by one, so that other threads get their turn between them."""
    if not isinstance(column, np.ndarray):
        return to_json(column)
    return b"[%b]" % b",".join(msgspec.json.encode(row.ravel().tolist())[1:-1] for row in column)
