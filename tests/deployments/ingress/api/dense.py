"""A fake ingress of a model whose answers are class maps or keypoints, computed from given outputs."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from deployments.api.exchange import RequestBodies
from deployments.api.operations import InferRequest, Signature
from earlyexit.codecs.image import ImageCodec
from earlyexit.network.boundary import Answer, values_of
from earlyexit.tasks.base import Task
from tests.deployments.ingress.api.faces import FakeBackend
from tests.earlyexit.codecs.pictures import file_of, noise
from tests.earlyexit.tasks.maps import BODY, STREET, logits_of, peaks

FILES = [file_of(noise(8, 8, seed=row), "PNG") for row in range(2)]
IN_BASE64 = [base64.b64encode(file).decode() for file in FILES]
ROAD, CAR, SKY = range(3)
MAPS = torch.cat([logits_of([[SKY, SKY, CAR], [ROAD, ROAD, CAR]]), logits_of([[SKY, SKY, SKY], [ROAD, ROAD, ROAD]])])
HEATMAPS = torch.cat([peaks((1, 2, 0.5), (7, 0, 0.25), (0, 7, 1.0)), peaks((3, 3, 0.75), (4, 4, 0.5), (5, 5, 0.25))])
Answers = list[tuple[npt.NDArray[Any], float, int]]
"""Returns the array, the score and the exit of every image."""


@dataclass
class DenseBackend(FakeBackend):
    """Answers the k-th image of a request from the k-th given output."""

    bodies: RequestBodies = field(default_factory=lambda: RequestBodies(1_000_000, 10_000_000))
    dense: Task = STREET
    outputs: torch.Tensor = field(default_factory=lambda: MAPS)

    @property
    def task(self) -> Task:
        return self.dense

    @property
    def signature(self) -> Signature:
        return Signature(ImageCodec(height=4, width=6), self.dense)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        values = values_of(self.dense.answer(self.outputs).numpy())
        scores = self.dense.score(self.outputs).tolist()
        return [Answer(sample_id="", value=values[k], score=scores[k], exit=k + 1) for k in range(len(request.rows))]

    @property
    def right(self) -> Answers:
        scores = self.dense.score(self.outputs).tolist()
        return [(each, scores[k], k + 1) for k, each in enumerate(self.dense.answer(self.outputs).numpy())]


BACKENDS = {"segmentation": lambda: DenseBackend(), "pose": lambda: DenseBackend(dense=BODY, outputs=HEATMAPS)}
