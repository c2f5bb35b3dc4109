"""Codecs: from the inputs of a request to the tensors of a network. `base.py` has the contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.named import NamedSpec, make_named

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec

# Name -> import path of its Codec. To add a codec, write one file in this folder and add one line here.
CODECS = {
    "text": "earlyexit.codecs.text:TextCodec",
    "text_pair": "earlyexit.codecs.text:TextPairCodec",
    "image": "earlyexit.codecs.image:ImageCodec",
    "tensor": "earlyexit.codecs.tensor:TensorCodec",
    "prompt": "earlyexit.codecs.prompt:PromptCodec",
    "chain": "earlyexit.codecs.chain:ChainCodec",
}


def find_codec(spec: NamedSpec, folder: Path) -> Codec[Any]:
    """Returns the codec of a model card, such as `{"name": "text", "max_length": 128}`, loaded from the model's folder.

    `module:function` names a user's own codec. Raises ModelFolderError for unknown names, settings and missing files.
    """
    codec = make_codec(spec)
    codec.load(folder)
    return codec


def make_codec(spec: NamedSpec) -> Codec[Any]:
    """Returns a codec that has not been loaded from a model's folder, so that it cannot encode yet."""
    from earlyexit.codecs.base import Codec

    return make_named(spec, CODECS, Codec)  # type: ignore[type-abstract] # it is not called
