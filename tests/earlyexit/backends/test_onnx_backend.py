"""The ONNX Runtime backend, compared with torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.backends import onnx as onnx_backend
from earlyexit.backends.onnx import CUDA, OnnxSegments, export, load_runtime, names_before, part_of, run_in_place
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Attention, Member
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Encoded, Segment, Split
from earlyexit.network.checkpoint import RampOptions
from earlyexit.network.model import ChainNetwork, Cut, EarlyExitModel, TorchRunner, locate
from earlyexit.network.piece import Layout, Piece
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.foreign.test_exported import inputs_of, model_of
from tests.earlyexit.network.chains import chained, follow, inputs_for, offline
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs, wire_of

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# One input, one token, equal lengths, mixed lengths up to the longest the model takes.
MIXED = [5, 64, 1, 12, 5, 30]
BATCHES = ([7], [1], [1, 1], [9, 9, 9], MIXED)
# Between the confidences of the random ramps, so that every ramp lets some inputs leave and some pass.
POLICY = ConfidencePolicy(0.55)


def fresh_model(*, num_blocks: int = 2) -> EarlyExitModel:
    """Its exits read the first token with two layers; those of other tests read the mean with one layer."""
    ramps = RampOptions(style="pooler", pooling="first")
    model = small(LabelTask(("no", "yes")), seed=0, num_blocks=num_blocks, max_length=64, ramps=ramps)
    model.temperatures_E.copy_(torch.tensor([0.5, 2.0, 0.7])[-num_blocks:])
    return model


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return fresh_model()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def segments(model: EarlyExitModel, cache: Path) -> OnnxSegments:
    return opened(model, cache, *EXPORTED)


def opened(model: EarlyExitModel, cache: Path, *wanted: Segment) -> OnnxSegments:
    """A backend that prepared some segments. The export is made in this process, which takes less time."""
    segments = OnnxSegments(model, cache)
    if not segments.file.is_file():
        export(model, segments.file)
    segments.prepare(wanted)
    return segments


def piece_before(model: EarlyExitModel, block: int, lengths: Sequence[int]) -> Piece:
    piece = piece_of(model, POLICY, random_inputs(np.random.default_rng(sum(lengths)), lengths))
    if block == 0:
        return piece
    (step,) = Cut(model, 0, block, (), POLICY).run(piece)
    assert step.survivors is not None
    return step.survivors


def assert_runners_agree(model: EarlyExitModel, segments: OnnxSegments, segment: Segment) -> None:
    for lengths in BATCHES:
        piece = piece_before(model, segment.first, lengths)
        with torch.inference_mode():
            hidden, logits_BC = model.run(segment, piece)
            onnx_hidden, onnx_logits_BC = segments.run(segment, piece)
        torch.testing.assert_close(onnx_hidden, hidden, atol=1e-4, rtol=0)
        assert (logits_BC is None) == (onnx_logits_BC is None)
        if logits_BC is not None:
            torch.testing.assert_close(onnx_logits_BC, logits_BC, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["pictures", "texts"])
def test_a_traced_module_runs_any_number_of_inputs_to_its_end(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    segments = opened(model, tmp_path, whole)
    for count in (1, 3, 5):
        piece = piece_of(model, POLICY, inputs_of(name, count))
        torch.testing.assert_close(segments.run(whole, piece)[1], model.run(whole, piece)[1], atol=1e-4, rtol=0)


LAST = Segment(first=1, end=2, ramp=None)
EXPORTED = [Segment(first=0, end=1, ramp=0), LAST, Segment(first=0, end=2, ramp=None)]
"""The segments between all ramps, and one of two blocks with an exit, which most tests run."""


def test_sessions_are_opened_while_the_device_runs(model: EarlyExitModel, cache: Path, encoded: list[Encoded]) -> None:
    """First in the file, because later tests find the exported file in the cache."""
    segments = OnnxSegments(model, cache)
    split = Split(first=0, end=1, batch=8)
    runner, by_torch = TorchRunner(model, POLICY, segments), TorchRunner(model, POLICY)
    piece = runner.from_wire(wire_of(encoded[:4]))
    expected = hidden_after(by_torch, split, piece)
    (segment,) = split.segments()
    preparing = threading.Thread(target=runner.prepare, args=([split],))
    preparing.start()
    runs_by_torch = 0
    while segments.sessions.find(segment) is None and preparing.is_alive():
        assert torch.allclose(hidden_after(runner, split, piece), expected, atol=1e-5)
        runs_by_torch += 1
        preparing.join(0.1)  # nothing is won by keeping the exporter from its core
    preparing.join()
    assert segments.sessions.find(segment) is not None
    assert runs_by_torch > 10
    assert segment.ramp is None
    assert_runners_agree(model, segments, segment)


def hidden_after(runner: TorchRunner, split: Split, piece: Piece) -> Tensor:
    members = tuple(Member(sample_id=one.sample_ids[0], payload=one) for one in piece.singles())
    *_, last = runner.run(Batch(split=split, members=members, tokens=len(members), started_s=0.0))
    assert last.survivors is not None
    return last.survivors.tensors[0]


@pytest.mark.gpu
def test_onnx_runtime_and_torch_agree_on_a_gpu(cache: Path) -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has no CUDA: it is not that of the extra gpu")
    model = fresh_model().to("cuda")
    segments = opened(model, cache, *EXPORTED)
    for segment in EXPORTED:
        assert_runners_agree(model, segments, segment)


def test_a_session_with_bound_tensors_returns_the_same(model: EarlyExitModel, segments: OnnxSegments) -> None:
    for segment, lengths in product(EXPORTED[:2], BATCHES):
        piece = piece_before(model, segment.first, lengths)
        with torch.inference_mode():
            hidden, logits_BC = segments.run(segment, piece)
        session, names = segments.sessions.get(segment)
        values = dict(zip(names_before(model, segment.first), piece.tensors, strict=True))
        layout = Layout(piece.lengths_B, attention="slotted")
        room = segments.room_for(segment, len(lengths), sum(lengths))
        run_in_place(session, {name: values[name] if name in values else getattr(layout, name) for name in names}, room)
        assert list(room) == [f"hidden@{segment.end}", f"outputs@{segment.end}"]
        torch.testing.assert_close(tuple(room.values()), (*hidden, logits_BC))


@pytest.mark.parametrize("attention", ["auto", "padded", "slotted"])
def test_one_graph_serves_all_schemes_of_attention(attention: Attention, cache: Path) -> None:
    model = fresh_model()
    inputs = random_inputs(np.random.default_rng(3), MIXED)
    alone = answers_alone(model, POLICY, inputs)
    model.attention = attention
    segments = opened(model, cache, *EXPORTED)
    for bounds in ((0, 2), (0, 1, 2)):
        assert_same(answers_in_cuts(model, POLICY, inputs, bounds, segments=segments), alone, within=1e-4)


def test_a_file_in_the_cache_is_used_again(model: EarlyExitModel, segments: OnnxSegments) -> None:
    piece = piece_before(model, 1, [4, 2])
    path = segments.file
    os.utime(path, (1, 1))
    opened(model, path.parents[1], LAST).run(LAST, piece)
    assert path.stat().st_mtime == 1


@pytest.mark.parametrize("part", ["backbone.", "head.", "temperatures_E"])
def test_a_changed_weight_does_not_use_the_old_file(part: str, segments: OnnxSegments, cache: Path) -> None:
    changed = fresh_model()
    assert OnnxSegments(changed, cache).file == segments.file
    next(each for name, each in changed.state_dict().items() if name.startswith(part)).view(-1)[1] += 1
    assert OnnxSegments(changed, cache).file != segments.file


SKIPPING = """<ir_version: 10, opset_import: ["": 20]>
model (float[B, 2] x) => (float[B, 2] a1, float[B, 2] s1, float[B, 2] a2, float[B, 2] s2, float[B, 2] y) {
    a1 = Relu(x) s1 = Identity(a1) a2 = Neg(a1) s2 = Identity(s1) y = Sub(a2, a1)
}"""
"""A tensor s passes two blocks unchanged, and the last block reads its original."""


def test_a_part_reads_a_tensor_that_earlier_blocks_passed_on() -> None:
    graph = onnx.utils.Extractor(onnx.parser.parse_model(SKIPPING))
    two, three, five = (np.full((1, 2), value, np.float32) for value in (2, 3, 5))
    for given, wanted, expected in (
        ({"a1": five, "s1": three}, ["a2", "s2"], [-five, three]),
        ({"a2": two, "s2": three, "x": five}, ["y"], [two - three]),
        ({"x": five}, ["s2", "y"], [five, -2 * five]),
    ):
        part = part_of(graph, list(given), wanted)
        session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
        np.testing.assert_equal(session.run(None, {each.name: given[each.name] for each in part.graph.input}), expected)


def test_sessions_of_the_plan_before_the_last_are_closed(model: EarlyExitModel, cache: Path) -> None:
    one, two, _ = EXPORTED
    segments = opened(model, cache, one, two)
    for wanted in ({one}, {two}, {two}):
        segments.prepare(wanted)
    assert None not in map(segments.sessions.find, (one, two))
    segments.prepare(set())
    assert [segments.sessions.find(each) is None for each in (one, two)] == [True, False]
    piece = piece_before(model, one.first, [3])
    torch.testing.assert_close(segments.run(one, piece), model.run(one, piece), rtol=0, atol=0)


@pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="this one has CUDA")
def test_without_cuda_the_error_says_what_to_install() -> None:
    message = r"has no CUDAExecutionProvider; it has .*CPUExecutionProvider.*; run: .* pip install '\.\[gpu\]'"
    with pytest.raises(PlanError, match=message):
        load_runtime("cuda")


def test_bfloat16_and_a_missing_onnxruntime_are_refused(
    model: EarlyExitModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="float32 models here, not bfloat16"):
        OnnxSegments(small().to(torch.bfloat16), tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PlanError, match=r"run in Offramp's clone: pip install '\.\[onnx\]', or '\.\[gpu\]' for a GPU"):
        OnnxSegments(model, tmp_path)


def test_replicas_share_one_export(
    model: EarlyExitModel, segments: OnnxSegments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[Path] = []
    asked = threading.Event()

    def export_slowly(_: EarlyExitModel, path: Path) -> None:
        asked.wait(timeout=60)  # the other replica has found no file either
        exported.append(path)
        for file in segments.file.parent.glob(f"{path.name}*"):  # an export of its own would take seconds
            shutil.copy(file, path.parent)

    monkeypatch.setattr(onnx_backend, "export_elsewhere", export_slowly)
    first, second = (OnnxSegments(model, tmp_path) for _ in range(2))
    other = threading.Thread(target=second.prepare, args=([LAST],))
    lock = fcntl.flock

    def locked(file: TextIO, operation: int) -> None:
        if threading.current_thread() is other:
            asked.set()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", locked)
    other.start()
    first.prepare([LAST])
    other.join()
    assert exported == [first.file]
    assert None not in [segments.sessions.find(LAST) for segments in (first, second)]


def test_the_answers_of_a_chain_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_backend, "export_elsewhere", export)  # another process would load modules for seconds
    network, policy = chained(1, 1, at=((), ())), ConfidencePolicy(0.5)
    inputs = inputs_for(network, count=8)
    members = [OnnxSegments(member, tmp_path) for member in network.members]
    segments = ChainNetwork(network.members, members)

    def is_open(segment: Segment) -> bool:
        index, own = locate(network.chain, segment)
        return members[index].sessions.find(own) is not None

    large = Split(first=1, end=2, batch=8)
    for ramps in ((0,), ()):
        small = Split(first=0, end=1, batch=8, ramps=ramps)
        wanted = {each: split.budget for split in (small, large) for each in split.segments()}
        segments.prepare(wanted)
        assert all(map(is_open, wanted))
        answers, _ = follow(network, policy, inputs, (small, large), segments=segments)
        expected, _ = offline(network, policy, inputs, ramps, (0, 1))
        assert_same(answers, expected, within=1e-4)
    assert sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("onnx/*.onnx")) == ["m0", "m1"]
    segments.prepare({Segment(first=1, end=2, ramp=None): large.budget})
    segments.prepare({Segment(first=1, end=2, ramp=None): large.budget})
    assert not is_open(Segment(first=0, end=1, ramp=0))
