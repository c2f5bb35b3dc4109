"""A problem of two blocks with figures that are worked out by hand, and its best plan."""

from __future__ import annotations

from typing import Any

from earlyexit.network.boundary import Split
from optimizer.plan import Stage

DOCUMENT: dict[str, Any] = {
    "blocks": 2,
    "ramps": [0],
    "survival": [1.0, 0.5],
    "latency": {"V100": {"batch": [1, 2, 4], "block_s": [[0.001] * 3] * 2, "ramp_s": [[0.0] * 3]}},
    "devices": {"V100": {"count": 4, "usd_per_hour": 3}},
    "link": {"bandwidth_bytes_per_s": 1e9},
    "bytes_per_sample": 1000,
    "slo": {"latency_s": 0.1, "slack": 0.2},
    "objective": {"maximize": "rate"},
}
BEST = (
    Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=4, ramps=(0,)),)),
    Stage(device="V100", replicas=2, splits=(Split(first=1, end=2, batch=2),)),
)
"""4000/s: stage 0 does 4 inputs in 1 ms; half of them reach stage 1, which does 2 x 2 of those in 1 ms: twice that."""
