"""What happens from outside."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError
from simulator.control.faults import Mix, ReplicaDies, rows_in_turn

A, B = np.array([0, 1]), np.array([5])


def test_inputs_are_those_of_the_mix_that_is_on_when_their_request_arrives() -> None:
    mixes = [Mix(at_s=0.0, rows_N=A), Mix(at_s=2.0, rows_N=B)]
    assert rows_in_turn(mixes, np.array([0.0, 1.0, 1.9, 2.0, 3.0])).tolist() == [0, 1, 0, 5, 5]
    assert rows_in_turn(mixes, np.array([1.0, 2.5]), inputs_per_request=3).tolist() == [0, 1, 0, 5, 5, 5]


@pytest.mark.parametrize("begins_s", [(), (1.0,), (0.0, 2.0, 2.0)], ids=["none", "late", "twice"])
def test_mixes_begin_at_once_and_one_after_the_other(begins_s: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="mixes begin at 0 s"):
        rows_in_turn([Mix(at_s=each, rows_N=A) for each in begins_s], np.array([0.0]))


def test_a_fault_happens_at_a_time() -> None:
    with pytest.raises(DataError, match="at_s must be a finite number"):
        ReplicaDies(at_s=-1.0, slot="split-cpu-0")
