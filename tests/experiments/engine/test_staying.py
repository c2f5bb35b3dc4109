from __future__ import annotations

import numpy as np
import pytest

from experiments.engine.staying import book_us, device_us, served


def test_at_equal_load_answers_of_inputs_that_stay_are_early_and_nothing_else_changes() -> None:
    stock, stop, stay = (served(side, 0.6, duration_s=6.0) for side in ("stock", "stop", "stay"))
    for share in (25, 50):
        early, late = (np.nanpercentile(each.latency_s_N, share) for each in (stay, stock))
        assert early < 0.9 * late
    assert np.nanpercentile(stay.latency_s_N, 99) == pytest.approx(np.nanpercentile(stock.latency_s_N, 99), rel=0.05)
    assert [slot.utilisation for slot in stay.slots] == pytest.approx(
        [slot.utilisation for slot in stock.slots], rel=0.02
    )
    assert stop.slots[1].utilisation < 0.85 * stay.slots[1].utilisation  # fewer get there


def test_every_side_has_its_processor_time() -> None:
    assert min(device_us("stop", num_inputs=64), device_us("stay", num_inputs=64)) > 0
    assert device_us("stop", probe=True, num_inputs=64) > 0
    assert min(book_us("stay", num_inputs=64), book_us("probe", num_inputs=64)) > 0
