"""Several models that share the accelerators of a cluster, and their file as YAML or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.errors import PlanError
from optimizer.plans.plan_file import MOST_CHAINS
from optimizer.problems.problem import MaximizeRate, MinimizeCost, PlanProblem, Rate, Supply, device_names
from optimizer.problems.problem_file import ProblemFile, check_prices, read_problem
from profiles.table import FloatArray


class FleetModel(NamedTuple):
    """A model of a fleet."""

    problem: PlanProblem
    """It has the devices of the whole fleet, and a single chain. All models maximize the rate, or all minimize the cost
    of `rate_per_s`."""
    rate_per_s: float
    """Requests per second at a share of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Models (M) that share the accelerators (C) of a cluster.

    Each gets the same multiple of its rate, the *share*, which is as high as possible; or each gets its rate, and the
    cost of all is as low as possible. Latencies of all accelerator types must be known for all models.
    """

    models: Mapping[str, FleetModel]
    """By name."""
    most_chains: int = 1
    """Largest number of parallel chains of a model."""

    def __post_init__(self) -> None:
        for name, (problem, _) in self.models.items():
            for field in ("generation", "networks", "ingress", "budget_usd_per_hour"):
                if getattr(problem, field) not in (None, ()):
                    field = field.removesuffix("_usd_per_hour")
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
        return self.problems[0].count_C

    @property
    def is_cost(self) -> bool:
        """Whether the cost is minimized."""
        return self.problems[0].required_per_s is not None

    @property
    def usd_C(self) -> FloatArray:
        """USD per hour of an accelerator if the cost is minimized, else 0."""
        return self.problems[0].usd_C * self.is_cost

    def problem_on(self, model: int, counts: Sequence[int]) -> PlanProblem:
        """Returns the problem of a model that has these numbers of the accelerators for itself."""
        problem = self.problems[model].on(self.names).with_counts(dict(zip(self.names, counts, strict=True)))
        return replace(problem, most_chains=self.most_chains)


class FleetModelDocument(StrictDocument):
    """A model of a fleet."""

    problem: str
    """Its problem file, relative to the fleet's folder. The fleet replaces its devices, objective and most_chains."""
    rate_per_s: Rate
    """Requests per second at a share of 1."""


Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""A model's name, which names its plan file as well."""


class FleetDocument(StrictDocument):
    """A whole fleet file."""

    devices: dict[str, Supply] = Field(min_length=1)
    most_chains: int = Field(MOST_CHAINS, ge=1, le=MOST_CHAINS)
    """Largest number of parallel chains of a model."""
    objective: dict[str, str] | None = None
    """`{minimize: cost}` or, as without it, `{maximize: share}`."""
    models: dict[Name, FleetModelDocument] = Field(min_length=1)


def read_fleet(path: Path) -> tuple[Fleet, Mapping[str, ProblemFile]]:
    """Reads a fleet file and the problem files that it names.

    Raises PlanError with the file, the line, the error and the allowed values.
    """
    source = read_source(path, PlanError)
    document = source.parse(FleetDocument, called="the fleet")
    is_cost, files = document.objective == {"minimize": "cost"}, {}
    with source.errors_at():
        if not any(supply.count for supply in document.devices.values()):
            raise PlanError("no device has a count above 0", at=("devices",))
        if not is_cost and document.objective not in (None, {"maximize": "share"}):
            raise PlanError("the objective must be {maximize: share} or {minimize: cost}", at=("objective",))
        if is_cost:
            check_prices(source)
    for name, model in document.models.items():
        objective = MinimizeCost(rate_per_s=model.rate_per_s) if is_cost else MaximizeRate()
        file = read_problem(path.parent / model.problem)
        with source.errors_at(("models", name)):
            problem = replace(file.problem, devices=document.devices, objective=objective, most_chains=1)
            files[name] = replace(file, problem=problem)
    models = {name: FleetModel(file.problem, document.models[name].rate_per_s) for name, file in files.items()}
    with source.errors_at(("models",)):
        return Fleet(models=models, most_chains=document.most_chains), files
