"""The protocol between clients and server: bodies, tensors, answers, errors and retries. It uses no HTTP library."""

from __future__ import annotations

import binascii
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError, create_model
from pydantic_core import from_json

from deployments.api.operations import OPENAI_CODES, new_id, path_of
from deployments.api.v2 import pack_elements, unpack_elements
from earlyexit import errors
from earlyexit.clock import Clock
from earlyexit.errors import (
    DeadlineError,
    InputError,
    OfframpError,
    RateLimitError,
    RetryableError,
    first_mistake,
    raising,
)
from earlyexit.network.boundary import DATATYPES, cast_column

T = TypeVar("T")
REQUEST_ID_HEADER = "X-Request-ID"
JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
"""The length of the JSON in a v2 message with binary tensors, which follow it."""
REPLY_HEADERS = ("retry-after", JSON_LENGTH_HEADER.lower(), "location")
"""The headers of a response that `read_reply` reads, in lower case."""

FIRST_BACKOFF_S = 0.1
"""About the time after which a full queue has room again."""
LONGEST_BACKOFF_S = 2.0
"""About the time after which a failed replica is replaced."""

_ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, OfframpError)]
ERRORS_BY_KIND = {each.kind: each for each in _ERRORS}
_ERRORS_BY_STATUS = {each.http_status: each for each in reversed(_ERRORS) if each is not RetryableError}
"""The first error of the tree with a status, for answers that name no error."""
_KIND_OF_CODE = {code: kind for kind, code in OPENAI_CODES.items()}
adapter = cache(TypeAdapter[Any])
"""Returns pydantic's adapter of a type."""
shape: Any = partial(create_model, "Object")
"""Returns the type of a JSON object; takes the type of each field that is read, or the type and the default."""
_ROW: Any = shape(exit=Annotated[int, Field(ge=0, lt=2**31)], score=(float, 0.0))
_TENSOR: Any = shape(name=str, datatype=str, shape=list[int], data=Any)


class NoServerError(OfframpError):
    """The server cannot be reached, or a proxy answers in its place."""


