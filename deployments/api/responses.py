"""Writes answers as response bodies, negotiates their type, and compresses them; gRPC has the same columns."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.bodies import V2Reply
from deployments.api.parsing import EXIT, packed
from earlyexit.network.boundary import Answer, Numbers
from earlyexit.tasks.base import Task, ValueArray

ANYTHING = "*/*"
GZIP = "gzip"
LEAST_BYTES = 1_500
"""Smaller answers fit into one packet, and are not compressed."""


def preferred(accept: str, offered: Sequence[str]) -> str | None:
    """Returns the content type that the caller prefers (RFC 9110, section 12.5.1), the first of several; None for none.

    The weight of a type is that of the most specific range that includes it. Malformed ranges are ignored.
    """
    ranges = _weights(accept)
    if not ranges:
        return offered[0] if not accept.strip() else None
    weights = [
        _weight(ranges, (content_type, f"{content_type.partition('/')[0]}/*", ANYTHING)) for content_type in offered
    ]
    best = max(weights)
    return offered[weights.index(best)] if best > 0 else None


def takes_gzip(accept_encoding: str) -> bool:
    """Returns whether an Accept-Encoding header accepts gzip."""
    return _weight(_weights(accept_encoding), (GZIP, "*")) > 0


def _weights(header: str) -> dict[str, float]:
    """Returns the weights by range, in lower case and without parameters."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        if name and (number := _number(weight)) is not None:
            weights[name] = number
    return weights


def _weight(weights: dict[str, float], names: Sequence[str]) -> float:
    return next((weights[name] for name in names if name in weights), 0.0)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


T = TypeVar("T")
LARGE_ANSWERS_BYTES = 200_000
"""Larger answers of a request are written in a thread: five class maps of 180 x 240 take 2 to 4 ms as JSON."""
LARGE_BODY_BYTES = 500_000
"""Larger bodies are compressed in a thread, in 1 to 3 ms."""
LEVEL = 1
"""Level of zlib: a class map of CamVid in JSON shrinks to 4.4 % in 0.15 ms, at level 6 to 2.5 % in 0.58 ms."""


async def formed(make: Callable[[], T], answers: Sequence[Answer]) -> T:
    """Calls `make`, in a thread if the answers are large."""
    size = sum(len(answer.value.raw) for answer in answers if isinstance(answer.value, Numbers))
    return make() if size < LARGE_ANSWERS_BYTES else await asyncio.to_thread(make)


def is_large(response: Response) -> bool:
    """Returns whether compression would help; streams have no body yet."""
    return len(getattr(response, "body", b"")) >= LEAST_BYTES


async def compress(request: Request, response: Response) -> None:
    """Compresses a large response if the caller accepts gzip.

    Pictures, which are compressed already, and responses with an ETag stay as they are.
    """
    body, headers = bytes(response.body), response.headers
    if "etag" in headers or headers.get("content-type", "").startswith("image/"):
        return
    headers.add_vary_header("Accept-Encoding")
    if not takes_gzip(", ".join(request.headers.getlist("accept-encoding"))):
        return
    response.body = _gzip(body) if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(_gzip, body)
    headers["content-encoding"] = GZIP
    headers["content-length"] = str(len(response.body))


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, LEVEL, mtime=0)


def predict_response(answers: Sequence[Answer], task: Task, request_id: str, *, many: bool) -> bytes:
    """Returns the JSON of a `/predict` answer."""
    outputs = [{**task.to_json(answer.value, answer.score), EXIT.name: answer.exit} for answer in answers]
    return to_json({"outputs": outputs, "request_id": request_id} if many else outputs[0] | {"request_id": request_id})


def v2_columns(answers: Sequence[Answer], task: Task) -> dict[str, tuple[str, list[int], list[Any] | ValueArray]]:
    """Returns the model's outputs by name: datatype, shape and elements."""
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
    """Returns the body of a v2 answer, and the length of its JSON if bytes follow."""
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
    """Appends a member to a JSON object that is not empty."""
    return b'%b,"%b":%b}' % (object_[:-1], name, value)


def _elements(column: list[Any] | ValueArray) -> bytes:
    """Returns a column as JSON; rows of arrays are written one by one, so that other threads can run in between."""
    if not isinstance(column, np.ndarray):
        return to_json(column)
    return b"[%b]" % b",".join(msgspec.json.encode(row.ravel().tolist())[1:-1] for row in column)
