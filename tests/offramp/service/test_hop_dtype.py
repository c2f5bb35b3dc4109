"""A service whose hop binds: what its planner, and a simulation of it, make of narrower hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.settings import ServeSettings
from earlyexit.network.split import Split
from optimizer.plan import Plan, Stage
from optimizer.problem import PlanProblem
from simulator.inputs import ByRamp
from simulator.scenario import Scenario
from simulator.simulate import simulate
from tests.offramp.service.service_files import Files

FAST, SLOW, SLOWER, SLOWEST = [0.01, 0.02], [0.08, 0.16], [0.16, 0.32], [0.64, 1.28]
RAMPS = [[0.001, 0.002]] * 2
BYTES = 16 * 8 * 4
"""Tokens, hidden size, float32."""
BANDWIDTH = 2500.0
"""Bytes per second: where half of the inputs leave at the first ramp, 512 bytes for each other are 9.8 inputs/s."""


def service(folder: Path, hop_dtype: str) -> ServeSettings:
    """One accelerator is fast at the first block, the other at the rest: a cut pays as far as the link lets it."""
    latency = {
        "emulated:V100": {"batch": [1, 2], "block_s": [FAST, SLOWER, SLOWEST], "ramp_s": RAMPS},
        "emulated:P100": {"batch": [1, 2], "block_s": [SLOW, FAST, FAST], "ramp_s": RAMPS},
    }
    return (
        Files(folder)
        .read(
            model={"folder": "model", "latency": latency, "hop_dtype": hop_dtype},
            slo={"latency_s": 5.0},
            cluster={
                "devices": {"emulated:V100": {"count": 1}, "emulated:P100": {"count": 1}},
                "link": {"bandwidth_bytes_per_s": BANDWIDTH},
            },
        )
        .settings
    )


def test_narrower_hidden_states_make_a_cut_worth_its_hop(tmp_path: Path) -> None:
    same, half = (service(tmp_path / hop_dtype, hop_dtype).plan for hop_dtype in ("same", "float16"))
    assert [stage.device for stage in same.stages] == ["emulated:P100"]
    # A hop of 512 bytes would have held the rate at 9.8, below what one stage does; one of 256 does not.
    assert [(stage.device, stage.splits[0].first) for stage in half.stages] == [
        ("emulated:V100", 0),
        ("emulated:P100", 1),
    ]
    assert BANDWIDTH / (BYTES / 2) < same.predicted["rate_per_s"] < half.predicted["rate_per_s"]
    assert half.predicted["rate_per_s"] == pytest.approx(BANDWIDTH / (BYTES / 4))


def test_simulated_hops_take_the_seconds_of_their_bytes(tmp_path: Path) -> None:
    same, half = (alone_s(problem_of(service(tmp_path / hop_dtype, hop_dtype))) for hop_dtype in ("same", "float16"))
    computed_s = 3 * FAST[0]
    assert same == pytest.approx(computed_s + BYTES / BANDWIDTH)
    assert half == pytest.approx(computed_s + BYTES / 2 / BANDWIDTH)


def problem_of(settings: ServeSettings) -> PlanProblem:
    assert settings.control is not None
    return settings.control.problem


def alone_s(problem: PlanProblem) -> float:
    """Seconds of one input that crosses the hop after block 0, and leaves nowhere early."""
    stages: Any = tuple(
        Stage(device=device, replicas=1, splits=(Split(first=first, end=end, batch=1),))
        for device, first, end in (("emulated:V100", 0, 1), ("emulated:P100", 1, 3))
    )
    outcome = simulate(
        Scenario(
            problem=problem,
            plan=Plan(stages=stages),
            decisions=ByRamp(ramps=(0, 1), sure_NR=np.zeros((1, 2), dtype=np.bool_)),
            rows_N=np.zeros(1, dtype=np.int64),
            arrivals_s=np.zeros(1),
            duration_s=1.0,
            admission=False,
        )
    )
    return float(outcome.latency_s_N[0])