class Prediction(SimpleNamespace):
    """The answer to one input, with the values of the model's task as attributes, such as `label` and `score`.

    Large values are arrays: `class_map`, uint8 (height, width), and `keypoints`, float32 (J, 3).
    """

    exit: int
    """The block after which the input left, counted from 0."""
    request_id: str
    label: str
    score: float
    """The confidence of the exit; for labels, the label's probability."""

    @property
    def task_values(self) -> dict[str, Any]:
        """The values of the model's task."""
        return {name: value for name, value in vars(self).items() if name not in ("exit", "request_id")}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model's answers have no {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prediction) or vars(self).keys() != vars(other).keys():
            return False
        return all(np.array_equal(value, vars(other)[name]) for name, value in vars(self).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no answer."""

    error: OfframpError
    """The error that a client raises."""
    kind: str
    """The server's name of the error, or `http_` and the status if it has none; `connection` or `timeout`."""
    is_transient: bool = False
    """Whether a retry may succeed."""


Outcome: TypeAlias = Any
"""A `Failure`, or the payload of an answer: its JSON, or its text if it is not JSON."""
Send: TypeAlias = Callable[[float], Awaitable[Outcome]]
Sleep: TypeAlias = Callable[[float], object]
"""A function that waits for some seconds, or returns an awaitable that does."""


def read_reply(status: int, content: bytes, headers: Mapping[str, str]) -> Outcome:
    """Returns the outcome of a request with this response, by its `REPLY_HEADERS`. A redirect is a failure."""
    retry_after, json_length, location = map(headers.get, REPLY_HEADERS)
    if location and 300 <= status < 400:
        return failure_of(status, f"redirect to {location}")
    try:
        length = len(content) if json_length is None else int(json_length)
        payload = from_json(content[:length])
        payload = payload if json_length is None else attach_tensors(payload, memoryview(content)[length:])
    except (InputError, KeyError, TypeError, ValueError):
        payload = content.decode(errors="replace")
    return payload if 200 <= status < 300 else failure_of(status, payload, retry_after)


def failure_of(status: int, payload: Any, retry_after: str | None = None) -> Failure:
    """Returns the failure that a response reports. A `Retry-After` that is a date is ignored."""
    retry_after_s = None
    with suppress(ValueError):
        retry_after_s = max(0.0, float(retry_after)) if retry_after else None
    # Serve's proxy answers in plain text: 500 without an ingress, 404 while a service starts or stops.
    is_of_serve = not isinstance(payload, dict) and (status == 500 or "/-/routes for" in str(payload))
    is_of_proxy = is_of_serve or status == HTTPStatus.BAD_GATEWAY
    kind, message = _kind_and_message(status, payload)
    by_status = _ERRORS_BY_STATUS.get(status, InputError if 400 <= status < 500 else OfframpError)
    error_type: type[OfframpError] = NoServerError if is_of_proxy else ERRORS_BY_KIND.get(kind, by_status)
    is_retryable = issubclass(error_type, RetryableError)
    is_rate_limited = status == RateLimitError.http_status and retry_after_s is not None
    return Failure(
        error=error_type(message, **({"retry_after_s": retry_after_s or 0.0} if is_retryable else {})),
        kind=kind or f"http_{status}",
        # After a 504 the deadline has passed.
        is_transient=is_of_proxy or is_rate_limited or status == HTTPStatus.SERVICE_UNAVAILABLE,
    )


def connection_failure(message: str) -> Failure:
    """Returns the failure of a request whose connection broke or was never made."""
    return Failure(error=NoServerError(message), kind="connection", is_transient=True)


def _kind_and_message(status: int, payload: Any) -> tuple[str, str]:
    match payload:
        case {"error": {"kind": str(kind), "message": str(message)}}:
            return kind, message
        case {"error": {"code": code, "message": str(message)}}:  # below /v1, in OpenAI's format
            return _KIND_OF_CODE.get(str(code), str(code)), message
        case {"error": str(message)}:  # below /v2
            return "", message
    return "", f"HTTP {status} from the server: {payload!s:.200}"


@contextmanager
def reading(answer: object, address: object, kind: Any = dict, *, of: str = "Offramp") -> Iterator[Any]:
    """Yields an answer as a value of this kind; raises OfframpError if it is none, or if the block cannot read it.

    The message has the address, the beginning of the answer, and the first mistake. `of`: the kind of server.
    """
    try:
        yield adapter(kind).validate_python(answer, strict=True)
    except (OverflowError, TypeError, ValueError) as error:
        why = first_mistake(error, "the answer") if isinstance(error, ValidationError) else error
        raise OfframpError(f"{address} does not answer as {of} does: {answer!r:.200}; {why}") from error


def read_predictions(payload: Any, *, num_inputs: int, request_id: str, address: object) -> list[Prediction]:
    """Returns the predictions in an answer of `/predict` or v2; raises OfframpError unless there are `num_inputs`."""
    with reading(payload, address) as answer:
        rows = answer.get("outputs", [answer])
        if "model_name" in answer:  # of v2: a tensor for each value
            columns = {each.name: _column(each) for each in adapter(list[_TENSOR]).validate_python(rows, strict=True)}
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        adapter(list[_ROW]).validate_python(rows, strict=True)
        answered_id = str(answer.get("request_id", request_id))
        predictions = [Prediction(**row | {"request_id": answered_id}) for row in rows]
        if [bool(each.task_values) for each in predictions] != [True] * num_inputs:
            raise ValueError(f"not one answer for each of {num_inputs} inputs")
    return predictions


async def send_with_retries(
    send: Send, timeout_s: float, max_attempts: int, *, clock: Clock, rng: random.Random, sleep: Sleep
) -> tuple[Outcome, int]:
    """Calls `send` with the seconds that are left until a retry cannot help; returns the outcome and the attempts.

    The wait before a retry is `pause_s`. It never exceeds the time that is left.
    """
    until_s, left_s, attempt = clock.now_s() + timeout_s, timeout_s, 0
    while True:
        attempt += 1
        late = DeadlineError("the timeout had passed before the client could send")
        outcome = await send(left_s) if left_s > 0 else Failure(error=late, kind="timeout")
        if not isinstance(outcome, Failure) or not outcome.is_transient or attempt >= max_attempts:
            return outcome, attempt
        wait_s = pause_s(outcome.error, attempt, rng)
        if wait_s >= until_s - clock.now_s():
            return outcome, attempt
        await resolve(sleep(wait_s))
        left_s = until_s - clock.now_s()


def pause_s(error: OfframpError, attempt: int, rng: random.Random) -> float:
    """Returns the seconds to wait after a failed attempt; the first attempt is number 1.

    It is `Retry-After` plus a random share, so that clients spread, of a backoff that doubles with each attempt.
    """
    retry_after_s = error.retry_after_s if isinstance(error, RetryableError) else 0.0
    return retry_after_s + rng.random() * min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))


async def resolve(result: Awaitable[T] | T) -> T:
    """Returns a result of httpx or of `sleep`, after awaiting it if the client is asynchronous."""
    return await result if isinstance(result, Awaitable) else result


