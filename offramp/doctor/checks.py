"""Every check by its name, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping

from offramp.doctor import hardware, network, software, targets
from offramp.doctor.finding import Check, Finding
from offramp.doctor.machine import Machine

CHECKS: Mapping[str, Check] = {
    "python": software.python,
    "packages": software.packages,
    "pins": software.pins,
    "torch": software.torch,
    "minilm": software.minilm,
    "haproxy": software.haproxy,
    "cores": hardware.cores,
    "bfloat16": hardware.bfloat16,
    "gpu": hardware.gpus,
    "memory": hardware.memory,
    "shared memory": hardware.shared_memory,
    "disk": hardware.disk,
    "open files": hardware.open_files,
    "left haproxy": network.left_haproxies,
    "ports": network.ports,
    "ray": network.ray,
    "ray token": network.token,
    "ray files": network.ray_files,
    "data": targets.data,
    "given": targets.given,
}


def examine(machine: Machine) -> dict[str, tuple[Finding, ...]]:
    """What every check says of the machine; one with nothing to say is left out."""
    found = {name: tuple(check(machine)) for name, check in CHECKS.items()}
    return {name: findings for name, findings in found.items() if findings}


def has_failed(findings: Mapping[str, tuple[Finding, ...]]) -> bool:
    """Whether a service could not run."""
    return any(each.verdict == "failed" for group in findings.values() for each in group)
