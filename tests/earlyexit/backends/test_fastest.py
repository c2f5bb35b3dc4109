from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.backends import computed_by
from earlyexit.backends.fastest import FastestSegments
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Budget, Segment
from earlyexit.network.model import ChainNetwork, EarlyExitModel, SegmentRunner
from earlyexit.network.piece import Piece, Tensors
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

WHOLE = Segment(first=0, end=2, ramp=None)
FULL = {
    Segment(first=0, end=1, ramp=0): Budget(inputs=4),
    Segment(first=1, end=2, ramp=None): Budget(inputs=4, tokens=24),
}
Seconds = Callable[[int, int], float]
"""The processor time of a run, by its number and its inputs."""


def always(seconds: float) -> Seconds:
    return lambda run, inputs: seconds


def rounds(*seconds: float) -> Seconds:
    """Each round has two runs, one per size."""
    return lambda run, inputs: seconds[run // 2]


class Timed(SegmentRunner):
    """A backend whose runs take predefined times."""

    def __init__(self, model: EarlyExitModel, seconds: Seconds, advance: Callable[[float], None]) -> None:
        self.model = model
        self.sizes: list[tuple[int, int]] = []
        self.prepared: list[set[Segment]] = []
        self._seconds = seconds
        self._advance = advance

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self._advance(self._seconds(len(self.sizes), len(piece)))
        self.sizes.append((len(piece), int(piece.lengths_B.sum())))
        return self.model.run(segment, piece)


class Prepared(Timed):
    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.prepared.append(set(segments))


@dataclass
class Machine:
    """Two backends and the clock by which they are timed."""

    torch_s: Seconds
    onnx_s: Seconds
    after_s: float = 0.0
    """The time that torch's threads spend after a run."""
    now_s: float = 0.0
    left_s: float = 0.0
    model: EarlyExitModel = field(
        default_factory=lambda: small(LabelTask(("no", "yes")), seed=0, num_blocks=2, max_length=64)
    )
    by_torch: list[Timed] = field(default_factory=list)
    by_onnx: list[Prepared] = field(default_factory=list)

    def segments(self) -> FastestSegments:
        openers = {"by_torch": self.open_torch, "by_onnx": self._open_onnx}
        return FastestSegments(self.model, Path(), took_s=self._took_s, **openers)

    def open_torch(self, model: EarlyExitModel, folder: Path) -> SegmentRunner:
        self.by_torch.append(Timed(model, self.torch_s, lambda seconds: self._advance(seconds, self.after_s)))
        return self.by_torch[-1]

    def _open_onnx(self, model: EarlyExitModel, folder: Path) -> SegmentRunner:
        self.by_onnx.append(Prepared(model, self.onnx_s, lambda seconds: self._advance(seconds, 0.0)))
        return self.by_onnx[-1]

    def _advance(self, seconds: float, left_s: float) -> None:
        self.now_s += seconds
        self.left_s = left_s

    def _took_s(self, run: Callable[[], object]) -> float:
        began_s = self.now_s
        run()
        self.now_s += self.left_s
        return self.now_s - began_s


def some_piece(model: EarlyExitModel) -> Piece:
    return piece_of(model, ConfidencePolicy(0.5), random_inputs(np.random.default_rng(0), [3]))


def test_onnx_is_chosen_if_it_is_faster_and_prepares_later_segments() -> None:
    machine = Machine(always(0.003), always(0.002))
    segments = machine.segments()
    segments.prepare(FULL)
    segments.prepare({WHOLE: Budget(inputs=2)})
    [onnx] = machine.by_onnx
    assert segments.backend == "onnx"
    assert onnx.prepared == [set(FULL), {WHOLE}]
    before = len(onnx.sizes)
    segments.run(WHOLE, some_piece(machine.model))
    assert len(onnx.sizes) == before + 1


def test_torch_is_chosen_if_it_is_a_fifth_faster() -> None:
    closer = Machine(always(0.21), always(0.25)).segments()
    closer.prepare(FULL)
    assert closer.backend == "onnx"
    machine = Machine(always(0.19), always(0.25))
    segments = machine.segments()
    segments.prepare(FULL)
    assert segments.backend == "torch"
    # Tried on a copy: what torch puts in the places of modules could not be exported any more.
    assert machine.by_torch[0].model is not machine.model
    assert machine.by_torch[-1].model is machine.model
    tried = set(machine.by_torch[0].sizes), set(machine.by_onnx[0].sizes)
    assert tried == ({(4, 64), (1, 16)},) * 2, "full batches within their tokens, and a quarter of one"


@pytest.mark.parametrize(
    ("onnx_s", "after_s", "backend"),
    [
        pytest.param(rounds(0.1, *[0.0005] * 7), 0.0, "onnx", id="a cold start"),
        pytest.param(
            rounds(0.0005, 0.02, 0.0008, 0.0009, 0.0009, 0.02, 0.0008, 0.0009), 0.0, "onnx", id="two disturbed"
        ),
        pytest.param(rounds(*[0.0005, 0.004, 0.004, 0.004] * 2), 0.0, "torch", id="one in four was not"),
        pytest.param(always(0.002), 0.003, "onnx", id="threads of torch spend more afterwards"),
        # Of 4 inputs 2 ms, 0.5 for each, where torch takes 0.25; of 1 input 0.5 ms, where torch takes 1.
        pytest.param(lambda _, inputs: 0.002 if inputs == 4 else 0.0005, 0.0, "onnx", id="few count as many"),
    ],
)
def test_the_median_of_all_runs_decides(onnx_s: Seconds, after_s: float, backend: str) -> None:
    segments = Machine(always(0.001), onnx_s, after_s).segments()
    segments.prepare({WHOLE: Budget(inputs=4)})
    assert segments.backend == backend


def test_torch_computes_models_that_onnx_runtime_cannot() -> None:
    def refuse(*_: object) -> SegmentRunner:
        raise PlanError("ONNX Runtime is not installed")

    machine = Machine(always(0.001), always(0.0))
    segments = FastestSegments(machine.model, Path(), by_torch=machine.open_torch, by_onnx=refuse)
    segments.prepare(FULL)
    assert segments.backend == "torch"
    assert machine.by_torch[-1].model is machine.model
    machine = Machine(always(0.001), always(0.002))
    segments = machine.segments()
    assert segments.backend is None
    found, expected = (each.run(WHOLE, some_piece(machine.model)) for each in (segments, machine.model))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_faster_backend_is_reported_for_every_network_of_a_chain() -> None:
    machines = [Machine(always(0.001), always(0.002)), Machine(always(0.002), always(0.001))]
    machines[0].model.info = replace(machines[0].model.info, name="a smaller one")
    found = [machine.segments() for machine in machines]
    chain = ChainNetwork([machine.model for machine in machines], found)
    assert computed_by(chain) is None
    for each in found:
        each.prepare(FULL)
    assert computed_by(chain) == "onnx and torch"
    assert computed_by(found[0]) == "torch"
    assert computed_by(machines[0].model) is None
