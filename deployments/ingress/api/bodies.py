"""Request bodies to checked requests, answers to response bodies; pure, and the only place that knows their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from deployments.ingress.api.tensors import packed, unpacked_texts
from earlyexit.errors import InputError, UnknownModelError
from earlyexit.store import ModelCard
from earlyexit.wire import Answer, label_of

T = TypeVar("T")
Text = Annotated[str, Field(min_length=1)]
TimeoutSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ONE, MANY = "one text", "list of texts"
OUTPUTS = {"label": "BYTES", "score": "FP32", "exit": "INT32"}
"""What a model answers in the Open Inference Protocol, with its datatypes."""
EXTENSIONS = ("binary_tensor_data", "parameters", "model_repository")
"""Of the protocol, by Triton's names."""


def _one_or_many(inputs: object) -> str | None:
    return ONE if isinstance(inputs, str) else MANY if isinstance(inputs, list) else None


Texts = Annotated[
    Annotated[Text, Tag(ONE)] | Annotated[list[Text], Field(min_length=1), Tag(MANY)],
    Discriminator(_one_or_many, custom_error_type="inputs", custom_error_message="a text or a list of texts is needed"),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredictBody(_Body):
    """`POST /predict`."""

    inputs: Texts
    """One text, or a list of texts."""
    truncate: bool = False
    """Cut texts that are too long for the model instead of refusing them."""
    timeout_s: TimeoutSeconds | None = None
    """Seconds after which an answer is worth nothing."""
    ids: list[str] | None = None
    """The caller's names of the inputs; the `recorded` exit policy looks its answers up by them."""


class PredictAnswer(_Body):
    """One answer of `POST /predict`."""

    label: str
    score: float
    """Probability of the label."""
    exit: int
    """The block it left after; the model's last block for inputs that no ramp let out."""


class PredictOne(PredictAnswer):
    """The answer to a single text."""

    request_id: str


class PredictMany(_Body):
    """The answer to a list of texts, in their order."""

    outputs: list[PredictAnswer]
    request_id: str


class ErrorDetail(_Body):
    """What went wrong."""

    kind: str
    message: str


class ErrorBody(_Body):
    """Every error outside /v2."""

    error: ErrorDetail
    request_id: str


class V2Error(_Body):
    """Every error in /v2."""

    error: str


class V2Input(BaseModel):
    """An input tensor of the Open Inference Protocol."""

    model_config = ConfigDict(extra="forbid")

    name: str
    shape: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=2)
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class V2Output(BaseModel):
    """A requested output tensor."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = {}


class V2Body(BaseModel):
    """`POST /v2/models/{model}/infer`."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    inputs: list[V2Input] = Field(min_length=1, max_length=1)
    outputs: list[V2Output] | None = None
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A checked request, whichever route it came by."""

    texts: tuple[str, ...]
    ids: tuple[str, ...]
    truncate: bool
    timeout_s: float | None
    request_id: str = ""
    """For the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Reply:
    """How a v2 caller wants its answer."""

    id: str | None
    outputs: tuple[str, ...]
    binary: frozenset[str]
    """Outputs to send as bytes behind the JSON (Triton's binary tensor extension)."""


_PREDICT = TypeAdapter(PredictBody)
_V2 = TypeAdapter(V2Body)


def parse_predict(body: bytes) -> tuple[InferRequest, bool]:
    """The request, and whether it was a list; raises InputError."""
    parsed = validated(_PREDICT, body)
    many = isinstance(parsed.inputs, list)
    texts = tuple(parsed.inputs) if isinstance(parsed.inputs, list) else (parsed.inputs,)
    if parsed.ids is not None and len(parsed.ids) != len(texts):
        raise InputError(f"ids: {len(parsed.ids)} for {len(texts)} inputs; one for every input is needed")
    ids = tuple(parsed.ids) if parsed.ids is not None else ("",) * len(texts)
    return InferRequest(texts=texts, ids=ids, truncate=parsed.truncate, timeout_s=parsed.timeout_s), many


def predict_response(answers: Sequence[Answer], labels: Sequence[str], request_id: str, *, many: bool) -> bytes:
    """JSON of a `/predict` answer."""
    outputs = [{"label": labels[label_of(a)], "score": round(a.score, 6), "exit": a.exit} for a in answers]
    return to_json({"outputs": outputs, "request_id": request_id} if many else outputs[0] | {"request_id": request_id})


def parse_v2(body: bytes, json_length: int | None) -> tuple[InferRequest, V2Reply]:
    """A v2 request, its tensor in the JSON or in bytes behind the first `json_length`; raises InputError."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise InputError(f"Inference-Header-Content-Length is {json_length}, the body has {len(body)} bytes")
    parsed = validated(_V2, body if json_length is None else body[:json_length])
    binary = b"" if json_length is None else body[json_length:]
    tensor = parsed.inputs[0]
    check_input(tensor.name, tensor.datatype)
    texts = _binary_texts(tensor, binary) if "binary_data_size" in tensor.parameters else _json_texts(tensor, binary)
    asked = None if parsed.outputs is None else [(each.name, each.parameters) for each in parsed.outputs]
    return v2_request(texts, tensor.shape, parsed.parameters), v2_reply(parsed.id, asked, parsed.parameters)


def check_model(card: ModelCard, name: str, version: str, served: str) -> None:
    """Raise UnknownModelError for what is not served."""
    if name != card.name:
        raise UnknownModelError(f"unknown model {name!r}; served is {card.name!r}")
    if version != served:
        raise UnknownModelError(f"unknown version {version!r} of {name!r}; served is {served!r}")


def check_input(name: str, datatype: str) -> None:
    """Raise InputError for a tensor that is not the model's input."""
    if name != "text":
        raise InputError(f"inputs.0.name: unknown input {name!r}; the model takes 'text'")
    if datatype != "BYTES":
        raise InputError(f"inputs.0.datatype: {datatype!r}; 'text' is BYTES")


