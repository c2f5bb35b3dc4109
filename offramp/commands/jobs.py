"""The options of `offramp plan`, `what-if`, `simulate` and `profile`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from cluster.devices import find_device
from earlyexit.backends.backends import BackendName
from earlyexit.errors import InputError
from offramp.commands.order import OfOrder

StrategyName = Literal["best", "stock", "early-exit", "e3", "serial", "apparate", "pame"]
"""As `optimizer.decision.Strategy`, which a shell that completes does not wait for."""
MOST_INGRESSES = 1000


class OfProblem(BaseModel):
    """A problem file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    problem: Path = Field(json_schema_extra={"argument": "PROBLEM"})
    """Plan problem, YAML or JSON."""


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


THREADS_PER_CPU = 4
"""More threads only wait for each other; tens of thousands end the process."""
CONTEXT = 64
"""Tokens that a sequence has come to before a step."""


class ProfileJob(BaseModel):
    """Everything that decides what is measured. Raises PlanError or InputError for what cannot be measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """cpu, cuda, or the accelerator type that cuda is here."""
    backend: BackendName = "torch"
    """torch, onnx, or auto: whichever is faster here."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 or bfloat16."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Batch sizes."""
    lengths: tuple[int, ...] | None = None
    """Tokens per input, special tokens included. Of a decoder 1 is a step of each sequence; more are prompts, of as
    many tokens as inputs of that length have together. None: 16,32,64; of decoders 1,16, where inputs have none 1."""
    context: int | None = Field(default=None, ge=1)
    """Of decoders: tokens that came before a step, on which it depends how many keys and values are read. None: 64."""
    repeats: int = Field(default=7, ge=1)
    """Rounds, over which figures are medians."""
    threads: int = Field(default=1, ge=1)
    """Threads of a CPU replica."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Of everything drawn at random."""

    @field_validator("batches", "lengths", mode="before")
    @classmethod
    def _ascend(cls, given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, str):
            try:
                given = tuple(sorted({int(part) for part in given.split(",")}))
            except ValueError as error:
                raise InputError(f"--{info.field_name} {given!r}; numbers separated by commas are needed") from error
        if given is not None and (not given or min(given) < 1 or list(given) != sorted(set(given))):
            raise InputError(f"{info.field_name} must ascend from at least 1, not {list(given)}")
        return given

    @model_validator(mode="after")
    def _can_be_measured(self) -> ProfileJob:
        find_device(self.device)
        most = THREADS_PER_CPU * (os.cpu_count() or 1)
        if self.threads > most:
            raise InputError(f"threads must be at most {most}, {THREADS_PER_CPU} per CPU here, not {self.threads}")
        return self

    @property
    def steps_after(self) -> int:
        """Tokens of context."""
        return CONTEXT if self.context is None else self.context
