from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from offramp.commands.forecast import (
    forecast_document,
    forecast_table,
    read_series,
    window_rates,
)
from profiles.forecast import Method, SurvivalForecast
from tests.offramp.cli.runs import Captured, printed, run, written

CSV = "inputs,0,1,2\n100,1,0.5,0.25\n\n200,1,0.6,0.25\n"
"""Three windows; nothing is known of the middle one."""
FORECAST = SurvivalForecast(
    survival_HK=np.array([[1.0, 0.5]]),
    survival_low_HK=np.array([[1.0, 0.4]]),
    survival_high_HK=np.array([[1.0, 0.6]]),
    go_on_HR=np.array([[0.5]]),
    go_on_low_HR=np.array([[0.4]]),
    go_on_high_HR=np.array([[0.6]]),
    coverage=0.8,
    methods_R=(Method(how="last value", reason="only one window was seen"),),
)


def test_a_series_is_read_from_csv_or_json(tmp_path: Path) -> None:
    history = read_series(written(tmp_path / "series.csv", CSV))
    assert history.missing_W.tolist() == [False, True, False]
    assert history.survival_WK[[0, 2]].tolist() == [[1.0, 0.5, 0.25], [1.0, 0.6, 0.25]]
    assert history.inputs_WK[:, 0].tolist() == [100, 0, 200]
    np.testing.assert_array_equal(window_rates(history, 10.0), [10.0, np.nan, 20.0])
    windows = [{"inputs": 100, "survival": [1.0, 0.5, 0.25]}, None, {"inputs": 200, "survival": [1, 0.6, 0.25]}]
    from_json = read_series(written(tmp_path / "series.json", json.dumps({"windows": windows})))
    from_csv = read_series(written(tmp_path / "series.csv", CSV))
    np.testing.assert_array_equal(from_json.survival_WK, from_csv.survival_WK)
    np.testing.assert_array_equal(from_json.inputs_WK, from_csv.inputs_WK)
    np.testing.assert_array_equal(from_json.missing_W, from_csv.missing_W)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        pytest.param(CSV.replace("\n\n", "\n,,,\n"), "utf-8", id="empty cells"),
        pytest.param(CSV.replace("\n\n", "\n0,1,0.9,0.9\n"), "utf-8", id="no inputs, whatever its shares"),
        pytest.param(CSV, "utf-8-sig", id="the mark that spreadsheets write first"),
    ],
)
def test_a_missing_window_is_told_apart(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "series.csv"
    path.write_text(text, encoding=encoding)
    assert read_series(path).missing_W.tolist() == [False, True, False]
    assert read_series(path).inputs_WK[[0, 2], 0].tolist() == [100, 200]


def test_a_forecast_is_plain_data_and_a_table() -> None:
    document = forecast_document(FORECAST)
    ramp = {"ramp": 0, "go_on": 0.5, "low": 0.4, "high": 0.6}
    assert document == {
        "coverage": 0.8,
        "inputs_to_come": None,
        "survival": [1.0, 0.5],
        "survival_low": [1.0, 0.4],
        "survival_high": [1.0, 0.6],
        "ramps": [ramp | {"method": "last value", "reason": "only one window was seen"}],
    }
    console = Console(width=120, record=True, file=StringIO())
    console.print(forecast_table(document))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "1 0.500 0.400-0.600 0: 0.500 0.400-0.600 last value: only one window was seen" in rows
    assert "Intervals are of the level" in " ".join(rows)


def test_the_command_prints_the_next_window_and_its_rate(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "series.csv", CSV)
    survival = printed(capsys, "forecast", path)["survival"]
    assert survival[0] == 1
    assert 0.4 < survival[1] < 0.7
    assert survival[2] < survival[1]
    assert run("forecast", path, "--window-s", 10) == 0
    assert "rate: 20.0/s" in capsys.readouterr().out
