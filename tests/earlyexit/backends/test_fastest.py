from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.backends import computed_by
from earlyexit.backends.fastest import FastestSegments
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Budget, Segment
from earlyexit.network.chain_network import ChainNetwork
from earlyexit.network.model import EarlyExitModel, SegmentRunner
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


class Timed(SegmentRunner):
    """A backend whose every run takes the same processor time."""

    def __init__(self, model: EarlyExitModel, seconds: float, advance: Callable[[float], None]) -> None:
        self.model = model
        self.sizes: list[tuple[int, int]] = []
        self.prepared: list[set[Segment]] = []
        self._seconds = seconds
        self._advance = advance

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self.sizes.append((len(piece), int(piece.lengths_B.sum())))
        self._advance(self._seconds)
        return self.model.run(segment, piece)


class Prepared(Timed):
    def is_ready(self, segment: Segment) -> bool:
        return any(segment in each for each in self.prepared)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.prepared.append(set(segments))


class Machine:
    """Two backends and the clock by which they are timed."""

    def __init__(self, *, torch_s: float, onnx_s: float) -> None:
        self.now_s = 0.0
        self.model = small(LabelTask(("no", "yes")), seed=0, num_blocks=2, max_length=64)
        self.by_torch: list[Timed] = []
        self.by_onnx: list[Prepared] = []
        self._seconds = torch_s, onnx_s
        self.onnx_opens: Callable[[EarlyExitModel, Path, int], SegmentRunner] = self._onnx
        self.last = 0.0
        """What the last run took."""
        self.after_s: dict[float, float] = {}
        """What is spent after a run that took so long."""

    def segments(self) -> FastestSegments:
        return FastestSegments(
            self.model,
            Path(),
            1,
            by_torch=self._torch,
            by_onnx=self.onnx_opens,
            now_s=lambda: self.now_s,
            rest=self._let_threads_look_out,
        )

    def _torch(self, model: EarlyExitModel, folder: Path, num_threads: int) -> SegmentRunner:
        self.by_torch.append(Timed(model, self._seconds[0], self._advance))
        return self.by_torch[-1]

    def _onnx(self, model: EarlyExitModel, folder: Path, num_threads: int) -> SegmentRunner:
        self.by_onnx.append(Prepared(model, self._seconds[1], self._advance))
        return self.by_onnx[-1]

    def _advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.last = seconds

    def _let_threads_look_out(self) -> None:
        self.now_s += self.after_s.get(self.last, 0.0)


def some_piece(model: EarlyExitModel) -> Piece:
    return piece_of(model, ConfidencePolicy(0.5), random_inputs(np.random.default_rng(0), [3]))


def test_onnx_computes_what_it_computes_faster_and_prepares_what_comes_later() -> None:
    machine = Machine(torch_s=0.003, onnx_s=0.002)
    segments = machine.segments()
    segments.prepare(FULL)
    segments.prepare({WHOLE: Budget(inputs=2)})
    [onnx] = machine.by_onnx
    assert segments.backend == "onnx"
    assert onnx.prepared == [set(FULL), {WHOLE}]
    assert segments.is_ready(WHOLE)
    assert not segments.is_ready(Segment(first=1, end=2, ramp=0))
    before = len(onnx.sizes)
    segments.run(WHOLE, some_piece(machine.model))
    assert len(onnx.sizes) == before + 1


def test_torch_computes_the_model_itself_where_it_is_no_slower() -> None:
    machine = Machine(torch_s=0.25, onnx_s=0.25)
    segments = machine.segments()
    segments.prepare(FULL)
    assert segments.backend == "torch"
    # Tried on a copy: what torch puts in the places of modules could not be exported any more.
    assert machine.by_torch[0].model is not machine.model
    assert machine.by_torch[-1].model is machine.model
    assert segments.is_ready(WHOLE)


def test_both_are_tried_on_full_batches_within_their_tokens_and_on_a_quarter() -> None:
    machine = Machine(torch_s=0.001, onnx_s=0.002)
    machine.segments().prepare(FULL)
    assert set(machine.by_torch[0].sizes) == set(machine.by_onnx[0].sizes) == {(4, 64), (1, 16)}


