"""Accelerator types that a plan may name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from earlyexit.data.strict import checked
from earlyexit.errors import PlanError

# Values of Ray's `accelerator_type`. Ray detects an A6000 as RTX-A6000, so a node with one must set the type itself.
RAY_ACCELERATORS = ("K80", "P100", "V100", "T4", "A10G", "A100", "A30", "A6000", "L4", "L40S", "H100", "H200", "B200")
EMULATED = "emulated:"
"""Prefix of emulated accelerators, which take their times from a latency profile."""
OWN_NAME = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
"""Pattern of user-defined names, which become part of Serve deployment names and, in lower case, Kubernetes names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One accelerator type."""

    name: str
    torch_device: str
    """The torch device inside a replica that has this accelerator."""
    actor_options: dict[str, Any] = field(default_factory=dict)
    """Ray actor options of a replica."""

    @property
    def emulated(self) -> bool:
        return self.name.startswith(EMULATED)


def find_device(name: str) -> DeviceType:
    """Returns the accelerator type with a name; raises PlanError with the known names.

    The number of emulated accelerators on a node is a custom Ray resource with the same name. An emulated accelerator
    may have a user-defined name: it is then described by its profile and price only.
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


DeviceName = Annotated[str, checked(lambda name, _: find_device(name).name)]
"""The name of an accelerator type in a file."""
