"""BentoML: `python -m experiments.peers.bentoml_server '<JSON of ServerOptions>'`, in the peers' environment."""

from __future__ import annotations

import os
import sys

from experiments.peers.options import ServerOptions

OPTIONS = "OFFRAMP_PEER_OPTIONS"
SERVICE = "experiments.peers.bentoml_service:Classifier"


def main(options: ServerOptions) -> None:
    """Become `bentoml serve` until SIGTERM."""
    environment = os.environ | {
        OPTIONS: options.model_dump_json(),
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOST": "127.0.0.1",
        "BENTOML_PORT": str(options.port),
    }
    command = [sys.executable, "-m", "bentoml", "serve", "--quiet", SERVICE]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main(ServerOptions.model_validate_json(sys.argv[1]))
