"""Messages between ingress and replicas as msgpack: typed on both sides, and nothing in them can run code."""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np

import earlyexit.errors
from deployments.messages import Chunk, StageCall
from earlyexit.errors import OfframpError, PlanError

RAW = 0
"""Code of the extension that is an array's memory."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A call begins."""

    serial: int
    """Names the call on its connection."""
    call: StageCall


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody waits for a call any more."""

    serial: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Sequences are over: whatever the replica keeps of them is free."""

    sequences: tuple[int, ...]


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A part of a call's reply; the one that settles the last of its inputs ends it."""

    serial: int
    chunk: Chunk


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A call that the replica could not begin."""

    serial: int
    reason: str


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW, raw)
    if isinstance(value, OfframpError):
        return type(value).__name__, str(value), getattr(value, "retry_after_s", None)
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def _decode_raw(code: int, raw: memoryview) -> memoryview:
    """In the frame, where bytes would be copied out of it."""
    if code != RAW:
        raise ValueError(f"there is no extension {code}")
    return raw


def _decode_other(type_: type, value: Any) -> object:
    if (get_origin(type_) or type_) is np.ndarray:
        dtype, shape, raw = value
        return np.frombuffer(raw, dtype=dtype).reshape(shape)
    name, message, retry_after_s = value
    error: type[OfframpError] | None = getattr(earlyexit.errors, name, None)
    if error is None:
        raise ValueError(f"there is no {name}")
    return error(message) if retry_after_s is None else error(message, retry_after_s=retry_after_s)  # type: ignore[call-arg] # those that have one take one


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_FROM_INGRESS = msgspec.msgpack.Decoder(Begin | Forget | End, dec_hook=_decode_other, ext_hook=_decode_raw)
_FROM_REPLICA = msgspec.msgpack.Decoder(Part | Refused, dec_hook=_decode_other, ext_hook=_decode_raw)

MalformedError = msgspec.MsgspecError


def encode(message: Begin | Forget | End | Part | Refused) -> bytes:
    """A message's bytes; arrays are copied into them."""
    return _ENCODER.encode(message)


def from_ingress(frame: bytes | memoryview) -> Begin | Forget | End:
    """What an ingress said; arrays cannot be written to. Raises MalformedError."""
    try:
        message: Begin | Forget | End = _FROM_INGRESS.decode(frame)
    except PlanError as error:  # what a stage or a split says of itself
        raise MalformedError(str(error)) from error
    return message


def from_replica(frame: bytes | memoryview) -> Part | Refused:
    """What a replica said; arrays cannot be written to. Raises MalformedError."""
    message: Part | Refused = _FROM_REPLICA.decode(frame)
    return message
