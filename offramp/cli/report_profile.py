"""A measured latency profile as a table, times in milliseconds."""

from __future__ import annotations

from typing import Any

from rich.table import Table

NOISY = 0.05
"""Spread above which something else used the machine."""


def profile_table(figures: dict[str, Any]) -> Table:
    """One row per length and batch size; `figures` as `offramp.jobs.profiling.profile_figures` gives them."""
    title = f"{figures['model']} on {figures['device']} ({figures['device_name']}), {figures['backend']}"
    table = Table("length", "batch", "model ms", "inputs/s", "block ms", "ramp ms", title=title)
    for row in figures["rows"]:
        ramp = "-" if row["ramp_s"] is None else f"{row['ramp_s'] * 1e3:.3f}"
        table.add_row(
            str(row["length"]),
            str(row["batch"]),
            f"{row['model_s'] * 1e3:.2f}",
            f"{row['batch'] / row['model_s']:.0f}",
            f"{row['block_s'] * 1e3:.3f}",
            ramp,
        )
    return table


def noise_text(figures: dict[str, Any]) -> str:
    """How noisy the machine was, in one line, or two where it was too noisy."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    if figures["spread"] <= NOISY:
        return text
    return (
        f"{text}\nwarning: a spread above {NOISY:.0%}: something else used the machine; measure again when it is idle"
    )
