"""What `offramp simulate` is asked for, and what is read and checked before anything is played."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from earlyexit.engine.order import OrderSpec
from earlyexit.errors import InputError
from offramp.commands.simulated_inputs import Inputs, PlayedPlan, Thresholds
from optimizer.decision import Strategy
from optimizer.evaluate import Evaluation
from simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateJob:
    """What is asked for; refuses numbers that contradict each other with an InputError that names the option."""

    problem: Path
    plan: Path | None = None
    """None: the planner's."""
    strategy: Strategy = "best"
    arrivals: str
    duration_s: float = 60.0
    warm_up_s: float = 1.0
    """Requests that arrive before are served and not counted."""
    records: Path | None = None
    thresholds: Thresholds | None = None
    inputs_per_request: int = 1
    num_ingresses: int = 1
    lengths: str | None = None
    """A file of lengths, or `mean,variance,low,high`; None: the problem's, if it has any."""
    overlap_below: int | None = None
    """None: as the plan says."""
    order: OrderSpec | None = None
    """None: as the plan says, or the problem whose plan the planner makes."""
    admission: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < math.inf:
            raise InputError(f"--duration {self.duration_s:g}; a finite number of seconds above 0 is needed")
        if not 0 <= self.warm_up_s < self.duration_s:
            raise InputError(
                f"--warm-up {self.warm_up_s:g}; seconds from 0 on are needed, fewer than the {self.duration_s:g} of "
                "--duration"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """All that is needed to run, read and checked."""

    job: SimulateJob
    scenario: Scenario
    played: PlayedPlan
    predicted: Evaluation
    """By the cost model, with the problem's survival."""
    inputs: Inputs
    notes: tuple[str, ...]
