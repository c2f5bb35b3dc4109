"""A service file that a test may change, and its model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.settings import ControlSettings
from earlyexit.errors import InputError
from offramp.spec.file import Service, read_service
from optimizer.plan import PolicySpec
from optimizer.plan_file import parse_plan, write_plan
from optimizer.problem import PlanProblem
from tests.offramp.service.service_folders import write_chain, write_model

TABLE = {"batch": [1, 2], "block_s": [[0.01, 0.02]] * 3, "ramp_s": [[0.001, 0.002], [0.003, 0.004]]}
CHAIN_TABLE = {"batch": [1, 2], "block_s": [[0.01, 0.02]] * 2 + [[0.1, 0.2]] * 3, "ramp_s": [[0.001, 0.002]] * 4}
"""Of a small network of two blocks before the model."""


class Files:
    """A service file and its model's folder; what is given takes the place of what the file says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.path = folder / "service.yaml"

    def write(self, **parts: Any) -> Path:
        document: dict[str, Any] = {
            "schema_version": 1,
            "name": "demo",
            "model": {"folder": "model", "latency": {"cpu": TABLE}},
            "slo": {"latency_s": 1.0, "slack": 0.2},
            "cluster": {"devices": {"cpu": {"count": 4}}, "link": {"bandwidth_bytes_per_s": 1e6, "delay_s": 0.001}},
        }
        self.path.write_text(yaml.safe_dump(document | parts, sort_keys=False), encoding="utf-8")
        return self.path

    def read(self, **parts: Any) -> Service:
        return read_service(self.write(**parts))

    def write_plan(self, *, policy: dict[str, Any] | None = None, ramps: Sequence[int] = (), **stage: Any) -> None:
        """A plan of one split for all blocks, in plan.yaml."""
        split = {"first": 0, "end": 3, "batch": 2, "ramps": list(ramps)}
        write_plan(parse_plan({"stages": [{"splits": [split]} | stage], "policy": policy}), self.folder / "plan.yaml")

    def write_chain(self) -> Path:
        """A chain of a small network and the model, in the folder `cascade`."""
        small = write_model(self.folder / "small", num_blocks=2, name="s")
        return write_chain(self.folder / "cascade", small, self.model)

    def refused(self, **parts: Any) -> tuple[int, str]:
        """The line and the words of a refusal."""
        with pytest.raises(InputError) as refusal:
            self.read(**parts)
        where, _, words = str(refusal.value).partition(": ")
        name, _, line = where.rpartition(":")
        assert name == str(self.path)
        return int(line), words

    def line_of(self, text: str) -> int:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return next(number for number, line in enumerate(lines, start=1) if text in line)


def control_of(service: Service) -> ControlSettings:
    assert service.settings.control is not None
    return service.settings.control


def problem_of(service: Service) -> PlanProblem:
    return control_of(service).problem


def policy_of(service: Service) -> PolicySpec:
    assert service.settings.plan.policy is not None
    return service.settings.plan.policy


def emulated(scale: float = 1.0, count: int = 4, **model: Any) -> dict[str, Any]:
    """The parts of a service on emulated accelerators."""
    return {
        "model": {"folder": "model", "latency": {"emulated:V100": TABLE}} | model,
        "cluster": {
            "devices": {"emulated:V100": {"count": count}},
            "link": {"bandwidth_bytes_per_s": 1e6, "delay_s": 0.001},
            "time_scale": scale,
        },
    }
