"""Runs a Ray on which services take turns, for `one_ray.py`.

Arguments: a file with the settings of the first service, and its port. Every line on standard input is an order, as
JSON. Its result is written to standard output, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings


def main(file: Path, port: int) -> None:
    settings = ServeSettings.model_validate_json(file.read_bytes())
    cluster = LocalCluster(port=port, front="proxy", drain_s=0.1, metrics_port=port + 1, grpc_port=port + 2)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints its messages there
    with serving(settings, cluster) as url:
        answers.write(f"{json.dumps(url)}\n")
        for line in sys.stdin:
            [(order, argument)] = json.loads(line).items()
            answers.write(f"{json.dumps(ORDERS[order](argument))}\n")


def serve_instead(settings: dict[str, Any]) -> str:
    """Replaces all applications by this service; returns its name."""
    from ray import serve

    from deployments.app import build

    name: str = settings["app"]
    stop(None)
    serve.run(build(settings), name=name, external_scaler_enabled=settings["control"] is not None)
    return name


def stop(_: None) -> None:
    """Ends every application."""
    from ray import serve

    for name in serve.status().applications:
        serve.delete(name)


def put_in_force(argument: dict[str, Any]) -> int:
    """Makes an application's controller follow only this plan; returns the plan's epoch."""
    from deployments.wire.controller_link import apply_plan

    return apply_plan(argument["app"], argument["plan"], hold=True, timeout_s=60)


def find_logs(_: None) -> str:
    """Returns the folder of Ray's logs."""
    from ray._private import worker

    node: Any = worker.global_worker.node
    return str(node.get_logs_dir_path())


ORDERS: dict[str, Callable[[Any], Any]] = {
    "serve": serve_instead,
    "stop": stop,
    "apply": put_in_force,
    "logs": find_logs,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
