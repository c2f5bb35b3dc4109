"""Runs Offramp's service in its own process, and controls that process.

    python -m experiments.peers.offramp_server FILE

The file holds `OfframpOptions`. The process prints `ready`, then reads names of plans from its input, changes to each
plan, and prints `done`. It ends at the end of its input. It is a separate process because Ray's driver ends with its
raylet, so stopping the service ends the driver too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from pydantic import BaseModel, ConfigDict

from deployments.choices import HttpFront
from deployments.local_ray.cluster import LocalCluster
from deployments.settings import ServeSettings
from earlyexit.errors import OfframpError
from experiments.peers.processes import LOGS, Server, running, threads_of
from offramp.demo.turns import apply, served
from optimizer.plans.plan import Plan
from optimizer.plans.plan_file import parse_plan, plan_document

READY, DONE = "ready", "done"


class OfframpOptions(BaseModel):
    """The settings of the service, and the plans to which it may change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: ServeSettings
    plans: dict[str, dict[str, Any]]
    port: int
    metrics_port: int
    front: HttpFront = "auto"

    @classmethod
    def of(cls, settings: ServeSettings, plans: Mapping[str, Plan], *, port: int, **more: Any) -> Self:
        """Returns the options; the port of the metrics follows the service's port."""
        documents = {name: plan_document(plan) for name, plan in plans.items()}
        return cls(settings=settings, plans=documents, port=port, metrics_port=port + 1, **more)


@dataclass(slots=True)
class Remote:
    """The service's process, which receives names of plans on its input."""

    server: Server
    following: str = ""

    def change_to(self, name: str) -> None:
        """Puts a plan in force and keeps it; no request is lost. Raises OfframpError if the service has ended."""
        if name != self.following:
            stdin: IO[str] = self.server.process.stdin  # type: ignore[assignment] # it was opened as text
            stdin.write(f"{name}\n")
            stdin.flush()
            self.wait_for_line(DONE)
            self.following = name

    def wait_for_line(self, expected: str) -> None:
        """Waits until the service prints this line; raises OfframpError if it ends instead."""
        assert self.server.process.stdout is not None
        if not any(line.strip() == expected for line in self.server.process.stdout):
            raise OfframpError(f"the service ended; see {self.server.log}")


@contextmanager
def offramp_process(options: OfframpOptions) -> Iterator[Remote]:
    """Runs the service until the end of the block; yields when it is ready."""
    path = LOGS / "offramp.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(options.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "experiments.peers.offramp_server", str(path)]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = threads_of(options.settings.threads_per_replica)
    with running(command, f"http://127.0.0.1:{options.port}", path.with_suffix(".log"), environment, **piped) as server:
        remote = Remote(server)
        remote.wait_for_line(READY)
        yield remote


def main() -> None:
    """Serves, and follows the named plans."""
    options = OfframpOptions.model_validate_json(Path(sys.argv[1]).read_bytes())
    cluster = LocalCluster(port=options.port, metrics_port=options.metrics_port, front=options.front)
    with served(options.settings, options.settings.plan, cluster):
        print(READY, flush=True)
        for line in sys.stdin:
            asyncio.run(apply(parse_plan(options.plans[line.strip()])))
            print(DONE, flush=True)


if __name__ == "__main__":
    main()
