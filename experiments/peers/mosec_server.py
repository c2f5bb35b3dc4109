"""mosec: `python -m experiments.peers.mosec_server '<JSON of ServerOptions>'`, in the peers' environment."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import mosec

from earlyexit.errors import InputError
from experiments.peers.bodies import Asked, answer_together, parse_body
from experiments.peers.options import ServerOptions
from experiments.peers.stock import StockModel

OPTIONS = "OFFRAMP_PEER_OPTIONS"
"""Where a worker finds its options: mosec makes it without arguments, in a process of its own."""
TIMEOUT_S = 60.0


class Classifier(mosec.Worker):  # type: ignore[misc] # its package is in the peers' environment only
    """Batches of requests, in processes that mosec's Rust server feeds."""

    def __init__(self) -> None:
        super().__init__()
        self._model = StockModel.load(ServerOptions.model_validate_json(os.environ[OPTIONS]))

    def deserialize(self, data: bytes) -> Asked:
        try:
            return parse_body(super().deserialize(data))
        except InputError as error:
            raise mosec.errors.ValidationError(str(error)) from error

    def serialize(self, data: dict[str, Any]) -> bytes:
        """Compact, where mosec would indent."""
        return json.dumps(data).encode()

    def forward(self, data: Asked | list[Asked]) -> Any:
        """Of a batch; mosec makes none where they are to be of one request each."""
        return answer_together(self._model, data) if isinstance(data, list) else answer_together(self._model, [data])[0]


def main(options: ServerOptions) -> None:
    """Serve until SIGTERM; more than `max_queued` requests are refused with 429."""
    os.environ |= {
        OPTIONS: options.model_dump_json(),
        "MOSEC_ADDRESS": "127.0.0.1",
        "MOSEC_PORT": str(options.port),
        "MOSEC_CAPACITY": str(options.max_queued),
        "MOSEC_TIMEOUT": str(round(TIMEOUT_S * 1000)),
        "MOSEC_LOG_LEVEL": "warning",
    }
    server = mosec.Server()
    server.append_worker(
        Classifier,
        num=options.workers,
        max_batch_size=options.batch,
        max_wait_time=max(1, round(options.wait_s * 1000)),  # 1 ms is its least
        timeout=TIMEOUT_S,
        route="/predict",
    )
    server.run()


if __name__ == "__main__":
    main(ServerOptions.model_validate_json(sys.argv[1]))
