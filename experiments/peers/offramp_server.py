"""Offramp's service in a process of its own.

    python -m experiments.peers.offramp_server FILE

The file holds `OfframpOptions`. Says `ready` on its output, then changes to every plan whose name it reads, and says
`done`; ends with its input. The driver of a Ray dies with its raylet, so a service can stand still only if its driver
does too.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.local_ray.cluster import LocalCluster
from deployments.settings import ServeSettings
from offramp.demo.service import served
from optimizer.plan_file import parse_plan

READY, DONE = "ready", "done"


class OfframpOptions(BaseModel):
    """What is served, and the plans that it may change to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: ServeSettings
    plans: dict[str, dict[str, Any]]
    port: int
    metrics_port: int


def main() -> None:
    """Serve, and follow the plans that are named."""
    options = OfframpOptions.model_validate_json(Path(sys.argv[1]).read_bytes())
    first = options.settings.plan
    cluster = LocalCluster(port=options.port, metrics_port=options.metrics_port)
    with served(options.settings, first, cluster) as service:
        print(READY, flush=True)
        for line in sys.stdin:
            asyncio.run(service.apply(parse_plan(options.plans[line.strip()]), hold=True))
            print(DONE, flush=True)


if __name__ == "__main__":
    main()
