"""The application that `serve_batch.py` deploys: one deployment that takes requests and batches them."""

from __future__ import annotations

import json
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

from earlyexit.errors import InputError
from experiments.peers.bodies import Asked, answer_together, parse_body
from experiments.peers.options import ServerOptions
from experiments.peers.stock import StockModel


class Classifier:
    """A replica: its requests' bodies, batches of them, the model."""

    def __init__(self, options: dict[str, Any]) -> None:
        checked = ServerOptions.model_validate(options)
        self._model = StockModel.load(checked)
        batched = cast(Any, self._answer)
        batched.set_max_batch_size(checked.batch)
        batched.set_batch_wait_timeout_s(checked.wait_s)

    async def __call__(self, request: Request) -> Response:
        """One request; its path does not matter."""
        try:
            asked = parse_body(json.loads(await request.body()))
        except (InputError, ValueError) as error:
            return Response(json.dumps({"error": str(error)}), status_code=400, media_type="application/json")
        return Response(json.dumps(await self._answer(asked)), media_type="application/json")

    @serve.batch  # its limits are the replica's options
    async def _answer(self, requests: list[Asked]) -> list[dict[str, Any]]:
        return answer_together(self._model.predict, requests)


def build(options: ServerOptions) -> Application:
    """The application, not yet run."""
    deployment = serve.deployment(
        name="classifier",
        num_replicas=options.workers,
        max_ongoing_requests=max(options.batch, options.max_queued // options.workers),
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False, log_level="WARNING"),  # as Offramp's own
    )
    application: Application = deployment(Classifier).bind(options.model_dump(mode="json"))
    return application
