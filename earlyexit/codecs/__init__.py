"""Codecs: from a request's rows to what a network takes; `base.py` holds the contract, one file per kind beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.errors import ModelFolderError
from earlyexit.named import NamedSpec, make_named

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec

# Name -> where its Codec is. A codec is one file beside this one and one line here.
CODECS = {
    "text": "earlyexit.codecs.text:TextCodec",
    "text_pair": "earlyexit.codecs.text:TextPairCodec",
    "image": "earlyexit.codecs.image:ImageCodec",
    "tensor": "earlyexit.codecs.tensor:TensorCodec",
    "prompt": "earlyexit.codecs.prompt:PromptCodec",
    "chain": "earlyexit.codecs.chain:ChainCodec",
}


def find_codec(spec: NamedSpec, folder: Path) -> Codec[Any]:
    """Returns the codec that a card names, `{"name": "text", "max_length": 128}`, or a user's own, `module:function`.

    `folder` is the model's. Raises ModelFolderError for unknown names, settings that do not fit, and missing files.
    """
    codec = make_codec(spec)
    codec.load(folder)
    return codec


def make_codec(spec: NamedSpec) -> Codec[Any]:
    """Returns a codec as `find_codec` does, before it has read a model's folder: it cannot encode yet."""
    from earlyexit.codecs.base import Codec

    codec = make_named(spec, CODECS, called="codec")
    if not isinstance(codec, Codec):
        raise ModelFolderError(f"{spec['name']!r} gave {type(codec).__name__}; a Codec is needed")
    return codec
