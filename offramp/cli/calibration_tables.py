"""Thresholds and what they do, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from offramp.cli.options import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from profiles.scores import Score

TASK_FIGURES = {"pck": "PCK", "pixel_accuracy": "pixel accuracy", "mean_iou": "mean IoU"}
"""What tasks with maps tell beside accuracy, which is a mean over inputs."""


def calibration_tables(policy: Score, report: dict[str, Any]) -> list[Table]:
    """One table of thresholds and survival by block, one of figures; `report` as `offramp calibrate` builds it."""
    beside = [_beside(report["beside"])] if "beside" in report else []
    return [_by_block(policy, report), _figures(report), *beside]


def _beside(reports: Mapping[str, dict[str, Any]]) -> Table:
    """Calibrations of which plans may pick another one."""
    table = make_table("in the folder", "ramps after blocks", "mean blocks", "worst of all subsets", title="Besides")
    for name, report in reports.items():
        tested = report["tested"]
        worst = tested["worst_agreement"] if "worst_agreement" in tested else tested["worst_harm"]
        ramps = ", ".join(map(str, report["thresholds"])) or "-"
        table.add_row(name, ramps, f"{tested['mean_blocks']:.2f} of {tested['num_blocks']}", f"{worst:.4f}")
    return table


def _by_block(policy: Score, report: dict[str, Any]) -> Table:
    confidences = report.get("confidences")
    above = [] if confidences is None else ["of values above"]
    table = make_table("block", f"leave at {policy}", *above, "survival", title="By block")
    thresholds = report["thresholds"]
    for block, share in enumerate(report["tested"]["survival"]):
        counted = [] if confidences is None else [_share(confidences.get(block))]
        table.add_row(str(block), leave_text(policy, thresholds.get(block)), *counted, f"{share:.3f}")
    return table


def leave_text(policy: Score, threshold: float | None) -> str:
    """A ramp's threshold in a table; in a word where no score passes it, or every one."""
    from profiles.scores import SCORES as SCORE_RULES

    if threshold is None:
        return "-"
    rule = SCORE_RULES[policy]
    if threshold == rule.never:
        return "never"
    passed = threshold <= rule.lowest if rule.larger_is_surer else threshold >= rule.highest
    return "always" if passed else f"{threshold:.4f}"


Figure = Callable[[dict[str, Any]], str]
_AGREEMENT: dict[str, Figure] = {
    "with the worst of all subsets of ramps": lambda figures: _share(figures.get("worst_agreement")),
}
_HARM: dict[str, Figure] = {
    "wrong where the full model is right": lambda figures: _share(figures["harm"]),
    "that with the worst of all subsets of ramps": lambda figures: _share(figures.get("worst_harm")),
}
_SEQUENCES: dict[str, Figure] = {
    "sequences": lambda figures: f"{figures['sequences']}",
    "mean share of their tokens that may differ": lambda figures: _share(figures.get("sequence_loss")),
    "sequences that are the full model's": lambda figures: _share(figures.get("same_sequences")),
}


def _figures(report: dict[str, Any]) -> Table:
    columns = [name for name in ("tested", "test") if name in report]
    table = make_table("", *({"tested": "calibration", "test": "test"}[name] for name in columns), title="Expected")
    rows: dict[str, Figure] = {
        "inputs": lambda figures: f"{figures['inputs']}",
        **(_SEQUENCES if "sequences" in report[columns[0]] else {}),
        "agreement with the full model": lambda figures: f"{figures['agreement']:.4f}",
        **(_HARM if "harm" in report[columns[0]] else _AGREEMENT),
        "accuracy": lambda figures: _share(figures["accuracy"]),
        "accuracy of the full model": lambda figures: _share(figures["full_accuracy"]),
        "mean blocks": lambda figures: f"{figures['mean_blocks']:.2f} of {figures['num_blocks']}",
    }
    for label, text in rows.items():
        table.add_row(label, *(text(report[name]) for name in columns))
    for figure, label in TASK_FIGURES.items():
        if figure in report[columns[0]]:
            table.add_row(label, *(_share(report[name][figure]) for name in columns))
            table.add_row(f"{label} of the full model", *(_share(report[name][f"full_{figure}"]) for name in columns))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
