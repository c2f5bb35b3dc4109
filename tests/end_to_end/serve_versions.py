"""Serves version 1 of a model, beside which others may be loaded; run by `test_versions_on_ray.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings


def main(folder: Path, port: int) -> None:
    settings = ServeSettings.model_validate_json((folder / "settings.json").read_bytes())
    with serving(settings, LocalCluster(port=port, front="proxy", drain_s=0.1, metrics_port=port + 1)) as url:
        print(url, flush=True)  # noqa: T201 # the test waits for it
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
