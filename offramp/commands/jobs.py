"""The options of `offramp plan`, `what-if` and `simulate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from earlyexit.errors import InputError

StrategyName = Literal["best", "stock", "early-exit", "e3", "serial", "apparate", "pame"]
"""As `optimizer.decision.Strategy`, which a shell that completes does not wait for."""
MOST_INGRESSES = 1000


class OfProblem(BaseModel):
    """A problem file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    problem: Path = Field(json_schema_extra={"argument": "PROBLEM"})
    """Plan problem, YAML or JSON."""


class OfOrder(BaseModel):
    """The order in which inputs of a plan's queues go."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    order: str | None = Field(default=None, examples=["arrival", "deadline", "shortest", "das"])
    """Which of the inputs that wait go first: arrival, deadline, shortest, das (or das:0.3, with its eta). None: as the
    plan says, else deadline."""


class PlanJob(OfProblem, OfOrder):
    """What is planned, and what is written of it. Raises InputError that names options that need `out`."""

    strategy: StrategyName = "best"
    """best, or a part of it: stock, early-exit, e3, serial, apparate, pame."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use."""
    plot: Path | None = None
    """Picture of the plan: .svg, .png or .pdf."""
    out: Path | None = None
    """Plan file for `offramp serve --plan`."""
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """For --out: leave at this entropy, in nats, at every active ramp."""
    compared: bool = Field(default=True, alias="compare")
    """Plan the other strategies too, and compare."""

    @model_validator(mode="after")
    def _agrees(self) -> PlanJob:
        if self.threshold is not None and self.out is None:
            raise InputError("--threshold: only a plan that is written with --out needs one")
        if self.order is not None and self.out is None:
            raise InputError("--order: only a plan that is written with --out has one")
        return self


class WhatIfJob(OfProblem):
    """The number of a problem that changes; exactly one is given."""

    slo_ms: str | None = None
    """SLOs in ms, like 25,50,100."""
    batch_limit: str | None = None
    """Largest batch sizes, like 1,2,4,8."""
    budget: str | None = None
    """Budgets in USD per hour, like 10,20."""
    count: str | None = None
    """Numbers of one device, like V100=4,8,16."""
    rate: str | None = None
    """Rates per second, like 1000,2000; at the least cost where none is asked for."""


class SimulateJob(OfProblem, OfOrder):
    """What is simulated. Raises InputError that names the option for numbers that contradict each other."""

    arrivals: str
    """poisson:9000, uniform:, gamma:9000,cv=2, mmpp:1000,peak=5000,..., trace:FILE, counts:FILE or times:FILE."""
    plan: Path | None = None
    """Plan file, or what `offramp plan --json` printed. None: the planner's."""
    strategy: StrategyName | None = None
    """Strategy of the planner's plan: best, stock, early-exit, e3, serial, apparate, pame. None: best."""
    duration_s: float = Field(default=60.0, alias="duration")
    """Seconds in which requests arrive."""
    warm_up_s: float = Field(default=1.0, alias="warm_up")
    """Seconds of them, from the start, that are not counted."""
    records: Path | None = None
    """Exit records, .npz, .csv or .tsv. None: inputs that leave as the survival says."""
    thresholds: str | None = None
    """With records: leave at this score, at 0=0.4,3=0.2 by ramp, or by a calibration.json. None: the plan's policy."""
    lengths: str | None = None
    """Tokens of inputs: a file, one a line or exit records, or a normal distribution, mean,variance,low,high. None: the
    problem's."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs of every request."""
    num_ingresses: int = Field(default=1, ge=1, le=MOST_INGRESSES, alias="ingresses")
    """Replicas of the ingress."""
    overlap_below: int | None = Field(default=None, ge=1)
    """Run a device's next batch beside one of fewer inputs. None: as the plan says."""
    admission: bool = True
    """Refuse at once what would be late."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Of everything drawn at random."""

    @model_validator(mode="after")
    def _agrees(self) -> SimulateJob:
        if self.plan is not None and self.strategy is not None:
            raise InputError("--plan and --strategy exclude each other: a file's plan is not the planner's")
        if not 0 < self.duration_s < math.inf:
            raise InputError(f"--duration {self.duration_s:g}; a finite number of seconds above 0 is needed")
        if not 0 <= self.warm_up_s < self.duration_s:
            raise InputError(
                f"--warm-up {self.warm_up_s:g}; seconds from 0 on are needed, fewer than the {self.duration_s:g} of "
                "--duration"
            )
        return self
