from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from earlyexit.errors import OverloadedError
from earlyexit.sequences.kv import COPIED_TOKENS, FILLED_ROWS, KvShape, KvStore, Run

SHAPE = KvShape(num_blocks=2, num_heads=1, head_size=2)


def store(num_pages: int = 6) -> KvStore:
    return KvStore(SHAPE, num_pages, page_tokens=4)


def test_pages_for_all_that_a_sequence_may_come_to_are_reserved_when_it_enters() -> None:
    kv = store()
    kv.enter(1, 9)
    kv.enter(1, 9)  # as every step of it does
    assert kv.free_pages == 3
    assert (kv.room_of(1), kv.room_of(2)) == (12, 0)
    kv.free(1)
    kv.free(1)
    assert kv.free_pages == 6
    assert kv.sequences == set()


def test_a_full_store_refuses_and_takes_again_once_pages_are_free() -> None:
    kv = store()
    kv.enter(1, 16)
    with pytest.raises(OverloadedError, match="3 pages are needed for keys and values, 2 of 6 are free") as refused:
        kv.enter(2, 12)
    assert refused.value.retry_after_s > 0
    assert kv.sequences == {1}
    kv.free(1)
    kv.enter(2, 12)
    assert kv.free_pages == 3


@pytest.mark.parametrize("scattered", [False, True])
def test_rows_attend_alike_wherever_their_tokens_lie_and_whoever_is_beside(scattered: bool) -> None:
    torch.manual_seed(0)
    kv = KvStore(KvShape(num_blocks=1, num_heads=2, head_size=4), 64, page_tokens=16)
    for number in range(100, 164 if scattered else 100):
        kv.enter(number, 1)
    for number in range(100, 164, 2):
        kv.free(number)
    ends = {1: COPIED_TOKENS + 9, 2: 5, 3: 40, 4: 7, 5: FILLED_ROWS + 20, 6: COPIED_TOKENS + 1}
    written = {}
    for number, end in ends.items():
        kv.enter(number, end)
        written[number] = keys, values = torch.randn(end, 2, 4), torch.randn(end, 2, 4)
        kv.write(0, kv.places([Run(sequence=number, start=0, length=end)]).write_N, keys, values)
    lengths = {1: 1, 2: 5, 3: 1, 4: 3, 5: FILLED_ROWS + 1, 6: 2}
    runs = [Run(sequence=k, start=ends[k] - length, length=length) for k, length in lengths.items()]
    assert (kv.stretch_of(1)[0] < 0) == scattered
    queries_NHd = torch.randn(sum(lengths.values()), 6, 4)
    places = kv.places(runs)
    assert [len(range(*each.rows.indices(100))) for each in places.alone][-2:] == [FILLED_ROWS + 1, 2]
    found = kv.attend(0, places, queries_NHd)
    parts = (torch.split(each, [*lengths.values()]) for each in (found, queries_NHd))
    for run, own, queries in zip(runs, *parts, strict=True):
        keys, values = (each.repeat_interleave(3, dim=1).transpose(0, 1) for each in written[run.sequence])
        seen = torch.arange(run.end)[None] <= torch.arange(run.start, run.end)[:, None]
        expected = scaled_dot_product_attention(queries.transpose(0, 1), keys, values, attn_mask=seen)
        torch.testing.assert_close(own, expected.transpose(0, 1))


def test_two_thousand_sequences_leave_every_page_free() -> None:
    kv, rng = store(32), random.Random(0)
    peak = 0
    there: dict[int, int] = {}
    for number in range(1, 2001):
        tokens = rng.randint(1, 40)
        while kv.pages_for(tokens) > kv.free_pages:
            kv.free(gone := rng.choice(list(there)))
            del there[gone]
        kv.enter(number, tokens)
        there[number] = kv.pages_for(tokens)
        assert kv.free_pages == 32 - sum(there.values())
        peak = max(peak, 32 - kv.free_pages)
        places = kv.place_of(Run(sequence=number, start=0, length=tokens), 0)
        assert len(set(places.tolist())) == tokens
    assert peak == 32
    for number in there:
        kv.free(number)
    assert kv.free_pages == 32


def test_what_is_no_number_in_one_sequence_is_not_looked_at_by_another() -> None:
    """Rows that attend together are padded: with places of their own, for a weight of 0 times NaN is NaN."""
    kv = store()
    for sequence in (1, 2, 3):
        kv.enter(sequence, 8)
    runs = [Run(sequence=sequence, start=0, length=length) for sequence, length in ((1, 1), (2, 2), (3, 6))]
    places = kv.places(runs)
    values_NKd = torch.ones(9, 1, 2)
    values_NKd[0] = torch.nan
    kv.write(0, places.write_N, values_NKd, values_NKd)
    places = kv.places([Run(sequence=2, start=1, length=1), Run(sequence=3, start=5, length=1)])
    assert kv.attend(0, places, torch.ones(2, 1, 2)).isfinite().all()
