from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


class Fake:
    """Stands in for one of Ray's counters."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, ...]] = Counter()

    def inc(self, value: float, labels: dict[str, str]) -> None:
        self.counted[tuple(labels.values())] += int(value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
def test_labels_that_read_alike_together_are_counted_apart() -> None:
    from deployments.metrics import Totals

    counter: Any = Fake()
    totals = Totals()
    for small, large in ((5, 3), (6, 4)):
        totals.grow(counter, small, exit="1", network="11m")
        totals.grow(counter, large, exit="11", network="1m")
    assert counter.counted == {("1", "11m"): 6, ("11", "1m"): 4}
