from __future__ import annotations

import pytest

from experiments.studies import sides


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for what these tests assert: a rate to a few percent, rather above than below it."""
    monkeypatch.setitem(sides.INPUTS, "quick", 4000)
    monkeypatch.setattr(sides, "LEAST_SLOS", 10)
