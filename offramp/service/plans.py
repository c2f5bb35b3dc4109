"""Which plan `offramp serve` was asked for: a built-in one, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.devices import find_device
from earlyexit.errors import InputError, PlanError
from earlyexit.store import read_card
from offramp.jobs.calibration import read_calibration
from optimizer.plan import early_exit_plan, serial_plan, stock_plan
from optimizer.plan_file import ModelShape, read_plan

if TYPE_CHECKING:
    from optimizer.plan import Plan

BUILT_IN = ("stock", "early-exit", "serial")
BATCH = 32
REPLICAS = 1
DEVICE = "cpu"


def resolve_plan(
    plan: str, model: Path, *, batch: int | None = None, replicas: int | None = None, device: str | None = None
) -> Plan:
    """A built-in plan, from the model's calibration, or the plan of a file; None stands for the built-in's default.

    Raises ModelFolderError, PlanError, or InputError for numbers that a file's plan has of its own.
    """
    if plan in BUILT_IN:
        return _built_in(plan, model, batch=batch or BATCH, replicas=replicas or REPLICAS, device=device or DEVICE)
    card = read_card(model)
    if not Path(plan).is_file():
        raise PlanError(f"--plan {plan}: no such file; built in are {', '.join(BUILT_IN)}")
    given = {"--batch": batch, "--replicas": replicas, "--device": device}
    ignored = [option for option, value in given.items() if value is not None]
    if ignored:
        raise InputError(f"{' and '.join(ignored)}: only for built-in plans; {plan} says it for every stage and split")
    return read_plan(Path(plan), ModelShape(num_blocks=card.num_blocks, ramps=card.ramps))


def _built_in(name: str, model: Path, *, batch: int, replicas: int, device: str) -> Plan:
    card = read_card(model)
    find_device(device)
    if name == "stock":
        return stock_plan(card.num_blocks, batch=batch, device=device, replicas=replicas)
    make = early_exit_plan if name == "early-exit" else serial_plan
    calibration = read_calibration(model)
    ramps = tuple(sorted(calibration.thresholds))
    return make(card.num_blocks, ramps, calibration.policy_spec(), batch=batch, device=device, replicas=replicas)
