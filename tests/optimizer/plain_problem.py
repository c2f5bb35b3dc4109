"""A plan problem of which a test says what matters to it."""

from __future__ import annotations

from typing import Any

from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply


def plain_problem(**given: Any) -> PlanProblem:
    """The highest rate within a second on one free accelerator of each type that was measured.

    There is a ramp after every block but the last, and nothing to send. `given`: survival and latency at least.
    """
    num_blocks = len(given["survival_N"])
    plain: dict[str, Any] = {
        "num_blocks": num_blocks,
        "ramps": tuple(range(num_blocks - 1)),
        "devices": {name: Supply(count=1) for name in given["latency"]},
        "link": Link(bandwidth_bytes_per_s=1e9),
        "bytes_per_sample_N": (0.0,) * num_blocks,
        "slo": Slo(latency_s=1.0),
        "objective": MaximizeRate(),
    }
    return PlanProblem(**plain | given)