def key_header(api_key: str | None, name: str = "API key") -> dict[str, str]:
    """Returns the header with a key; raises InputError, with the key's name, if a header cannot hold it."""
    return {} if api_key is None else {"Authorization": f"Bearer {_header_value(api_key, name)}"}


def _header_value(value: str, name: str) -> str:
    """Returns a value for a header; raises InputError, which does not quote the value, if a header cannot hold it."""
    if not value.isascii() or not value.isprintable() or not value.strip():
        raise InputError(f"the {name} is empty or has characters that an HTTP header cannot hold")
    return value


def split_address(url: str) -> SplitResult:
    """Returns the parts of a server's address; raises InputError."""
    with suppress(ValueError):  # an invalid port, bracket or character
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # checks the labels as a DNS lookup does
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        if is_address and url.isprintable():
            return parts
    raise InputError(f"the server's address must be like http://host:port or https://host, not {url!r}")


Array: TypeAlias = npt.NDArray[Any]
Input: TypeAlias = str | tuple[str, str] | bytes | Path | Array | Mapping[str, Array]
"""A text, a pair of texts, an image file or its path, an array, or arrays by the names of the model's inputs."""

DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an operation of the API, which may be sent several times."""

    operation: str
    body: dict[str, Any] | None = None
    _: KW_ONLY
    tail: bytes = b""
    """The tensors of `POST /v2/models/{model}/infer` as bytes, which follow the JSON."""
    named: Mapping[str, str] = field(default_factory=dict)
    """The parameters of the operation's path."""
    request_id: str = field(default_factory=new_id)
    sends_timeout: bool = False
    """Whether the body contains the timeout."""
    streams: bool = False
    """Whether the answer is streamed. The outcome is then the open response, if it succeeds."""

    @property
    def path(self) -> str:
        return path_of(self.operation, **{name: quote(each, "", errors="replace") for name, each in self.named.items()})

    def content(self, timeout_s: float) -> tuple[bytes, dict[str, str]]:
        """Returns the bytes of the body, and the headers; raises InputError for texts that cannot be sent."""
        body, headers = self.body, {REQUEST_ID_HEADER: _header_value(self.request_id, "request id")}
        if body is None:
            return b"", headers
        if self.operation == "infer":  # the timeout is in microseconds, as in Triton
            body = body | {"parameters": body["parameters"] | {"timeout": max(1, int(timeout_s * 1e6))}}
        elif self.sends_timeout:
            body = body | {"timeout_s": timeout_s}
        # Numpy's numbers, or an argument that was not UTF-8.
        with raising(InputError, "the request cannot be sent as JSON", TypeError, UnicodeEncodeError):
            head = json.dumps(body, ensure_ascii=False).encode()
        if self.operation != "infer":
            return head, headers | {"Content-Type": "application/json"}
        types = {"Content-Type": "application/octet-stream", JSON_LENGTH_HEADER: str(len(head))}
        return head + self.tail, headers | types


def predict_request(
    rows: Sequence[Input],
    metadata: Mapping[str, Any],
    *,
    many: bool,
    request_id: str | None = None,
    truncate: bool = False,
    ids: Sequence[str] | None = None,
    in_words: bool = False,
) -> Request:
    """Returns a request for predictions: of texts in JSON, and of all other inputs as tensors.

    `metadata`: the model's, which texts do not need. `many`: False for a single input, whose answer is then no list.
    `in_words`: whether image files are sent in base64 if answers are large; their answers are then JSON too. Raises
    InputError for inputs of several kinds.
    """
    options: dict[str, Any] = {"truncate": True} if truncate else {}
    if ids is not None:
        options["ids"] = list(ids)
    contents: Sequence[object] = rows
    if not are_texts(rows):
        are_files = all(isinstance(row, bytes | Path) for row in rows)
        if not (in_words and are_files and any(map(_is_large, metadata["outputs"]))):
            return _tensor_request(rows, metadata, options, request_id or new_id())
        contents = [binascii.b2a_base64(_file(row), newline=False).decode() for row in rows]
    # A pair is sent in a list, because alone it would be two texts for a model of texts.
    body = {"inputs": contents[0] if not many and isinstance(contents[0], str) else list(contents), **options}
    return Request("predict", body, request_id=request_id or new_id(), sends_timeout=True)


def are_texts(rows: Sequence[Input]) -> bool:
    """Returns whether the inputs are texts or pairs of texts."""
    return all(
        isinstance(row, str) or (isinstance(row, tuple | list) and all(isinstance(each, str) for each in row))
        for row in rows
    )


