"""A forecast as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def forecast_table(forecast: dict[str, Any]) -> Table:
    """One row per block; `forecast` as `offramp.jobs.forecasting.forecast_document` gives it.

    A block's ramp is the one before it, which decides who reaches it.
    """
    interval = f"{forecast['coverage']:.0%} interval"
    names = ("block", "survival", interval, "go on at ramp", interval, "method")
    caption = interval_text(forecast["inputs_to_come"])
    table = Table(*names, title="Next window", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    low, high = forecast["survival_low"], forecast["survival_high"]
    for block, share in enumerate(forecast["survival"]):
        ramp = forecast["ramps"][block - 1] if block else None
        table.add_row(
            str(block),
            f"{share:.3f}",
            f"{low[block]:.3f}-{high[block]:.3f}",
            "-" if ramp is None else f"{ramp['ramp']}: {ramp['go_on']:.3f}",
            "-" if ramp is None else f"{ramp['low']:.3f}-{ramp['high']:.3f}",
            "-" if ramp is None else ": ".join(filter(None, (ramp["method"], ramp["reason"]))),
        )
    return table


def interval_text(inputs_to_come: float | None) -> str:
    """What the intervals of survival and of the shares that go on are intervals of."""
    if inputs_to_come is None:
        return "Intervals are of the level: a window of few inputs scatters around it in addition; jumps are in none."
    return f"Intervals are of what {inputs_to_come:g} inputs will show; jumps are in none."


def rate_text(rate: dict[str, Any], coverage: float) -> str:
    """The rate in one line; `rate` as `offramp.jobs.forecasting.rate_document` gives it."""
    high = "endless" if rate["high"] is None else f"{rate['high']:.1f}"
    method = ": ".join(filter(None, (rate["method"], rate["reason"])))
    return f"rate: {rate['rate_rps']:.1f}/s, {coverage:.0%} interval {rate['low'] or 0:.1f}-{high} ({method})"
