"""Builds the settings of the Ray Serve application, for `offramp serve` and for service files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster.devices import find_device
from deployments.choices import IngressSettings, ModelSettings
from deployments.keys import KEYS_VARIABLE, AccessSettings
from deployments.settings import ServeSettings
from earlyexit.errors import InputError, PlanError
from earlyexit.network.store import ModelCard, read_card
from offramp.commands.folders import read_calibration
from offramp.spec.documents import BUILT_IN, ApplicationDocument
from optimizer.plans.plan import Plan, early_exit_plan, serial_plan, stock_plan
from optimizer.plans.plan_file import ModelShape, read_plan


def application_settings(
    document: ApplicationDocument, plan: Plan, base: Path = Path(), **planned: Any
) -> ServeSettings:
    """Returns the settings of an application; paths in the document are relative to `base`.

    `planned`: further fields of the settings, which only a service file has.
    """
    model, ingress, access, repository = document.model, document.ingress, document.access, document.repository
    folder = Path(os.path.realpath(base / model.folder))
    if access is not None and access.keys_file is not None:
        access = access.model_copy(update={"keys_file": os.path.realpath(base / access.keys_file)})
    if repository.folder is not None:
        repository = repository.model_copy(update={"folder": os.path.realpath(base / repository.folder)})
    return ServeSettings(
        model=str(folder),
        plan=plan,
        app=document.name,
        route_prefix=ingress.route_prefix
        or ("/" if model.version == "1" else f"/v2/models/{read_card(folder).name}/versions/{model.version}"),
        repository=repository,
        ingress_replicas=ingress.replicas,
        tracing=document.tracing,
        access=access,
        **model.model_dump(include=set(ModelSettings.model_fields)),
        **ingress.model_dump(include=set(IngressSettings.model_fields)),
        **planned,
    )


def checked_card(folder: Path, settings: ModelSettings) -> ModelCard:
    """Returns a model's card; raises InputError or ModelFolderError for settings that do not fit the model."""
    card = read_card(folder)
    for name in () if card.generates else ("kv_tokens", "kv_fill"):
        value = getattr(settings, name)
        if value is not None and name in settings.model_fields_set:
            raise InputError(
                f"{name} (--{name.replace('_', '-')}) {value}: only models that generate keep keys and values, and "
                f"{card.name!r} does not generate; leave it out"
            )
    if settings.dtype != "float32":
        for each in card.network_folders(folder):
            read_card(each).check_dtype(settings.dtype)
    return card


def resolve_plan(plan: str, model: Path, **given: Any) -> Plan:
    """Returns a built-in plan with the model's calibration, or the plan of a file.

    `given`: batch (default 32), replicas (1) and device (cpu) of a built-in plan, if they are set. Raises
    ModelFolderError, PlanError, or InputError if they are given with a plan file.
    """
    card = read_card(model)
    if plan in BUILT_IN:
        shape = {"batch": 32, "replicas": 1, "device": "cpu", **given, "networks": card.chain.networks}
        find_device(shape["device"])
        if plan == "stock" or not card.ramps:  # without ramps all of them are equal
            return stock_plan(card.num_blocks, **shape)
        make = early_exit_plan if plan == "early-exit" else serial_plan
        calibration = read_calibration(model)
        return make(card.num_blocks, tuple(sorted(calibration.thresholds)), calibration.policy_spec(), **shape)
    if not Path(plan).is_file():
        reason = "is a folder, not a file" if Path(plan).is_dir() else "no such file"
        raise PlanError(f"--plan {plan}: {reason}; built-in plans are {', '.join(BUILT_IN)}")
    if given:
        options_text = " and ".join(f"--{name}" for name in given)
        raise InputError(f"{options_text}: only for built-in plans; {plan} sets this for every stage and split")
    return read_plan(Path(plan), ModelShape.of(card))


def with_environment_keys(access: AccessSettings | None) -> AccessSettings | None:
    """Returns the access settings, with the API keys of the environment variable if they name none and it is set."""
    if KEYS_VARIABLE not in os.environ or (access is not None and access.has_keys):
        return access
    return (access or AccessSettings()).model_copy(update={"keys_env": KEYS_VARIABLE})
