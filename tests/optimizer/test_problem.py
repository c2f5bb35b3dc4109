from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable


def table(num_blocks: int = 3, num_ramps: int = 2, block_s: float = 0.01) -> LatencyTable:
    return LatencyTable(
        batches=(1, 4), block_s_NB=np.full((num_blocks, 2), block_s), ramp_s_EB=np.full((num_ramps, 2), 0.001)
    )


def problem(**changed: Any) -> PlanProblem:
    fields: dict[str, Any] = {
        "num_blocks": 3,
        "ramps": (0, 1),
        "survival_N": (1.0, 0.5, 0.25),
        "latency": {"V100": table()},
        "devices": {"V100": Supply(count=2, usd_per_hour=2.93)},
        "link": Link(bandwidth_bytes_per_s=1e9, delay_s=1e-4),
        "bytes_per_sample_N": (1e3, 1e3, 1e3),
        "slo": Slo(latency_s=0.1),
        "objective": MaximizeRate(),
    }
    return PlanProblem(**{**fields, **changed})


MISFITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_blocks": 0}, "a model needs at least 1 block, not 0"),
    ({"ramps": (1, 0)}, "ramps must ascend without repeats, not [1, 0]"),
    ({"ramps": (1, 1)}, "ramps must ascend without repeats, not [1, 1]"),
    ({"ramps": (0, 2)}, "ramps [2] are not after blocks 0 to 1"),
    ({"ramps": (-1, 0)}, "ramps [-1] are not after blocks 0 to 1"),
    ({"survival_N": (1.0, 0.5)}, "survival needs 3 values, one per block, not 2"),
    ({"survival_N": (1.0, 0.5, -0.1)}, "survival must hold shares between 0 and 1"),
    ({"survival_N": (1.0, 1.5, 0.5)}, "survival must hold shares between 0 and 1"),
    ({"survival_N": (1.0, math.nan, 0.5)}, "survival must hold shares between 0 and 1"),
    ({"survival_N": (0.9, 0.5, 0.5)}, "survival must start at 1: every input reaches block 0, not 0.9"),
    ({"survival_N": (1.0, 0.5, 0.6)}, "survival rises at block 2, from 0.5 to 0.6; it may only fall"),
    ({"devices": {}}, "a plan problem needs at least one device type"),
    (
        {"devices": {"V100": Supply(count=1), "T4": Supply(count=1)}},
        "no latency for devices ['T4']; latency is given for ['V100']",
    ),
    ({"latency": {"V100": table(num_blocks=2)}}, "latency of V100: block_s needs 3 rows, one per block"),
    ({"latency": {"V100": table(num_ramps=1)}}, "latency of V100: ramp_s needs 2 rows, one per ramp"),
    ({"latency": {"V100": table(block_s=0.0)}}, "latency of V100: a block takes 1e-09 to 1e+09 seconds, not 0"),
    ({"bytes_per_sample_N": (1e3,)}, "bytes_per_sample needs 3 values, one per block"),
    ({"bytes_per_sample_N": (1e3, -1.0, 0.0)}, "bytes_per_sample must be a finite number not below 0, not -1.0"),
    ({"budget_usd_per_hour": -1.0}, "budget usd_per_hour must be a finite number not below 0, not -1.0"),
    ({"budget_usd_per_hour": math.inf}, "budget usd_per_hour must be a finite number not below 0, not inf"),
)


def test_a_problem_whose_parts_do_not_fit_is_refused() -> None:
    for changed, said in MISFITS:
        with pytest.raises(PlanError, match=re.escape(said)):
            problem(**changed)


SENSELESS: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: Supply(count=-1), "a device count must be at least 0, not -1"),
    (lambda: Supply(count=1, usd_per_hour=-2.0), "usd_per_hour must be a finite number not below 0, not -2.0"),
    (lambda: Link(bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s must be a finite number above 0, not 0.0"),
    (lambda: Link(bandwidth_bytes_per_s=1.0, delay_s=-1.0), "delay_s must be a finite number not below 0, not -1.0"),
    (lambda: Slo(latency_s=0.0), "slo latency_s must be a finite number above 0, not 0.0"),
    (lambda: Slo(latency_s=math.nan), "slo latency_s must be a finite number"),
    (lambda: Slo(latency_s=0.1, slack=1.0), "slack must be at least 0 and below 1, not 1.0"),
    (lambda: Slo(latency_s=0.1, slack=-0.1), "slack must be at least 0 and below 1, not -0.1"),
    (lambda: MinimizeCost(rate_per_s=0.0), "rate_per_s must be a finite number above 0, not 0.0"),
)


def test_a_part_that_makes_no_sense_is_refused() -> None:
    for build, said in SENSELESS:
        with pytest.raises(PlanError, match=re.escape(said)):
            build()


def test_a_model_may_have_one_block_and_no_ramps() -> None:
    lone = problem(
        num_blocks=1,
        ramps=(),
        survival_N=(1.0,),
        latency={"V100": table(num_blocks=1, num_ramps=0)},
        bytes_per_sample_N=(0.0,),
    )
    assert lone.ramps == ()


def test_devices_may_be_measured_without_being_there() -> None:
    assert set(problem(latency={"V100": table(), "T4": table()}).devices) == {"V100"}
    assert problem(devices={"V100": Supply(count=0)}).devices["V100"].count == 0


def test_survival_may_stay_and_may_end_at_nothing() -> None:
    assert problem(survival_N=(1.0, 1.0, 0.0)).survival_N[-1] == 0


def test_the_share_after_a_ramp_is_that_of_the_next_block() -> None:
    assert [problem().share_after(ramp) for ramp in (None, 0, 1)] == [1.0, 0.5, 0.25]


def test_slack_is_kept_in_hand() -> None:
    assert Slo(latency_s=0.1).limit_s == pytest.approx(0.08)
    assert Slo(latency_s=0.1, slack=0.0).limit_s == pytest.approx(0.1)


def test_a_hop_takes_its_delay_and_its_bytes() -> None:
    assert Link(bandwidth_bytes_per_s=1e6, delay_s=0.5).seconds(2e6) == pytest.approx(2.5)
