"""`offramp forecast`: forecasts the survival and the rate of the next window from past windows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError
from rich.table import Table

from earlyexit.data.images import check_file
from earlyexit.data.strict import StrictDocument
from earlyexit.data.text_tables import open_csv
from earlyexit.errors import DataError, PlanError
from offramp.commands.options import ForecastJob
from offramp.commands.output import make_table, print_result, rate_text
from optimizer.problems.problem import check_survival
from profiles.forecast import SurvivalForecast, forecast_rate, forecast_survival
from profiles.windows import SurvivalHistory

INPUTS = "inputs"
"""Name of the column with the number of inputs of a window."""


class Window(StrictDocument):
    """A past window."""

    inputs: float = Field(ge=0, le=1e15)
    survival: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)
    """Share of the inputs that reach each block."""


def read_series(path: Path) -> SurvivalHistory:
    """Reads past windows, oldest first, from a CSV file; raises DataError with file and line.

    Its columns are `inputs`, `0`, `1`, ... (one per block). An empty row is an unknown window, with NaN inputs.
    """
    check_file(path)
    with open_csv(path) as file:
        rows = csv.reader(file)
        try:
            header = [name.strip() for name in next(rows, [])]
            blocks = [name for name in header if name != INPUTS]
            if header.count(INPUTS) != 1 or not blocks or blocks != list(map(str, range(len(blocks)))):
                raise DataError(f"{path}:1: the columns must be {INPUTS}, 0, 1, ... (one per block), not {header}")
            # A blank line has no cells.
            windows = [_csv_window(row or [""] * len(header), header, f"{path}:{rows.line_num}") for row in rows]
        except csv.Error as error:
            raise DataError(f"{path}:{rows.line_num}: {error}") from error
    inputs_W = np.array([window.inputs if window else np.nan for window in windows])
    if not (inputs_W > 0).any():
        raise DataError(f"{path}: at least one window with inputs is needed")
    return SurvivalHistory(
        survival_WK=np.array([window.survival if window else [1.0] * len(blocks) for window in windows]),
        inputs_WK=np.repeat(inputs_W[:, np.newaxis], len(blocks), axis=1),
        missing_W=~(inputs_W > 0),
    )


def _csv_window(row: Sequence[str], header: Sequence[str], where: str) -> Window | None:
    cells = [cell.strip() for cell in row]
    if len(cells) != len(header):
        raise DataError(f"{where}: {len(cells)} values; {len(header)} are needed, or none for an unknown window")
    if not any(cells):
        return None
    at = header.index(INPUTS)
    try:
        window = Window.model_validate({"inputs": cells[at], "survival": cells[:at] + cells[at + 1 :]}, strict=False)
        if window.inputs:
            check_survival("survival", window.survival, len(window.survival), range(len(window.survival)))
        return window
    except PlanError as error:
        raise DataError(f"{where}: {error}") from error
    except ValidationError as error:
        [first, *_] = error.errors()
    name, message = f"{first['loc'][0]} {first['input']!r}", first["msg"]
    raise DataError(f"{where}: {name}: {message[0].lower()}{message[1:]} (no values for an unknown window)")


def forecast_document(forecast: SurvivalForecast) -> dict[str, Any]:
    """Returns the forecast of the next window as JSON data."""
    shares = (each.tolist() for each in (forecast.go_on_R, forecast.go_on_low_R, forecast.go_on_high_R))
    return {
        "coverage": forecast.coverage,
        "survival": forecast.survival_K.tolist(),
        "survival_low": forecast.survival_low_K.tolist(),
        "survival_high": forecast.survival_high_K.tolist(),
        "ramps": [
            {"ramp": ramp, "go_on": go_on, "low": low, "high": high, "method": method.how, "reason": method.reason}
            for ramp, (go_on, low, high, method) in enumerate(zip(*shares, forecast.methods_R, strict=True))
        ],
    }


def run(job: ForecastJob) -> None:
    """Prints the forecast of the next window."""
    history = read_series(job.series)
    document, lines = forecast_document(forecast_survival(history, coverage=job.coverage)), list[str]()
    if job.window_s is not None:
        rates_W = history.inputs_WK[:, 0] / job.window_s
        forecast = forecast_rate(rates_W, coverage=job.coverage, window_s=job.window_s)
        rate_rps, low, high = forecast.rate_rps, forecast.low_rps, forecast.high_rps
        document["rate"] = {
            "rate_rps": rate_rps,
            "low": low if math.isfinite(low) else None,
            "high": high if math.isfinite(high) else None,
            "method": forecast.method.how,
            "reason": forecast.method.reason,
        }
        interval = f"{job.coverage:.0%} interval {rate_text(low)}-{rate_text(high).replace('inf', 'endless')}"
        lines = [f"rate: {rate_text(rate_rps)}/s, {interval} ({_method_text(document['rate'])})"]
    print_result(document, lambda: [forecast_table(document)], lines, as_json=job.as_json)


def _method_text(forecast: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (forecast["method"], forecast["reason"])))


def forecast_table(forecast: dict[str, Any]) -> Table:
    """Returns a table with a row per block, which also shows the ramp before it, from the JSON data of a forecast."""
    interval = f"{forecast['coverage']:.0%} interval"
    names = ("block", "survival", interval, "go on at ramp", interval, "method")
    caption = "Intervals are for the true shares, without sudden changes. Windows with few inputs vary more."
    ramps, low, high = forecast["ramps"], forecast["survival_low"], forecast["survival_high"]
    rows = [
        [str(block), f"{share:.3f}", f"{low[block]:.3f}-{high[block]:.3f}", *["-"] * 3]
        for block, share in enumerate(forecast["survival"])
    ]
    for row, ramp in zip(rows[1:], ramps, strict=True):
        row[3:] = f"{ramp['ramp']}: {ramp['go_on']:.3f}", f"{ramp['low']:.3f}-{ramp['high']:.3f}", _method_text(ramp)
    return make_table(*names, title="Next window", caption=caption, narrow=True, rows=rows)
