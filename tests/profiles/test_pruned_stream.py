"""What a live stream knows of probes that went on both ways: without some of their words, and whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError
from profiles.stream import ExitStream, SmallArray
from profiles.windows import windows
from tests.profiles.test_stream import LATE, SHAPE


def floats(*values: float) -> SmallArray:
    return np.array(values, dtype=np.float32)


PROBES = replace(
    LATE,
    probe_N=np.array([True, True]),
    scores_NR=np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32),
    losses_NR=np.array([[1, 0], [0, 0]], dtype=np.float32),
)
PRUNED = replace(PROBES, end_losses_N=floats(1, np.nan))
"""The first of both lost words."""


def test_what_the_end_costs_is_kept_where_words_were_pruned_and_is_nothing_elsewhere() -> None:
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PROBES)
    stream.append(PRUNED)
    found = stream.window(0)
    assert found.end_losses_N is not None
    np.testing.assert_array_equal(found.end_losses_N, [np.nan, np.nan, 1, np.nan])
    assert found.losses_NE[:, -1].tolist() == [0, 0, 1, 0]
    assert (found.pruned_agreement, PROBES.pruned_agreement) == (0.0, None)
    records = windows(stream, 120)[0].records()
    assert records.end_losses_N is not None
    assert records.end_losses_N.tolist() == [0, 0, 1, 0]


def test_agreement_counts_what_pruning_changed_at_the_end() -> None:
    stream = ExitStream(SHAPE, since_s=0)
    stream.append(PRUNED)
    [window] = windows(stream, 120)
    at_the_end, at_block_1 = window.estimate({}).agreement, window.estimate({1: 0.8}).agreement
    assert at_the_end is not None
    assert at_block_1 is not None
    # Without exits both are answered at the end, of which the first is wrong; at ramp 1 it is wrong as well.
    assert (at_the_end.value, at_block_1.value) == (0.5, 0.5)


NOT_SEEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"end_losses_N": floats(1)}, "end_losses_N needs 2 values"),
    ({"end_losses_N": floats(0.5, np.nan)}, "to be 0 or 1"),
    ({"end_losses_N": floats(0, 0), "probe_N": np.array([True, False])}, "of probes that lost words, and of no others"),
)


@pytest.mark.parametrize(("changes", "message"), NOT_SEEN, ids=["one too few", "half a label", "no probe"])
def test_ends_that_were_not_seen_are_refused(changes: dict[str, Any], message: str) -> None:
    seen = replace(PROBES, stayed_N=np.array([False, True]), active_NR=np.ones((2, 2), dtype=bool))
    with pytest.raises(DataError, match=message):
        replace(seen, **changes)
