"""A measured latency profile as a table, times in milliseconds."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def profile_table(figures: dict[str, Any]) -> Table:
    """One row per length and batch size; `figures` as `offramp.profiling.profile_figures` gives them."""
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
