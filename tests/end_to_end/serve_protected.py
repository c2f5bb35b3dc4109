"""Serves a folder behind keys (in its file `keys`) until its standard input ends; run by `test_access_on_ray.py`.

For every line on standard input the folder of Ray's logs is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from deployments.access import AccessSettings
from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from optimizer.plan_file import read_plan

RATE_PER_S = 0.1
BURST = 30.0


def main(folder: Path, port: int) -> None:
    settings = ServeSettings(
        model=str(folder),
        plan=read_plan(folder / "plan.yaml"),
        max_inputs_per_request=32,
        max_body_bytes=20_000,
        access=AccessSettings(
            keys_file=str(folder / "keys"), rate_per_s=RATE_PER_S, burst=BURST, cors_origins=("https://example.org",)
        ),
    )
    with serving(settings, LocalCluster(port=port, front="proxy", drain_s=0.1)) as url:
        print(url, flush=True)  # noqa: T201 # the test waits for it, as for all that follows
        for _ in sys.stdin:
            print(logs(), flush=True)  # noqa: T201


def logs() -> Path:
    from ray._private import worker

    node: Any = worker.global_worker.node
    return Path(node.get_logs_dir_path())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
