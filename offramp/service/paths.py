"""A service whose files are elsewhere on the nodes than here: on a mounted volume, in an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from deployments.settings import ServeSettings
from optimizer.plan import PolicySpec

MODEL = "model"


def at_folder(settings: ServeSettings, folder: PurePosixPath) -> ServeSettings:
    """The settings of nodes that find everything in one folder: `model/`; beside it other exit records, state, keys."""
    model = Path(settings.model)
    control = settings.control
    if control is not None:
        state = str(folder / Path(control.state).name)
        policy = _moved_policy(control.policy, model, folder)
        control = control.model_copy(update={"state": state, "policy": policy})
    access = settings.access
    if access is not None and access.keys_file is not None:
        access = access.model_copy(update={"keys_file": str(folder / Path(access.keys_file).name)})
    plan = settings.plan
    if plan.policy is not None:
        plan = replace(plan, policy=_moved_policy(plan.policy, model, folder))
    moved = {"model": str(folder / MODEL), "plan": plan, "control": control, "access": access}
    return settings.model_copy(update=moved)


def _moved_policy(policy: PolicySpec, model: Path, folder: PurePosixPath) -> PolicySpec:
    if policy.records is None:
        return policy
    records = Path(policy.records)
    inside = folder / MODEL / records.relative_to(model) if records.is_relative_to(model) else folder / records.name
    return replace(policy, records=str(inside))
