"""Checks of the model folders and service files that were named, and of the data folder."""

from __future__ import annotations

from collections.abc import Iterator

from offramp.doctor.finding import Finding, failed, ok, warning
from offramp.doctor.machine import Machine, Target


def data(machine: Machine) -> Iterator[Finding]:
    """OFFRAMP_DATA: data sets of experiments; a service needs none."""
    if machine.data is None:
        yield ok("OFFRAMP_DATA is not set; only experiments read it")
    elif machine.data_found:
        yield ok(machine.data)
    else:
        yield warning(f"OFFRAMP_DATA={machine.data} is no folder", "unset it, or name one; only experiments read it")


def given(machine: Machine) -> Iterator[Finding]:
    """What was named on the command line."""
    for target in machine.targets:
        yield _target(target, machine)


def _target(target: Target, machine: Machine) -> Finding:
    if target.problem is not None:
        return failed(f"{target.path}: {target.problem}", "mend what it says; offramp serve would refuse it")
    words = f"{target.path}: {target.words}"
    if target.gpus > len(machine.hardware.gpus):
        return failed(
            f"{words}; needs {target.gpus} GPUs, {len(machine.hardware.gpus)} are here",
            "serve it where they are (offramp deploy), or change the cluster that the file describes",
        )
    if not target.calibrated:
        return warning(
            f"{words}; not calibrated, so no input leaves early",
            f"offramp calibrate {target.path} --data VALIDATION_FILE, or serve with --plan stock",
        )
    return ok(words)
