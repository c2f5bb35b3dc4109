"""LitServe's server, from the extra `peers`: `python -m experiments.peers.litserve_server`."""

# LitServe passes annotations to FastAPI. They must not be strings, so `from __future__ import annotations` is missing.

import signal
from collections.abc import Sequence
from typing import Any

import litserve
from fastapi import HTTPException

from earlyexit.errors import InputError
from experiments.peers.stock import ServerOptions, StockModel, Texts, answer, parse_body

SHORTEST_WAIT_S = 0.001
"""With a wait of 0, LitServe's workers poll their queue without a pause, even without requests."""


class Classifier(litserve.LitAPI):  # type: ignore[misc] # its package is in the extra `peers` only
    """Runs batches of requests in LitServe's worker processes."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(max_batch_size=options.batch, batch_timeout=max(options.wait_s, SHORTEST_WAIT_S))
        self._options = options
        self._model: StockModel

    def setup(self, device: str) -> None:
        """Loads the model, once in every worker."""
        self._model = StockModel.load(self._options)

    def decode_request(self, request: dict[str, Any]) -> Texts:
        try:
            return parse_body(request)
        except InputError as error:
            raise HTTPException(400, str(error)) from error

    def batch(self, inputs: Sequence[Texts]) -> Sequence[Texts]:
        return inputs

    def predict(self, x: Texts | Sequence[Texts]) -> Any:
        return answer(self._model.predict, [x])[0] if isinstance(x, Texts) else answer(self._model.predict, x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


def main(options: ServerOptions) -> None:
    """Serves until SIGTERM. LitServe refuses no request, so late requests wait.

    `fast_queue` is not used. Version 0.2.19 accepts the argument but keeps its ordinary queue, because the setting's
    name is misspelt inside. With the ZeroMQ transport set by hand, no request is answered.
    """
    server = litserve.LitServer(
        Classifier(options),
        accelerator="cpu",
        workers_per_device=options.workers,
        timeout=False,
        disable_openapi_url=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its worker processes end only on Ctrl-C
    server.run(host="127.0.0.1", port=options.port, log_level="warning", access_log=False, generate_client_file=False)


if __name__ == "__main__":
    main(ServerOptions.from_environment())
