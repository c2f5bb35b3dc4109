"""A task of one's own whose answers are small maps, and may be had as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.api.bodies import InferRequest
from deployments.api.parsing import Signature
from deployments.api.request_body import Bodies
from earlyexit.network.wire import Answer, Column, Numbers, Value, stacked
from earlyexit.tasks.base import ValueArray
from earlyexit.tasks.checks import to_png
from earlyexit.tasks.label import LabelTask
from tests.deployments.ingress.api.faces import FakeBackend
from tests.deployments.ingress.api.signatures import TEXT

SIDE = 60
NUM_CLASSES = 3


class OwnMaps(LabelTask):
    """What a label task has to do otherwise, so that its answers are maps."""

    content_types = ("image/png",)
    columns = (Column(name="map", datatypes=("UINT8",), shape=(SIDE, SIDE)), Column(name="score", datatypes=("FP32",)))

    def to_columns(self, values: Sequence[Value], scores: Sequence[float]) -> dict[str, list[Any] | ValueArray]:
        return {"map": stacked(values), "score": list(scores)}

    def to_json(self, value: Value, score: float) -> dict[str, Any]:
        assert isinstance(value, Numbers)
        return {"map": value.numpy().tolist(), "score": round(score, 6)}

    def to_content(self, content_type: str, value: Value) -> bytes:
        assert isinstance(value, Numbers)
        return to_png(value.numpy(), NUM_CLASSES)

    @property
    def json_schema(self) -> Mapping[str, Any]:
        return {"map": {"type": "array"}, "score": {"type": "number"}}


def map_of(row: object) -> npt.NDArray[np.uint8]:
    """Of an input, the map that `MapBackend` answers: as a text, so many and so many columns of each class."""
    columns = np.arange(SIDE) * len(str(row)) // SIDE % NUM_CLASSES
    return np.tile(columns.astype(np.uint8), (SIDE, 1))


@dataclass
class MapBackend(FakeBackend):
    """Answers texts with maps."""

    bodies: Bodies = field(default_factory=lambda: Bodies(1_000_000, 10_000_000))
    own_task: OwnMaps = field(default_factory=lambda: OwnMaps(tuple("abc")))

    @property
    def task(self) -> OwnMaps:
        return self.own_task

    @property
    def signature(self) -> Signature:
        return Signature(TEXT.codec, self.own_task)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        return [Answer(sample_id="", value=Numbers.of(map_of(row)), score=0.75, exit=1) for row in request.rows]
