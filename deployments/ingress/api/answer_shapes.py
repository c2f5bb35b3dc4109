"""What the routes answer, for the description; the routes write it themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Live(_Answer):
    """The process answers."""

    live: Literal[True]


class Ready(_Answer):
    """Whether every stage has been warm."""

    ready: bool


class V2Tensor(_Answer):
    """A tensor that is described, not sent."""

    name: str
    datatype: str
    shape: list[int]


class V2Model(_Answer):
    """A model's metadata."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[V2Tensor]
    outputs: list[V2Tensor]


class V2Server(_Answer):
    """The server's metadata."""

    name: str
    version: str
    extensions: list[str]
    models: list[str]


class BinaryTail(_Answer):
    """Of an output whose bytes follow the JSON."""

    binary_data_size: Annotated[int, Field(ge=0)]


class V2AnswerTensor(_Answer):
    """An output; `data`, or `parameters` that say how many bytes follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: BinaryTail | None = None


class V2Answer(_Answer):
    """The answer to `POST /v2/models/{model}/infer`."""

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[V2AnswerTensor]
