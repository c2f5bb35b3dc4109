"""Shares of a model's time at its sites, measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from onnx import TensorProto

from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import Site, find_sites, with_shares, work_shares
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import read_torch
from tests.earlyexit.foreign.flows import flow_of
from tests.earlyexit.foreign.found import model_file
from tests.earlyexit.foreign.tiny import beside, graph_of, saved, weight


def site(*tensors: str) -> Site:
    return Site(tensors=tensors, after="", bytes_per_input=None)


def shares(sites: tuple[Site, ...]) -> list[float]:
    return [each.seconds_share or 0.0 for each in sites]


def test_a_share_counts_what_must_have_run_before_a_site_and_leads_to_the_outputs() -> None:
    flow = flow_of("a = work x w", "b = work a v", "copy = light a", "c = work b u", "y = work c t", outputs="y copy")
    seconds = {"operator0": 4.0, "operator1": 3.0, "operator2": 50.0, "operator3": 2.0, "operator4": 1.0}
    sites = with_shares([site("a"), site("c"), site("copy")], flow, ["y"], seconds)
    assert shares(sites) == [0.4, 0.9, 0.4]


def test_without_seconds_every_operator_that_works_counts_the_same() -> None:
    flow = flow_of("a = work x w", "b = light a", "c = work b v", "d = work c u", "y = work d t")
    assert shares(work_shares([site("b"), site("c")], flow)) == [0.25, 0.5]


def test_a_large_layer_takes_most_of_the_time_of_an_onnx_file(tmp_path: Path) -> None:
    nodes = [("MatMul", "x small", "a"), ("MatMul", "a large", "b"), ("MatMul", "b last", "y")]
    weights = [weight("small", 4, 2048), weight("large", 2048, 2048), weight("last", 2048, 2)]
    file = read_onnx(saved(tmp_path, graph_of(nodes, ["x"], ["y"], weights)))
    before, behind = shares(file.timed(find_sites(file.flow)))
    assert 0 < before < 0.3
    assert behind - before > 0.5
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]


def test_weights_beside_a_file_are_found_where_it_lies(tmp_path: Path) -> None:
    stored = weight("w", 4, 6)
    (tmp_path / "w.bin").write_bytes(stored.raw_data)
    nodes = [("MatMul", "x w", "a"), ("MatMul", "a v", "y")]
    file = read_onnx(saved(tmp_path, graph_of(nodes, ["x"], ["y"], [beside(stored, "w.bin"), weight("v", 6, 2)])))
    assert 0 < shares(file.timed(find_sites(file.flow)))[0] < 1
    (tmp_path / "w.bin").unlink()
    with pytest.raises(GraphError, match=r"its weights are not there: .*w\.bin"):
        file.timed(find_sites(file.flow))


def test_bytes_that_the_file_does_not_tell_are_measured() -> None:
    file = read_onnx(model_file("squeezenet"))
    told = find_sites(file.flow)
    untold = find_sites(replace(file.flow, bytes_per_input={}))
    assert {each.bytes_per_input for each in untold} == {None}
    measured = file.timed(untold, repeats=1)
    assert [each.bytes_per_input for each in measured] == [each.bytes_per_input for each in told]


def test_inputs_that_a_model_cannot_take_are_told(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "a"), ("MatMul", "a v", "y")]
    weights = [weight("w", 4, 6), weight("v", 6, 2)]
    model = graph_of(nodes, [("x", TensorProto.FLOAT, ("batch", "side"))], ["y"], weights)
    file = read_onnx(saved(tmp_path, model), open_size=5)
    with pytest.raises(GraphError, match=r"ONNX Runtime cannot run .*model\.onnx on inputs of x \[1, 5\]: "):
        file.timed(find_sites(file.flow))


def test_torch_modules_are_timed_operator_by_operator() -> None:
    graph = read_torch("tests.earlyexit.foreign.networks:resnet14")
    found = shares(graph.timed(find_sites(graph.flow), repeats=3))
    assert len(found) == 7
    assert all(0 < first < second < 1 for first, second in pairwise(found))
