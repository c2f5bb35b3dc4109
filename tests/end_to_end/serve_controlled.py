"""Serves a folder under a controller that never plans by itself; run by `test_plan_changes_on_ray.py`.

Every line on standard input is a plan, as JSON: it is put in force, and what the controller says of it is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ControlSettings, ServeSettings
from optimizer.plan import PolicySpec
from optimizer.plan_file import read_plan
from optimizer.problem import PlanProblem
from optimizer.problem_file import parse_problem

NEVER_S = 1e6
NUM_BLOCKS = 4
RAMPS = (0, 1, 2)


def main(folder: Path, port: int) -> None:
    plan = read_plan(folder / "plan.yaml")
    settings = ServeSettings(
        model=str(folder),
        plan=plan,
        slots={"cpu": 2},
        control=ControlSettings(
            problem=problem(),
            policy=cast("PolicySpec", plan.policy),
            state=str(folder / "state.sqlite"),
            period_s=NEVER_S,
            watch_s=0.5,
        ),
        probe_share=0.5,
    )
    with serving(settings, LocalCluster(port=port, front="proxy", drain_s=0.1, metrics_port=port + 1)) as url:
        print(url, flush=True)  # noqa: T201 # the test waits for it, as for all that follows
        for line in sys.stdin:
            print(json.dumps(put_in_force(json.loads(line))), flush=True)  # noqa: T201


def problem() -> PlanProblem:
    """What the controller would plan by, if it planned."""
    document = {
        "schema_version": 1,
        "blocks": NUM_BLOCKS,
        "ramps": list(RAMPS),
        "survival": [1.0, 0.7, 0.5, 0.3],
        "latency": {
            "cpu": {
                "batch": [1, 8],
                "block_s": [[0.001, 0.004]] * NUM_BLOCKS,
                "ramp_s": [[0.0001, 0.0001]] * len(RAMPS),
            }
        },
        "devices": {"cpu": {"count": 4}},
        "link": {"bandwidth_bytes_per_s": 1e9},
        "bytes_per_sample": 1000,
        "slo": {"latency_s": 5.0},
        "objective": {"maximize": "rate"},
    }
    return parse_problem(document).problem


def put_in_force(plan: dict[str, Any]) -> dict[str, Any]:
    from ray import serve

    handle: Any = serve.get_deployment_handle("controller", "offramp")
    if not handle.is_initialized:  # no event loop here, which the throughput switches would want
        handle._init(_run_router_in_separate_loop=True)
    verdict: dict[str, Any] = handle.apply.remote(plan, True).result(timeout_s=60)
    return verdict


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
