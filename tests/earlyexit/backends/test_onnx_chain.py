"""A chain whose networks run on ONNX Runtime answers as one that torch runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from earlyexit.backends import onnx as onnx_backend
from earlyexit.backends.onnx import OnnxSegments, export
from earlyexit.network.boundary import Segment, Split
from earlyexit.network.chain_network import ChainNetwork
from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from tests.earlyexit.network.chains import chained, follow, inputs_for, offline
from tests.earlyexit.network.cuts import assert_same

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def export_here(model: EarlyExitModel, files: Mapping[Segment, Path]) -> None:
    """Another process would load for seconds what this one has loaded."""
    for segment, path in files.items():
        export(model, segment, path)


def test_answers_are_those_of_torch_and_the_head_at_an_end_is_exported_only_where_it_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_backend, "export_elsewhere", export_here)
    network, policy = chained(1, 1, at=((), ())), ConfidencePolicy(0.5)
    inputs = inputs_for(network, count=8)
    members = [OnnxSegments(member, cache=tmp_path, num_threads=1) for member in network.members]
    segments = ChainNetwork(network.members, members)
    large = Split(first=1, end=2, batch=8)
    for ramps in ((0,), ()):
        small = Split(first=0, end=1, batch=8, ramps=ramps)
        wanted = {each: split.budget for split in (small, large) for each in split.segments()}
        segments.prepare(wanted)
        assert all(map(segments.is_ready, wanted))
        answers, _ = follow(network, policy, inputs, (small, large), segments=segments)
        expected, _ = offline(network, policy, inputs, ramps, (0, 1))
        assert_same(answers, expected, within=1e-4)
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.onnx"))
    assert names == ["m0-0-1", "m0-0-1-exit", "m1-0-1-exit"]
    segments.prepare({Segment(first=1, end=2, ramp=None): large.budget})
    segments.prepare({Segment(first=1, end=2, ramp=None): large.budget})
    assert not segments.is_ready(Segment(first=0, end=1, ramp=0))