def _tensor_request(
    rows: Sequence[Input], metadata: Mapping[str, Any], parameters: Mapping[str, Any], request_id: str
) -> Request:
    """Returns a v2 request for images or arrays. Large outputs are requested as bytes."""
    inputs, tails = [], []
    for name, (datatype, column) in _columns(rows, metadata["inputs"]).items():
        tail = pack_elements(datatype, column)
        sized = {"binary_data_size": len(tail)}
        inputs.append({"name": name, "shape": list(column.shape), "datatype": datatype, "parameters": sized})
        tails.append(tail)
    body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    outputs = metadata["outputs"]
    if any(map(_is_large, outputs)):
        body["outputs"] = [{"name": each["name"], "parameters": {"binary_data": _is_large(each)}} for each in outputs]
    named = {"model": metadata["name"]}
    return Request("infer", body, tail=b"".join(tails), named=named, request_id=request_id, sends_timeout=True)


def _is_large(output: Mapping[str, Any]) -> bool:
    """Returns whether an output has many numbers per input, such as class maps and keypoints."""
    return len(output.get("shape", ())) > 1


def inputs_of(columns: Mapping[str, Array]) -> Sequence[Input]:
    """Returns the rows of a data set as inputs."""
    rows = list(zip(*columns.values(), strict=True))
    if len(columns) == 1:
        return [row[0] for row in rows]
    if all(column.dtype == object for column in columns.values()):
        return rows
    return [dict(zip(columns, row, strict=True)) for row in rows]


def attach_tensors(head: Any, tail: memoryview) -> Any:
    """Adds the binary tensors of a v2 answer to its JSON `head`, and returns it.

    An invalid answer raises InputError, KeyError, TypeError or ValueError.
    """
    at = 0
    for output in head["outputs"]:
        if "data" not in output:
            size = output["parameters"]["binary_data_size"]
            output["data"] = unpack_elements(output["datatype"], tail[at : at + size], output["name"])
            at += size
    return head


def _column(tensor: Any) -> Sequence[Any]:
    """Returns the values of a tensor, one per input; large ones are arrays."""
    data, dtype = tensor.data, DATATYPES.get(tensor.datatype) if len(tensor.shape) > 1 else None
    if tensor.datatype == "BYTES":
        data = [each.decode() if isinstance(each, bytes) else each for each in data]
    column = np.array(data, dtype=dtype).reshape(tensor.shape)
    return list(column) if column.ndim > 1 else column.tolist()


def _columns(rows: Sequence[Any], inputs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, Array]]:
    datatypes = {each["name"]: each["datatype"] for each in inputs}
    if all(isinstance(row, bytes | Path) for row in rows):
        return {_only(datatypes): ("BYTES", np.array([_file(row) for row in rows], dtype=object))}
    if all(isinstance(row, np.ndarray | np.generic) for row in rows):
        rows = [{_only(datatypes): row} for row in rows]
    if not all(isinstance(row, Mapping) for row in rows):
        raise InputError("the inputs of a request must be of one kind: texts, pairs of texts, image files or arrays")
    if any(row.keys() != datatypes.keys() for row in rows):
        raise InputError(f"every input needs the model's columns, and no others: {', '.join(datatypes)}")
    return {name: _stacked([row[name] for row in rows], kind) for name, kind in datatypes.items()}


def _only(datatypes: Mapping[str, str]) -> str:
    if len(datatypes) != 1:
        raise InputError(f"the model takes {', '.join(datatypes)}: give a mapping from these names to arrays")
    [name] = datatypes
    return name


def _stacked(rows: Sequence[Any], datatype: str) -> tuple[str, Array]:
    """Returns rows as one array, converted to the model's datatype unless that is BYTES."""
    # Unequal shapes, numbers that do not fit, tensors that are not in the host's memory, or an unknown datatype.
    with raising(InputError, f"the model takes {datatype} arrays of one shape", KeyError, TypeError, ValueError):
        column = np.stack([np.asarray(row) for row in rows])
        if datatype != "BYTES":
            return datatype, cast_column(column, datatype)
    column = column.astype(np.float32) if column.dtype == np.float64 else column
    if column.dtype not in DATATYPE_OF or column.dtype == object:
        raise InputError(f"an array of {column.dtype.name} cannot be sent")
    return DATATYPE_OF[column.dtype], column


def _file(row: Input) -> bytes:
    if isinstance(row, bytes):
        return row
    assert isinstance(row, Path)
    with raising(InputError, f"{row}", OSError):
        return row.read_bytes()
