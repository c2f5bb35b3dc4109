"""Serves a folder (model, and a plan in plan.yaml) until its standard input ends; run by `test_service_on_ray.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings, TracingSettings
from optimizer.plan_file import read_plan

MAX_BODY_BYTES = 20_000


def main(folder: Path, port: int) -> None:
    plan = read_plan(folder / "plan.yaml")
    settings = ServeSettings(
        model=str(folder),
        plan=plan,
        max_queued=500,
        max_timeout_s=60.0,
        max_inputs_per_request=32,
        max_body_bytes=MAX_BODY_BYTES,
        tracing=TracingSettings(endpoint=f"http://127.0.0.1:{port + 3}", ratio=0.0),  # those whose caller asks for it
    )
    cluster = LocalCluster(port=port, front="proxy", drain_s=0.1, metrics_port=port + 1, grpc_port=port + 2)
    with serving(settings, cluster) as url:
        print(url, flush=True)  # noqa: T201 # the test waits for it
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
