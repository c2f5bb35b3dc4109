"""`offramp forecast`: forecasts the survival and the rate of the next window from past windows."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError
from rich.table import Table

from earlyexit.data.images import check_file
from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.data.text_tables import open_csv
from earlyexit.errors import DataError
from offramp.commands.options import ForecastJob
from offramp.commands.output import make_table, print_result
from profiles.forecast import RateForecast, SurvivalForecast, forecast_rate, forecast_survival
from profiles.scores import FloatArray
from profiles.windows import SurvivalHistory

INPUTS = "inputs"
"""Name of the column with the number of inputs of a window."""
MAX_INPUTS = 1e15
"""Largest allowed number of inputs of a window."""


class Window(StrictDocument):
    """A past window."""

    inputs: float = Field(ge=0, le=MAX_INPUTS)
    survival: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)
    """Share of the inputs that reach each block."""


def read_series(path: Path) -> SurvivalHistory:
    """Reads past windows, oldest first, from a .csv or .json file; raises DataError with file and line.

    A CSV file has the columns `inputs`, `0`, `1`, ... (one per block). JSON is of the form
    {"windows": [{"inputs": ..., "survival": [...]}, null, ...]}. An empty row, null or a window of 0 inputs is unknown.
    """
    if path.suffix not in (".csv", ".json"):
        raise DataError(f"{path}: it must be a .csv or .json file")
    windows = (
        _read_csv(path)
        if path.suffix == ".csv"
        else read_source(path, DataError).parse(SeriesDocument, called="the series").windows
    )
    known = [window for window in windows if window is not None]
    if not any(window.inputs for window in known):
        raise DataError(f"{path}: at least one window with inputs is needed")
    num_blocks = len(known[0].survival)
    uneven = next((k for k, each in enumerate(windows) if each and len(each.survival) != num_blocks), None)
    if uneven is not None:
        raise DataError(f"{path}: window {uneven} must have {num_blocks} blocks, as the first one")
    missing = Window(survival=[1.0] * num_blocks, inputs=0.0)
    try:
        return SurvivalHistory(
            survival_WK=np.array([(window or missing).survival for window in windows]),
            inputs_WK=np.array([[(window or missing).inputs] * num_blocks for window in windows]),
            missing_W=np.array([window is None or window.inputs == 0 for window in windows]),
        )
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def forecast_document(forecast: SurvivalForecast) -> dict[str, Any]:
    """Returns the forecast of the next window as JSON data."""
    return {
        "coverage": forecast.coverage,
        "inputs_to_come": forecast.inputs_to_come,
        "survival": forecast.survival_HK[0].tolist(),
        "survival_low": forecast.survival_low_HK[0].tolist(),
        "survival_high": forecast.survival_high_HK[0].tolist(),
        "ramps": [
            {
                "ramp": ramp,
                "go_on": float(forecast.go_on_HR[0, ramp]),
                "low": float(forecast.go_on_low_HR[0, ramp]),
                "high": float(forecast.go_on_high_HR[0, ramp]),
                "method": method.how,
                "reason": method.reason,
            }
            for ramp, method in enumerate(forecast.methods_R)
        ],
    }


def window_rates(history: SurvivalHistory, window_s: float) -> FloatArray:
    """Returns the inputs per second of each window (W); NaN for unknown windows."""
    return np.where(history.missing_W, np.nan, history.inputs_WK[:, 0] / window_s)


def rate_document(forecast: RateForecast) -> dict[str, Any]:
    """Returns the forecast rate of the next window as JSON data; an infinite bound is null."""
    bounds = {"low": float(forecast.low_rps_H[0]), "high": float(forecast.high_rps_H[0])}
    return {
        "rate_rps": float(forecast.rate_rps_H[0]),
        **{name: value if math.isfinite(value) else None for name, value in bounds.items()},
        "method": forecast.method.how,
        "reason": forecast.method.reason,
    }


class SeriesDocument(StrictDocument):
    """A series of windows."""

    schema_version: Literal[1] = 1
    windows: list[Window | None] = Field(min_length=1)


def _read_csv(path: Path) -> list[Window | None]:
    check_file(path)
    with open_csv(path) as file:
        rows = csv.reader(file)
        try:
            header = [name.strip() for name in next(rows, [])]
            blocks = [name for name in header if name != INPUTS]
            if header.count(INPUTS) != 1 or not blocks or blocks != list(map(str, range(len(blocks)))):
                raise DataError(f"{path}:1: the columns must be {INPUTS}, 0, 1, ... (one per block), not {header}")
            # A blank line has no cells.
            return [_csv_window(row or [""] * len(header), header, f"{path}:{rows.line_num}") for row in rows]
        except csv.Error as error:
            raise DataError(f"{path}:{rows.line_num}: {error}") from error


def _csv_window(row: Sequence[str], header: Sequence[str], where: str) -> Window | None:
    cells = [cell.strip() for cell in row]
    if len(cells) != len(header):
        raise DataError(f"{where}: {len(cells)} values; {len(header)} are needed, or none for an unknown window")
    if not any(cells):
        return None
    at = header.index(INPUTS)
    try:
        return Window.model_validate({"inputs": cells[at], "survival": cells[:at] + cells[at + 1 :]}, strict=False)
    except ValidationError as error:
        [first, *_] = error.errors()
    name, message = f"{first['loc'][0]} {first['input']!r}", first["msg"]
    raise DataError(f"{where}: {name}: {message[0].lower()}{message[1:]} (no values for an unknown window)")


def run(job: ForecastJob) -> None:
    """Prints the forecast of the next window."""
    history = read_series(job.series)
    document, lines = forecast_document(forecast_survival(history, coverage=job.coverage)), list[str]()
    if job.window_s is not None:
        rates_W = window_rates(history, job.window_s)
        rate = rate_document(forecast_rate(rates_W, coverage=job.coverage, window_s=job.window_s))
        high = "endless" if rate["high"] is None else f"{rate['high']:.1f}"
        interval = f"{document['coverage']:.0%} interval {rate['low'] or 0:.1f}-{high}"
        method = ": ".join(filter(None, (rate["method"], rate["reason"])))
        lines = [f"rate: {rate['rate_rps']:.1f}/s, {interval} ({method})"]
        document["rate"] = rate
    print_result(document, lambda: [forecast_table(document)], lines, as_json=job.as_json)


def forecast_table(forecast: dict[str, Any]) -> Table:
    """Returns a table with a row per block, which also shows the ramp before it, from the JSON data of a forecast."""
    interval = f"{forecast['coverage']:.0%} interval"
    names = ("block", "survival", interval, "go on at ramp", interval, "method")
    caption = (
        "Intervals are for the true shares; windows with few inputs vary more. They do not include sudden changes."
    )
    if forecast["inputs_to_come"] is not None:
        inputs = f"{forecast['inputs_to_come']:g}"
        caption = f"Intervals are for the shares among {inputs} inputs. They do not include sudden changes."
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