def v2_request(texts: Sequence[str], shape: Sequence[int], parameters: Mapping[str, Any]) -> InferRequest:
    """The request of a v2 tensor and its parameters, however they came; raises InputError."""
    _check_texts(texts)
    _check_shape(shape, len(texts))
    return InferRequest(
        texts=tuple(texts),
        ids=_ids(parameters, len(texts)),
        truncate=_typed(parameters, "truncate", bool, default=False),
        timeout_s=_timeout_s(parameters),
    )


def v2_reply(
    echoed_id: str | None, asked: Sequence[tuple[str, Mapping[str, Any]]] | None, parameters: Mapping[str, Any]
) -> V2Reply:
    """How the answer is wanted: `asked` are outputs with their parameters, None for all; raises InputError."""
    if asked is None:
        asked = [(name, {}) for name in OUTPUTS]
    names = tuple(name for name, _ in asked)
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown or not names:
        raise InputError(f"outputs: unknown {unknown}; the model has {', '.join(OUTPUTS)}")
    all_binary = _typed(parameters, "binary_data_output", bool, default=False)
    binary = frozenset(name for name, each in asked if _typed(each, "binary_data", bool, default=all_binary))
    return V2Reply(id=echoed_id, outputs=names, binary=binary)


def v2_columns(answers: Sequence[Answer], labels: Sequence[str]) -> dict[str, list[Any]]:
    """The model's outputs, by name."""
    return {
        "label": [labels[label_of(answer)] for answer in answers],
        "score": [answer.score for answer in answers],
        "exit": [answer.exit for answer in answers],
    }


def v2_response(
    answers: Sequence[Answer], labels: Sequence[str], reply: V2Reply, model: str, version: str = "1"
) -> tuple[bytes, int | None]:
    """Body of a v2 answer, and the length of its JSON where bytes follow."""
    columns = v2_columns(answers, labels)
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name in reply.outputs:
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": [len(answers)]}
        if name in reply.binary:
            data = packed(OUTPUTS[name], columns[name])
            output["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            output["data"] = columns[name]
        outputs.append(output)
    head = {"model_name": model, "model_version": version, "outputs": outputs} | ({"id": reply.id} if reply.id else {})
    header = to_json(head)
    return (header + tail, len(header)) if tail else (header, None)


@cache
def server_version() -> str:
    """Offramp's."""
    from importlib.metadata import version

    return version("offramp")


def validated(adapter: TypeAdapter[T], body: bytes) -> T:
    """A body as its type has it; raises InputError that names the field."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise InputError("; ".join(_explained(error))) from error


def _explained(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return [f"the body is not valid JSON: {found[0]['ctx']['error']}"]
    return [f"{_path(each['loc']) or 'the body'}: {each['msg']}" for each in found[:3]]


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc if part not in (ONE, MANY))


def _json_texts(tensor: V2Input, binary: bytes) -> list[str]:
    if binary:
        raise InputError("bytes follow the JSON, but inputs.0.parameters has no binary_data_size")
    if tensor.data is None:
        raise InputError("inputs.0.data: missing")
    widths = {len(each) if isinstance(each, list) else None for each in tensor.data}
    if widths - {None} and tensor.shape != [len(tensor.data), *widths]:
        raise InputError(f"inputs.0.data: its nesting does not fit the shape {tensor.shape}")
    flat = [item for each in tensor.data for item in (each if isinstance(each, list) else [each])]
    for index, item in enumerate(flat):
        if not isinstance(item, str):
            raise InputError(f"inputs.0.data.{index}: a string is needed, not {type(item).__name__}")
    return flat


def _binary_texts(tensor: V2Input, binary: bytes) -> list[str]:
    size = tensor.parameters["binary_data_size"]
    if size != len(binary):
        raise InputError(f"inputs.0.parameters.binary_data_size is {size!r}, {len(binary)} bytes follow the JSON")
    return unpacked_texts(binary)


def _check_texts(texts: Sequence[str]) -> None:
    if not texts:
        raise InputError("inputs.0: no elements; at least one text is needed")
    for index, text in enumerate(texts):
        if not text:
            raise InputError(f"inputs.0: element {index} is empty")


def _check_shape(shape: Sequence[int], count: int) -> None:
    if shape not in ([count], [count, 1], [1, count]):
        raise InputError(
            f"inputs.0.shape: {list(shape)} does not fit {count} elements; [{count}] or [{count}, 1] would"
        )


def _ids(parameters: Mapping[str, Any], count: int) -> tuple[str, ...]:
    ids = parameters.get("ids")
    if ids is None:
        return ("",) * count
    if isinstance(ids, str):  # gRPC's parameters are no lists
        ids = _json_list(ids)
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(each, str) for each in ids):
        raise InputError(f"parameters.ids: a list of {count} strings is needed")
    return tuple(ids)


def _json_list(text: str) -> object:
    try:
        return from_json(text)
    except ValueError:
        return None


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    # Triton's request parameter counts microseconds; 0 means none.
    microseconds = _typed(parameters, "timeout", int, default=0)
    if microseconds < 0:
        raise InputError(f"parameters.timeout: {microseconds} microseconds; it must not be negative")
    try:
        return microseconds / 1e6 if microseconds else None
    except OverflowError:  # JSON's integers have no end; no service allows this one
        return math.inf


def _typed(parameters: Mapping[str, Any], name: str, kind: type[T], *, default: T) -> T:
    value = parameters.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"parameters.{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value
