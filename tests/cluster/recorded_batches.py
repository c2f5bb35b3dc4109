"""Exit records of four inputs, a runner for them, and its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cluster.emulated import EmulatedPiece, RecordedRunner
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Split
from profiles.records import ExitRecords
from profiles.scores import Score
from tests.exit_records import exit_records

RAMPS = (0, 1, 2)
HALF = {0: 0.5, 1: 0.5, 2: 0.5}
WHOLE = Split(first=0, end=4, batch=4, ramps=RAMPS)


def make_records(score: Score = "confidence") -> ExitRecords:
    """Returns records of four inputs: a is sure from ramp 0 on, b from ramp 1, c from ramp 2, d never.

    Ramp r answers 10 * r, 10 * r + 1, ...; the full model answers 100, 101, ...
    """
    sure = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=np.float32)
    rows, columns = np.indices((4, 3))
    answers_NE = np.column_stack([10 * columns + rows, np.arange(100, 104)])
    scores_NR = sure if score == "confidence" else 1 - sure
    return exit_records(scores_NR, answers_NE=answers_NE, score=score, sample_ids=tuple("abcd"))


def recorded(thresholds: Mapping[int, float] | float | None, score: Score = "confidence") -> RecordedRunner:
    runner = RecordedRunner(make_records(score), num_blocks=4)
    runner.follow(thresholds)
    return runner


def piece_of(ids: Sequence[str], next_block: int = 0) -> EmulatedPiece:
    lengths_B = np.arange(1, len(ids) + 1, dtype=np.int32)
    return EmulatedPiece(sample_ids=tuple(ids), next_block=next_block, lengths_B=lengths_B)


def batch_of(
    ids: Sequence[str],
    split: Split = WHOLE,
    *,
    probe: bool = False,
    queued_s: float = 0.0,
    started_s: float = 0.0,
    tokens: Sequence[int] = (),
) -> Batch[EmulatedPiece]:
    """Returns a batch of these inputs, by default with 1 token each."""
    singles = piece_of(ids, split.first).singles()
    members = tuple(
        Member(sample_id=single.sample_ids[0], payload=single, tokens=length, probe=probe, since_s=queued_s)
        for single, length in zip(singles, tokens or [1] * len(singles), strict=True)
    )
    num_tokens = sum(member.tokens for member in members)
    return Batch(split=split, members=members, tokens=num_tokens, started_s=started_s, probe=probe)
