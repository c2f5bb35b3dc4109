from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cluster.emulated import EmulatedPiece
from deployments.replica.host import OpenCall, chunks_by_call, split_runs
from deployments.wire.messages import Chunk, SplitRun
from earlyexit.engine.device import Answered, Observed, Survivors
from earlyexit.engine.queue import Member
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Seen
from earlyexit.network.piece import Piece


def unheard(chunk: Chunk) -> None:
    raise AssertionError("parts are made here, not said")


@pytest.fixture
def one() -> OpenCall:
    return OpenCall(2, unheard)


@pytest.fixture
def other() -> OpenCall:
    return OpenCall(2, unheard)


def member(sample_id: str, opened: OpenCall, *, length: int = 1) -> Member[EmulatedPiece]:
    lengths_B = np.array([length], dtype=np.int32)
    payload = EmulatedPiece(sample_ids=(sample_id,), next_block=2, lengths_B=lengths_B)
    return Member(sample_id=sample_id, payload=payload, origin=opened, queue_s=1.0, compute_s=2.0)


def answer(sample_id: str) -> Answer:
    return Answer(sample_id=sample_id, value=3, score=0.5, exit=1)


def goes_on(*members: Member[EmulatedPiece]) -> Survivors[EmulatedPiece]:
    piece = EmulatedPiece(
        sample_ids=tuple(each.sample_id for each in members),
        next_block=2,
        lengths_B=np.concatenate([each.payload.lengths_B for each in members]),
    )
    return Survivors(members=members, piece=piece)


def survivors(chunk: Chunk) -> tuple[Any, ...]:
    going_on = chunk.going_on
    assert going_on is not None
    piece = going_on.piece
    return piece.sample_ids, piece.next_block, int(piece.lengths_B.sum()), going_on.timings


HIDDEN = torch.tensor([[0.1], [70_000.0]])


@pytest.mark.parametrize(
    ("hop_dtype", "expected"),
    [("same", HIDDEN.numpy()), ("float16", np.array([[0.1], [65504.0]], dtype=np.float16))],
    ids=["same", "float16"],
)
def test_hidden_states_go_on_in_the_type_of_hops(
    hop_dtype: HopDtype, expected: np.ndarray[tuple[int, ...], np.dtype[np.generic]], one: OpenCall, other: OpenCall
) -> None:
    piece = Piece(
        sample_ids=("a", "x"),
        next_block=1,
        lengths_B=np.ones(2, dtype=np.int32),
        tensors=(HIDDEN,),
        state_BS=torch.zeros(2, 0),
    )
    for members in ((one, other), (one, one)):
        release: Survivors[Any] = Survivors(members=tuple(map(member, ("a", "x"), members)), piece=piece)
        found = [chunk.going_on for _, chunk in chunks_by_call([release], hop_dtype)]
        values = np.concatenate([going_on.piece.tensors[0] for going_on in found if going_on is not None])
        assert values.dtype == expected.dtype
        assert np.array_equal(values, expected)


def test_what_exits_said_comes_no_later_than_the_part_that_ends_the_call(one: OpenCall) -> None:
    seen = Seen(sample_id="a", block=3, score=0.25, value=7)
    [(_, chunk), (_, last)] = chunks_by_call(
        [
            goes_on(member("b", one)),
            Answered(member=member("a", one), answer=answer("a")),
            Observed(member=member("a", one), seen=seen),
        ]
    )
    assert (chunk.seen, chunk.num_inputs) == ((seen,), 1)
    assert survivors(last)[0] == ("b",)


def test_traced_inputs_come_with_their_runs(one: OpenCall, other: OpenCall) -> None:
    begun, ended = run(0, 2, 1.0, 0.5), run(0, 2, 1.0, 1.5)
    one.begun = {"b": [begun], "c": [begun]}
    chunks = chunks_by_call(
        [
            Answered(member=member("a", one), answer=answer("a")),
            Answered(member=member("b", one), answer=answer("b")),
            goes_on(member("c", one), member("d", other)),
        ]
    )
    assert [(opened is one, chunk.runs) for opened, chunk in chunks] == [
        (True, (("b", (ended,)),)),
        (True, (("c", (ended,)),)),
        (False, ()),
    ]


def run(first: int, end: int, queue_s: float, compute_s: float) -> SplitRun:
    return SplitRun(first=first, end=end, batch=3, tokens=3, target=4, queue_s=queue_s, compute_s=compute_s)


def test_every_batch_has_its_share_of_an_inputs_times() -> None:
    noted = [run(0, 2, 1.0, 0.0), run(2, 3, 1.5, 4.0), run(3, 4, 3.5, 5.0)]
    assert split_runs(noted, 7.0) == (run(0, 2, 1.0, 4.0), run(2, 3, 0.5, 1.0), run(3, 4, 2.0, 2.0))
    assert split_runs([], 0.0) == ()


def test_a_batch_that_failed_and_ran_again_has_its_time_in_the_second_run() -> None:
    noted = [run(0, 2, 1.0, 0.0), run(0, 2, 1.0, 0.0)]
    assert split_runs(noted, 3.0) == (run(0, 2, 1.0, 0.0), run(0, 2, 0.0, 3.0))
