"""`offramp forecast`: what the next window will show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offramp.cli.options import AsJson, above_zero, make_table, show

if TYPE_CHECKING:
    from rich.table import Table


def forecast(
    series: Annotated[
        Path,
        typer.Argument(help="Past windows, oldest first: .json, or .csv with columns inputs, 0, 1, ..."),
    ],
    coverage: Annotated[float, typer.Option(help="Chance that a level lies in its interval.")] = 0.8,
    window_s: Annotated[
        float | None, typer.Option(callback=above_zero, help="Length of a window; given, the rate is forecast too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the next window's survival at every block, with intervals."""
    from offramp.commands.forecast import forecast_document, rate_document, read_series, window_rates
    from profiles.forecast import forecast_survival
    from profiles.rates import forecast_rate

    history = read_series(series)
    found = forecast_document(forecast_survival(history, coverage=coverage))
    if window_s is not None:
        rates_W = window_rates(history, window_s)
        found["rate"] = rate_document(forecast_rate(rates_W, coverage=coverage, window_s=window_s))
    if as_json:
        print(json.dumps(found))
        return
    show(forecast_table(found))
    if "rate" in found:
        print(rate_text(found["rate"], found["coverage"]))


def forecast_table(forecast: dict[str, Any]) -> Table:
    """One row per block; `forecast` as `offramp.commands.forecast.forecast_document` gives it.

    A block's ramp is the one before it, which decides which inputs reach it.
    """
    interval = f"{forecast['coverage']:.0%} interval"
    names = ("block", "survival", interval, "go on at ramp", interval, "method")
    caption = interval_text(forecast["inputs_to_come"])
    table = make_table(*names, title="Next window", caption=caption, narrow=True)
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
    """The rate in one line; `rate` as `offramp.commands.forecast.rate_document` gives it."""
    high = "endless" if rate["high"] is None else f"{rate['high']:.1f}"
    method = ": ".join(filter(None, (rate["method"], rate["reason"])))
    return f"rate: {rate['rate_rps']:.1f}/s, {coverage:.0%} interval {rate['low'] or 0:.1f}-{high} ({method})"
