"""What a Ray cluster serves, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from cluster.devices import EMULATED


def status_tables(found: Mapping[str, Any]) -> list[Table]:
    """Applications with their deployments, and the plan in force where a service said it."""
    tables = [_applications(found["applications"])]
    plan = found["plan"]
    stages = _stages(plan)
    if stages:
        tables.append(_plan(stages, f"Plan in force: {plan['reason']}" if plan.get("reason") else "Plan in force"))
    return tables


def _applications(applications: list[dict[str, Any]]) -> Table:
    table = Table(
        "application", "deployment", "status", "replicas", title=None if applications else "Nothing is served"
    )
    for each in applications:
        table.add_row(each["name"], "", f"{each['status']} {each['message']}".strip(), "")
        for deployment in each["deployments"]:
            name = f"{deployment['name']} (emulated)" if deployment["emulated"] else deployment["name"]
            replicas = f"{deployment['replicas']} of {deployment['wanted']}"
            table.add_row("", name, deployment["status"], replicas)
    return table


def _stages(plan: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Of a plan document, or of one that stands beside what else its service says."""
    while isinstance(plan, Mapping) and "stages" not in plan:  # somebody else may listen there
        plan = plan.get("plan")
    return list(plan["stages"]) if isinstance(plan, Mapping) else []


def _plan(stages: list[dict[str, Any]], title: str) -> Table:
    table = Table("stage", "device", "replicas", "blocks", "batch", "ramps", title=title)
    for index, stage in enumerate(stages):
        device = f"{stage['device'].removeprefix(EMULATED)} (emulated)" if _emulated(stage) else stage["device"]
        for position, split in enumerate(stage["splits"]):
            first = (str(index), device, str(stage["replicas"])) if position == 0 else ("", "", "")
            blocks = f"{split['first']} to {split['end'] - 1}"
            table.add_row(*first, blocks, str(split["batch"]), ", ".join(map(str, split["ramps"])) or "-")
    return table


def _emulated(stage: Mapping[str, Any]) -> bool:
    return bool(stage["device"].startswith(EMULATED))
