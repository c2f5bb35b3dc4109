"""Fleets as YAML or JSON: the accelerators of a cluster, and the problem files of the models that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.errors import PlanError
from optimizer.plans.plan_file import MOST_CHAINS
from optimizer.problems.fleet import Fleet, FleetModel
from optimizer.problems.problem import MaximizeRate, Rate, Supply
from optimizer.problems.problem_file import ProblemFile, read_problem


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
    models: dict[Name, FleetModelDocument] = Field(min_length=1)


def read_fleet(path: Path) -> tuple[Fleet, Mapping[str, ProblemFile]]:
    """Reads a fleet file and the problem files that it names.

    Raises PlanError with the file, the line, the error and the allowed values.
    """
    source = read_source(path, PlanError)
    document = source.parse(FleetDocument, called="the fleet")
    if not any(supply.count for supply in document.devices.values()):
        with source.errors_at(("devices",)):
            raise PlanError("no device has a count above 0")
    files = {}
    for name, model in document.models.items():
        file = read_problem(path.parent / model.problem)
        with source.errors_at(("models", name)):
            problem = replace(file.problem, devices=document.devices, objective=MaximizeRate(), most_chains=1)
            files[name] = replace(file, problem=problem)
    models = {name: FleetModel(file.problem, document.models[name].rate_per_s) for name, file in files.items()}
    with source.errors_at(("models",)):
        return Fleet(models=models, most_chains=document.most_chains), files
