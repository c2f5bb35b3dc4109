"""What tests of captured segments share: a recorder that logs, pieces, and what a device answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from earlyexit.backends.captured import MOST_TOKENS, CapturedSegments, CudaRecorder, Recorder, Shape, Work
from earlyexit.clock import ManualClock
from earlyexit.engine.device import Answered, Device, Release, Runner
from earlyexit.engine.engine import BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.boundary import Budget, Segment, Split
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import ConfidencePolicy
from tests.answers import label_of
from tests.earlyexit.network.tokens import random_inputs, wire_of

LONGEST = 32
FIRST, WITH_RAMP, LAST = (
    Segment(first=0, end=1, ramp=None),
    Segment(first=1, end=2, ramp=1),
    Segment(first=2, end=4, ramp=None),
)
EACH_SEGMENT = pytest.mark.parametrize(
    "segment", [FIRST, WITH_RAMP, LAST], ids=["from tokens", "with a ramp", "with the head"]
)
POLICY = ConfidencePolicy(1.1)
FOUR = Budget(inputs=4)
ON_EACH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(eq=False)
class Log:
    """Torch in the place of a device's graphs: what was recorded and replayed, in tokens; refuses what is too large."""

    limit: int = MOST_TOKENS
    error: type[RuntimeError] = torch.OutOfMemoryError
    in_capture: bool = False
    tried: int = 0
    recorded: int = 0
    replayed: int = 0

    def record(self, work: Work) -> Work:
        self.tried += 1
        if self.tokens_of(work) > self.limit:
            try:
                raise self.error("no room\nand much advice")
            finally:
                if self.in_capture:
                    raise RuntimeError("the capture broke off")
        self.recorded += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    @staticmethod
    def tokens_of(work: Work) -> int:
        shape = work.__self__._shape  # type: ignore[attr-defined]
        assert isinstance(shape, Shape)
        return shape.num_tokens


def recorder_on(device: str) -> Recorder:
    return Log() if device == "cpu" else CudaRecorder(torch.device(device))


def piece_before(model: EarlyExitModel, block: int, lengths: Sequence[int], *, seed: int = 0) -> Piece:
    wire = wire_of(random_inputs(np.random.default_rng(seed), lengths), prefix="s")
    piece = from_wire(model, wire, POLICY)
    if block == 0:
        return piece
    (step,) = cut_out(model, 0, block, (), POLICY).run(piece)
    assert step.survivors is not None
    return step.survivors


def ready(model: EarlyExitModel, recorder: Recorder, *segments: Segment, budget: Budget = FOUR) -> CapturedSegments:
    captured = CapturedSegments(model, recorder)
    captured.prepare(dict.fromkeys(segments, budget))
    return captured


def assert_as_the_model(
    segments: CapturedSegments, model: EarlyExitModel, segment: Segment, piece: Piece, within: float = 1e-5
) -> None:
    with torch.inference_mode():
        expected = model.run(segment, piece)
    torch.testing.assert_close(segments.run(segment, piece), expected, rtol=within, atol=within)


def answers_of(runner: Runner[Piece], splits: Sequence[Split], piece: Piece) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}

    def deliver(releases: list[Release[Piece]]) -> None:
        for release in releases:
            assert isinstance(release, Answered)
            assert release.answer.sample_id not in found
            found[release.answer.sample_id] = (release.answer.exit, label_of(release.answer))

    device = Device(BatchEngine(splits, ObservedTimes()), runner, ManualClock(), deliver)
    members = [Member(sample_id=one.sample_ids[0], payload=one) for one in piece.singles()]
    device.engine.submit(0, members, 0.0)
    device.run_until_idle()
    return found


HALVES = (Split(first=0, end=2, batch=4, ramps=(0, 1)), Split(first=2, end=4, batch=4, ramps=(2,)))
