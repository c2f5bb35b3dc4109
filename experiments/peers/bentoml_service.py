"""BentoML: the service that its workers load by name, in the peers' environment."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import bentoml
from _bentoml_sdk import IODescriptor
from pydantic import BaseModel, field_validator
from starlette.responses import Response

from earlyexit.errors import InputError
from experiments.peers.bodies import parse_body, reply
from experiments.peers.options import ServerOptions
from experiments.peers.stock import StockModel

TIMEOUT_S = 60.0

options = ServerOptions.told()

Row = tuple[str, bool]
"""A text, and whether it was asked for alone: BentoML batches rows, and hands a request's rows back together."""
Answer = tuple[dict[str, Any], bool]


class Body(BaseModel):
    """What is asked, as rows."""

    inputs: list[Row]

    @field_validator("inputs", mode="before")
    @classmethod
    def _as_rows(cls, inputs: object) -> list[Row]:
        try:
            asked = parse_body({"inputs": inputs})
        except InputError as error:
            raise ValueError(str(error)) from error  # what pydantic, and so BentoML, tells the client
        return [(text, asked.alone) for text in asked.texts]


class Reply(IODescriptor):  # type: ignore[misc] # its package is in the peers' environment only
    """How a request's rows become its answer, without a schema's second look at them."""

    @classmethod
    async def to_http_response(cls, obj: list[Answer], serde: object) -> Response:  # noqa: ARG003 # its contract
        content = reply([document for document, _ in obj], alone=obj[0][1])
        return Response(json.dumps(content), media_type="application/json")


@bentoml.service(
    workers=options.workers,
    traffic={"timeout": TIMEOUT_S, "max_concurrency": options.max_queued},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Classifier:
    """Batches of texts, in the process that took their requests.

    BentoML learns how long batches take and decides itself how long to wait for more; what would be answered later
    than `slo_s` it refuses with 503.
    """

    def __init__(self) -> None:
        self._model = StockModel.load(options)

    @bentoml.api(  # type: ignore[untyped-decorator] # its package is in the peers' environment only
        route="/predict",
        input_spec=Body,
        output_spec=Reply,
        batchable=options.batch > 1,
        max_batch_size=max(2, options.batch),  # it takes no less, even where it batches nothing
        max_latency_ms=round(options.slo_s * 1000),
    )
    def predict(self, inputs: list[Row]) -> list[Answer]:
        """Run in a thread beside the event loop."""
        predictions = self._model.predict([text for text, _ in inputs])
        return [(asdict(each), alone) for each, (_, alone) in zip(predictions, inputs, strict=True)]
