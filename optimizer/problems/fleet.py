"""Several models that share the accelerators of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from earlyexit.errors import PlanError
from optimizer.problems.problem import PlanProblem, device_names
from profiles.table import FloatArray


class FleetModel(NamedTuple):
    """A model of a fleet."""

    problem: PlanProblem
    """Its devices are those of the whole fleet, and its objective is the highest rate of a single chain."""
    rate_per_s: float
    """Requests per second at a share of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Models (M) that share the accelerators (C) of a cluster. Each gets the same multiple of its rate, the *share*.

    Latencies of all accelerator types must be known for all models.
    """

    models: Mapping[str, FleetModel]
    """By name."""
    most_chains: int = 1
    """Largest number of parallel chains of a model."""

    def __post_init__(self) -> None:
        for name, (problem, _) in self.models.items():
            own = {"generation": problem.generation, "networks": problem.networks, "ingress": problem.ingress}
            for field, value in {**own, "budget": problem.budget_usd_per_hour}.items():
                if value not in (None, ()):
                    raise PlanError(f"model {name!r} has {field}, which fleets do not support", at=(name,))
            if problem.devices != self.problems[0].devices:
                raise PlanError(f"model {name!r} has devices of its own, but a fleet shares them", at=(name,))

    @property
    def problems(self) -> tuple[PlanProblem, ...]:
        return tuple(model.problem for model in self.models.values())

    @property
    def rate_M(self) -> FloatArray:
        return np.array([model.rate_per_s for model in self.models.values()])

    @property
    def names(self) -> tuple[str, ...]:
        """The accelerator types."""
        return device_names(self.problems[0])

    @property
    def count_C(self) -> FloatArray:
        return np.array([float(self.problems[0].devices[name].count) for name in self.names])
