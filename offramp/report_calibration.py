"""Calibration results as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table


def calibration_tables(policy: str, report: dict[str, Any]) -> list[Table]:
    """One table of thresholds and survival by block, one of figures; `report` as `offramp calibrate` builds it."""
    return [_by_block(policy, report), _figures(report)]


def no_threshold_text(*, budget: float, confidence: float) -> str:
    """What to say of a calibration that accepted nothing."""
    return (
        f"no threshold keeps a budget of {budget:.4g} with confidence {confidence:.4g}: no input would leave early; "
        "a larger budget, more rows or better ramps (train --joint) may help"
    )


def _by_block(policy: str, report: dict[str, Any]) -> Table:
    table = Table("block", f"leave at {policy}", "survival", title="By block")
    thresholds = report["thresholds"]
    for block, share in enumerate(report["tested"]["survival"]):
        threshold = f"{thresholds[block]:.4f}" if block in thresholds else "-"
        table.add_row(str(block), threshold, f"{share:.3f}")
    return table


def _figures(report: dict[str, Any]) -> Table:
    columns = [name for name in ("tested", "test") if name in report]
    table = Table("", *({"tested": "calibration", "test": "test"}[name] for name in columns), title="Expected")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "inputs": lambda figures: f"{figures['inputs']}",
        "agreement with the full model": lambda figures: f"{figures['agreement']:.4f}",
        "accuracy": lambda figures: f"{figures['accuracy']:.4f}",
        "accuracy of the full model": lambda figures: f"{figures['full_accuracy']:.4f}",
        "mean blocks": lambda figures: f"{figures['mean_blocks']:.2f} of {figures['num_blocks']}",
    }
    for label, text in rows.items():
        table.add_row(label, *(text(report[name]) for name in columns))
    return table
