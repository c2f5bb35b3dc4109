"""Signatures of models without a folder."""

from __future__ import annotations

from typing import Any

from deployments.api.operations import Signature
from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.codecs.text import TextCodec, TextPairCodec
from earlyexit.network.boundary import DATATYPES
from earlyexit.network.store import ModelCard
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask

TASK = LabelTask(("bill", "café"))
TEXT = Signature(TextCodec(max_length=8), TASK)
PAIR = Signature(TextPairCodec(max_length=8), TASK)
IMAGE = Signature(ImageCodec(height=2, width=3), TASK)
NUMBERS = tuple(name for name in DATATYPES if name != "BYTES")


class Described:
    """Base of fake ingresses: the properties that follow from a card of texts and labels."""

    card: ModelCard

    @property
    def task(self) -> Task:
        return find_task(self.card.task)

    @property
    def signature(self) -> Signature:
        return Signature(TEXT.codec, self.task)


def tensors(*columns: dict[str, Any]) -> Signature:
    return Signature(TensorCodec(columns), TASK)


def tensor(datatype: str, *shape: int) -> Signature:
    """Returns a signature with one column, `x`."""
    return tensors({"name": "x", "datatype": datatype, "shape": list(shape)})
