from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from experiments.kit import Spread, keep, spread


@dataclass
class Row:
    rate_per_s: float


def test_a_spread_is_of_the_values_that_there_are() -> None:
    assert spread([3.0, None, 1.0, 1.5]) == Spread(1.5, 1.0, 3.0)
    assert spread([None]) is None
    assert Spread(1.0234, 0.981, 1.05).told() == "1.02 (0.981 to 1.05)"


def test_what_is_kept_is_plain_json_and_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    day = datetime(2025, 1, 2, tzinfo=UTC)
    keep({"row": Row(1.5), "all": np.array([1, 2]), "one": np.float64(3), "day": day}, path)
    kept = {"row": {"rate_per_s": 1.5}, "all": [1, 2], "one": 3.0, "day": "2025-01-02T00:00:00+00:00"}
    assert json.loads(path.read_text(encoding="utf-8")) == kept
    for other in ({"a": {1}}, {"a": float("nan")}):
        with pytest.raises((TypeError, ValueError)):
            keep(other, path)
    assert json.loads(path.read_text(encoding="utf-8")) == kept
