"""Calibration results as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from profiles.scores import SCORES, Score


def calibration_tables(policy: Score, report: dict[str, Any]) -> list[Table]:
    """One table of thresholds and survival by block, one of figures; `report` as `offramp calibrate` builds it."""
    return [_by_block(policy, report), _figures(report)]


def no_threshold_text(*, budget: float, confidence: float) -> str:
    """What to say of a calibration that accepted nothing."""
    return (
        f"no threshold keeps a budget of {budget:.4g} with confidence {confidence:.4g}: no input would leave early; "
        "a larger budget, more rows or better ramps (train --joint) may help"
    )


def _by_block(policy: Score, report: dict[str, Any]) -> Table:
    table = Table("block", f"leave at {policy}", "survival", title="By block")
    thresholds = report["thresholds"]
    for block, share in enumerate(report["tested"]["survival"]):
        table.add_row(str(block), _threshold(policy, thresholds.get(block)), f"{share:.3f}")
    return table


def _threshold(policy: Score, threshold: float | None) -> str:
    if threshold is None:
        return "-"
    return "never" if threshold == SCORES[policy].never else f"{threshold:.4f}"


def _figures(report: dict[str, Any]) -> Table:
    columns = [name for name in ("tested", "test") if name in report]
    table = Table("", *({"tested": "calibration", "test": "test"}[name] for name in columns), title="Expected")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "inputs": lambda figures: f"{figures['inputs']}",
        "agreement with the full model": lambda figures: f"{figures['agreement']:.4f}",
        "with the worst of all subsets of ramps": lambda figures: _share(figures.get("worst_agreement")),
        "accuracy": lambda figures: _share(figures["accuracy"]),
        "accuracy of the full model": lambda figures: _share(figures["full_accuracy"]),
        "mean blocks": lambda figures: f"{figures['mean_blocks']:.2f} of {figures['num_blocks']}",
    }
    for label, text in rows.items():
        table.add_row(label, *(text(report[name]) for name in columns))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
