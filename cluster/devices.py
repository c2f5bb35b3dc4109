"""Accelerator types that a plan may name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from earlyexit.errors import PlanError

# Names by which Ray marks nodes (`accelerator_type`) and places; one with A6000s must be told to, Ray says RTX-A6000.
RAY_ACCELERATORS = ("K80", "P100", "V100", "T4", "A10G", "A100", "A30", "A6000", "L4", "L40S", "H100", "H200", "B200")
EMULATED = "emulated:"
"""Prefix of emulated accelerators, whose times are those of a latency profile."""
OWN_NAME = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
"""Names are parts of names of deployments, and in lower case of Kubernetes' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One accelerator type."""

    name: str
    torch_device: str
    """Torch's name of it, inside a replica that has one."""
    actor_options: dict[str, Any] = field(default_factory=dict)
    """Ray's options for a replica."""

    @property
    def emulated(self) -> bool:
        return self.name.startswith(EMULATED)


def find_device(name: str) -> DeviceType:
    """The accelerator type of that name; raises PlanError with the known names.

    Nodes say how many emulated ones they have by a Ray resource of that name. An emulated one may have a name of its
    own: nothing is known of it but what profiles and prices say.
    """
    if name == "cpu":
        return DeviceType(name=name, torch_device="cpu", actor_options={"num_cpus": 1})
    if name == "cuda":
        return DeviceType(name=name, torch_device="cuda", actor_options={"num_cpus": 1, "num_gpus": 1})
    if name in RAY_ACCELERATORS:
        options = {"num_cpus": 1, "num_gpus": 1, "accelerator_type": name}
        return DeviceType(name=name, torch_device="cuda", actor_options=options)
    if name.startswith(EMULATED) and name != "emulated:cuda" and re.fullmatch(OWN_NAME, name.removeprefix(EMULATED)):
        return DeviceType(name=name, torch_device="cpu", actor_options={"num_cpus": 0, "resources": {name: 1}})
    known = f"cpu, cuda, {', '.join(RAY_ACCELERATORS)}; {EMULATED} before any but cuda, or a name of your own"
    raise PlanError(f"unknown device {name!r}; known: {known}")
