from __future__ import annotations

from collections.abc import Iterator

import pytest

from experiments.studies import sides


@pytest.fixture(autouse=True, scope="module")
def short_simulations() -> Iterator[None]:
    """Long enough for what most of these tests assert: which side is ahead, and that everybody stands there.

    Of a module, so that what its tests share is made so, too.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        last(monkeypatch, num_inputs=2000, num_slos=5)
        yield


@pytest.fixture
def longer_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a rate to a few percent, rather above than below it."""
    last(monkeypatch, num_inputs=4000, num_slos=10)


def last(monkeypatch: pytest.MonkeyPatch, *, num_inputs: int, num_slos: int) -> None:
    """Simulations end by then, whichever is later."""
    monkeypatch.setitem(sides.INPUTS, "quick", num_inputs)
    monkeypatch.setattr(sides, "LEAST_SLOS", num_slos)
