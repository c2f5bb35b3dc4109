"""What a host makes of its device's releases: hidden states that go on, and the runs of traced inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deployments.replica.host import OpenCall, chunks_by_call, split_runs
from deployments.wire.messages import Chunk, SplitRun
from earlyexit.engine.device import Answered, Observed, Release, Survivors
from earlyexit.engine.queue import Member
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Seen
from earlyexit.network.piece import Piece

HIDDEN = torch.tensor([[0.1], [70_000.0]])


def unheard(chunk: Chunk) -> None:
    raise AssertionError("parts are made here, not said")


@pytest.mark.parametrize(
    ("hop_dtype", "expected"),
    [("same", HIDDEN.numpy()), ("float16", np.array([[0.1], [65504.0]], dtype=np.float16))],
    ids=["same", "float16"],
)
def test_hidden_states_go_on_in_the_type_of_hops(
    hop_dtype: HopDtype, expected: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    piece = Piece(
        sample_ids=("a", "x"),
        next_block=1,
        lengths_B=np.ones(2, dtype=np.int32),
        tensors=(HIDDEN,),
        state_BS=torch.zeros(2, 0),
    )
    one, other = OpenCall(2, unheard), OpenCall(2, unheard)
    for origins in ((one, other), (one, one)):
        members: list[Member[Any]] = [
            Member(sample_id=name, payload=single, origin=opened)
            for name, single, opened in zip("ax", piece.singles(), origins, strict=True)
        ]
        release: Survivors[Any] = Survivors(members=tuple(members), piece=piece)
        found = [each.going_on for _, each in chunks_by_call([release], hop_dtype)]
        values = np.concatenate([going_on.piece.tensors[0] for going_on in found if going_on is not None])
        assert values.dtype == expected.dtype
        assert np.array_equal(values, expected)


def test_what_exits_said_comes_no_later_than_the_part_that_ends_the_call() -> None:
    ids, lengths_B = ("a", "x"), np.ones(2, dtype=np.int32)
    both = Piece(sample_ids=ids, next_block=1, lengths_B=lengths_B, tensors=(HIDDEN,), state_BS=torch.zeros(2, 0))
    opened = OpenCall(2, unheard)
    a, x = (Member(sample_id=each.sample_ids[0], payload=each, origin=opened) for each in both.singles())
    seen = Seen(sample_id="a", block=3, score=0.25, value=7)
    releases: list[Release[Any]] = [
        Survivors(members=(x,), piece=x.payload),
        Answered(member=a, answer=Answer(sample_id="a", value=3, score=0.5, exit=1)),
        Observed(member=a, seen=seen),
    ]
    [(_, chunk), (_, last)] = chunks_by_call(releases)
    assert (chunk.seen, chunk.num_inputs) == ((seen,), 1)
    assert last.going_on is not None
    assert last.going_on.piece.sample_ids == ("x",)


def run(first: int, end: int, queue_s: float, compute_s: float) -> SplitRun:
    return SplitRun(first=first, end=end, batch=3, tokens=3, target=4, queue_s=queue_s, compute_s=compute_s)


def test_every_batch_has_its_share_of_an_inputs_times_and_one_that_ran_again_has_it_in_the_second() -> None:
    noted = [run(0, 2, 1.0, 0.0), run(2, 3, 1.5, 4.0), run(3, 4, 3.5, 5.0)]
    assert split_runs(noted, 7.0) == (run(0, 2, 1.0, 4.0), run(2, 3, 0.5, 1.0), run(3, 4, 2.0, 2.0))
    assert split_runs([], 0.0) == ()
    noted = [run(0, 2, 1.0, 0.0), run(0, 2, 1.0, 0.0)]
    assert split_runs(noted, 3.0) == (run(0, 2, 1.0, 0.0), run(0, 2, 0.0, 3.0))
