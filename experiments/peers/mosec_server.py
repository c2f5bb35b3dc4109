"""mosec's server, from the extra `peers`: `python -m experiments.peers.mosec_server`."""

from __future__ import annotations

import json
from typing import Any

import mosec

from earlyexit.errors import InputError
from experiments.peers.stock import ServerOptions, StockModel, Texts, answer, parse_body

TIMEOUT_S = 60.0


class Classifier(mosec.Worker):  # type: ignore[misc] # its package is in the extra `peers` only
    """Runs batches of requests in worker processes that mosec's Rust server feeds."""

    def __init__(self) -> None:
        super().__init__()
        self._model = StockModel.load(ServerOptions.from_environment())

    def deserialize(self, data: bytes) -> Texts:
        try:
            return parse_body(super().deserialize(data))
        except InputError as error:
            raise mosec.errors.ValidationError(str(error)) from error

    def serialize(self, data: dict[str, Any]) -> bytes:
        """Returns compact JSON; mosec would indent it."""
        return json.dumps(data).encode()

    def forward(self, data: Texts | list[Texts]) -> Any:
        """Answers a batch; with a batch size of one, mosec passes a single request instead of a list."""
        if isinstance(data, Texts):
            return answer(self._model.predict, [data])[0]
        return answer(self._model.predict, data)


def main(options: ServerOptions) -> None:
    """Serves until SIGTERM; more than `max_queued` requests are refused with 429."""
    server = mosec.Server()
    server.append_worker(
        Classifier,
        num=options.workers,
        max_batch_size=options.batch,
        max_wait_time=max(1, round(options.wait_s * 1000)),  # mosec's minimum is 1 ms
        timeout=TIMEOUT_S,
        route="/predict",
    )
    server.run()


if __name__ == "__main__":
    main(ServerOptions.from_environment())