@pytest.mark.parametrize(
    ("onnx_s", "backend"),
    [
        pytest.param((0.1, *[0.0005] * 7), "onnx", id="a cold start"),
        pytest.param((0.0005, 0.02, 0.0008, 0.0009, 0.0009, 0.02, 0.0008, 0.0009), "onnx", id="two were disturbed"),
        pytest.param((0.0005, 0.004, 0.004, 0.004, 0.0005, 0.004, 0.004, 0.004), "torch", id="one in four was not"),
    ],
)
def test_the_run_in_the_middle_counts(onnx_s: tuple[float, ...], backend: str) -> None:
    machine = Machine(torch_s=0.001, onnx_s=0.0)
    rounds = [seconds for seconds in onnx_s for _ in range(2)]  # at each of two sizes

    def uneven(model: EarlyExitModel, folder: Path, num_threads: int) -> SegmentRunner:
        runner = machine._onnx(model, folder, num_threads)
        seconds = iter(rounds)
        machine.by_onnx[-1]._advance = lambda _: machine._advance(next(seconds))
        return runner

    machine.onnx_opens = uneven
    segments = machine.segments()
    segments.prepare({WHOLE: Budget(inputs=4)})
    assert segments.backend == backend


def test_what_threads_spend_after_a_run_counts() -> None:
    machine = Machine(torch_s=0.001, onnx_s=0.002)
    machine.after_s = {0.001: 0.003}
    segments = machine.segments()
    segments.prepare(FULL)
    assert segments.backend == "onnx"


def test_an_input_of_a_smaller_batch_counts_as_one_of_a_full_one() -> None:
    machine = Machine(torch_s=0.001, onnx_s=0.0)

    def dearer_when_full(model: EarlyExitModel, folder: Path, num_threads: int) -> SegmentRunner:
        runner = machine._onnx(model, folder, num_threads)
        onnx = machine.by_onnx[-1]
        # Of 4 inputs 2 ms, 0.5 for each, where torch takes 0.25; of 1 input 0.5 ms, where torch takes 1.
        onnx._advance = lambda _: machine._advance(0.002 if onnx.sizes[-1][0] == 4 else 0.0005)
        return runner

    machine.onnx_opens = dearer_when_full
    segments = machine.segments()
    segments.prepare({WHOLE: Budget(inputs=4)})
    assert segments.backend == "onnx"


def test_torch_computes_what_onnx_runtime_cannot() -> None:
    def refuse(*_: object) -> SegmentRunner:
        raise PlanError("ONNX Runtime is not installed")

    machine = Machine(torch_s=0.001, onnx_s=0.0)
    segments = FastestSegments(machine.model, Path(), 1, by_torch=machine._torch, by_onnx=refuse)
    segments.prepare(FULL)
    assert segments.backend == "torch"
    assert machine.by_torch[-1].model is machine.model


def test_before_anything_is_prepared_the_network_itself_is_asked() -> None:
    machine = Machine(torch_s=0.001, onnx_s=0.002)
    segments = machine.segments()
    assert not segments.is_ready(WHOLE)
    assert segments.backend is None
    [hidden], outputs_BC = segments.run(WHOLE, some_piece(machine.model))
    [expected], logits_BC = machine.model.run(WHOLE, some_piece(machine.model))
    assert torch.equal(hidden, expected)
    assert outputs_BC is not None
    assert logits_BC is not None
    assert torch.equal(outputs_BC, logits_BC)


def test_who_was_faster_is_told_of_every_network_of_a_chain() -> None:
    machines = [Machine(torch_s=0.001, onnx_s=0.002), Machine(torch_s=0.002, onnx_s=0.001)]
    machines[0].model.info = replace(machines[0].model.info, name="a smaller one")
    found = [machine.segments() for machine in machines]
    chain = ChainNetwork([machine.model for machine in machines], found)
    assert computed_by(chain) is None
    for each in found:
        each.prepare(FULL)
    assert computed_by(chain) == "onnx and torch"
    assert computed_by(found[0]) == "torch"
    assert computed_by(machines[0].model) is None
