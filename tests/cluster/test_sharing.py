from __future__ import annotations

import numpy as np
import pytest

from cluster.emulated import Pace, Sharing
from profiles.table import LatencyTable

# A block takes 4 s for up to four inputs, then 1 s for each: flat, then steep. Eight is the largest measured.
PACE = Pace(
    LatencyTable(batches=(1, 4, 8), block_s_NB=np.array([[4.0, 4.0, 8.0]] * 4), ramp_s_EB=np.zeros((0, 3))), (), 1.0
)


def step(sharing: Sharing, lane: int, inside: int, *, at_s: float, blocks: int = 1) -> None:
    sharing.step(lane, PACE, 0, blocks, (), inside=inside, at_s=at_s)


def test_where_it_is_steep_each_is_as_slow_as_one_batch_of_all() -> None:
    sharing = Sharing()
    step(sharing, 0, 6, at_s=0.0)  # 6 s
    step(sharing, 1, 2, at_s=3.0)  # 4 s; together eight inputs, which take 8 s
    assert sharing.due_s(0) == 3.0 + 3.0 / (6 / 8)
    assert sharing.due_s(1) == 3.0 + 4.0 / (4 / 8)


def test_when_the_other_leaves_a_batch_is_fast_again() -> None:
    sharing = Sharing()
    step(sharing, 0, 6, at_s=0.0)
    step(sharing, 1, 2, at_s=3.0)
    sharing.leave(0, 7.0)  # half speed from 3 to 7 s: 2 s are done, 2 s are left
    assert sharing.due_s(1) == 9.0


def test_a_step_that_begins_in_what_is_counted_already_has_done_its_share_since() -> None:
    sharing = Sharing()
    step(sharing, 0, 6, at_s=0.0)
    sharing.advance(6.0)
    sharing.shrink(0, 2, 6.0)
    step(sharing, 1, 2, at_s=8.0)
    step(sharing, 0, 2, at_s=6.0)  # this process was 2 s late
    assert sharing.due_s(0) == 10.0


def test_two_batches_never_do_more_than_one_of_both_would() -> None:
    sharing = Sharing()
    for lane in (0, 1):
        step(sharing, lane, 4, at_s=0.0, blocks=4)
    assert sharing.due_s(0) == sharing.due_s(1) == pytest.approx(PACE.seconds(0, 4, 8, ()))
