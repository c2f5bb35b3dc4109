"""What waits of tokens that left early, whoever passes, and however often."""

from __future__ import annotations

import torch

from earlyexit.sequences.kv import Run
from earlyexit.sequences.kv_memory import Behind, Pending


def rows(start: int, end: int, value: float = 0.0) -> Behind:
    """States of tokens `start` to `end` - 1, each with its token's number and a value."""
    return Behind(start, torch.tensor([[float(token), value] for token in range(start, end)]))


def waiting(pending: Pending, block: int) -> list[tuple[float, ...]]:
    found = pending.leave(7, block, 1000)
    return [] if found is None else [tuple(each) for each in found.hidden_nD.tolist()]


def test_what_left_waits_behind_what_waits_already() -> None:
    pending = Pending()
    pending.moved(7, 0, 2, rows(0, 2))
    pending.moved(7, 0, 2, rows(2, 3))
    assert pending.blocks(Run(sequence=7, start=3, length=1), 0, 5) == [2]
    assert waiting(pending, 2) == [(0, 0), (1, 0), (2, 0)]
    assert waiting(pending, 2) == []


def test_blocks_that_run_again_note_the_same() -> None:
    """A batch that failed has been through: what it noted is replaced, what it carried along stays."""
    pending = Pending()
    pending.moved(7, 0, 2, rows(0, 2))
    pending.moved(7, 2, 4, rows(0, 3))  # token 2 brought 0 and 1 along
    pending.moved(7, 0, 2, rows(2, 3, value=1.0))
    pending.moved(7, 2, 4, rows(2, 3, value=1.0))
    assert waiting(pending, 2) == []
    assert waiting(pending, 4) == [(0, 0), (1, 0), (2, 1)]


def test_an_older_token_takes_nothing_of_newer_ones_away() -> None:
    """One that was answered and stays may pass when newer ones of its sequence have left early."""
    pending = Pending()
    pending.moved(7, 0, 2, rows(0, 1))
    pending.moved(7, 0, 2, rows(1, 2))
    pending.moved(7, 2, 4, rows(0, 1))
    assert waiting(pending, 2) == [(1, 0)]
    pending.moved(7, 2, 4, rows(1, 2))
    pending.moved(7, 2, 4, rows(0, 1, value=1.0))
    pending.through(7, 4, 1)
    assert waiting(pending, 4) == [(1, 0)]


def test_what_leaves_is_taken_up_to_its_own_token() -> None:
    pending = Pending()
    pending.moved(7, 0, 2, rows(0, 3))
    found = pending.leave(7, 2, 2)
    assert found is not None
    assert (found.start, found.end) == (0, 2)
    assert waiting(pending, 2) == [(2, 0)]
    assert pending.leave(8, 2, 2) is None
