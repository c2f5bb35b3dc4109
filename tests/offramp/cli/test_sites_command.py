"""`offramp sites`, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from tests.earlyexit.foreign.tiny import beside, branching, graph_of, model_file, saved, weight
from tests.offramp.cli.runs import Captured, printed, refused, run, run_alone

KEYS = ["tensor", "after", "bytes_per_input", "seconds_share"]


def test_sites_or_sets_are_printed_as_json_and_as_a_table_of_one_output(capsys: Captured, tmp_path: Path) -> None:
    model = model_file("squeezenet")
    answer = printed(capsys, "sites", model)
    assert list(answer) == ["nodes", "sites"]
    assert answer["nodes"] == 66
    assert len(answer["sites"]) == 17
    assert all(list(site) == KEYS for site in answer["sites"])
    first = answer["sites"][0]
    assert (first["tensor"], first["after"], first["bytes_per_input"]) == ("r2", "n2", 64 * 55 * 55 * 4)
    assert 0 < answer["sites"][0]["seconds_share"] < answer["sites"][-1]["seconds_share"] < 1
    assert run("sites", model, "--no-measure") == 0
    assert "light_squeezenet.onnx: 17 sites among 66 operators" in capsys.readouterr().out
    answer = printed(capsys, "sites", "tests.earlyexit.foreign.modules:plain", "--no-measure")
    assert [site["seconds_share"] for site in answer["sites"]] == [None, None]
    # Three layers that each read a mask, which the model derives from its input.
    nodes = [("Relu", "x", "m"), ("MatMul", "x w", "h0")]
    for k in range(3):
        nodes += [("MatMul", f"h{k} w", f"a{k}"), ("MatMul", f"a{k} w", f"b{k}")]
        nodes += [("Mul", f"b{k} m", f"c{k}"), ("Add", f"c{k} h{k}", f"h{k + 1}")]
    masked = saved(tmp_path, graph_of([*nodes, ("MatMul", "h3 w", "y")], ["x"], ["y"], [weight("w", 4, 4)]))
    answer = printed(capsys, "sites", masked, "--sets")
    assert [site["tensor"] for site in answer["sites"]] == [["h0", "m"], ["h1", "m"], ["h2", "m"], "h3"]
    assert all(site["bytes_per_input"] == 32 for site in answer["sites"][:3])
    model = model_file("minilm")
    assert "has no site: no single tensor between its operators carries all information" in refused(
        capsys, "sites", model, "--no-measure"
    )
    answer = printed(capsys, "sites", model, "--no-measure", "--output", "461")
    assert len(answer["sites"]) == 6
    assert "has no output 'logits'; it has output, 463" in refused(capsys, "sites", model, "--output", "logits")


def test_a_model_that_cannot_be_cut_or_run_is_refused_in_one_line(tmp_path: Path, capsys: Captured) -> None:
    one = saved(tmp_path, graph_of([("MatMul", "x w", "y")], ["x"], ["y"], [weight("w", 4, 4)]), "one.onnx")
    assert "has no site: 1 of its 1 operators compute" in refused(capsys, "sites", one)
    branches = saved(tmp_path, graph_of([branching("Loop")], ["x"], ["y"]), "loop.onnx")
    assert "Loop (the_Loop) is control flow" in refused(capsys, "sites", branches)
    outside = graph_of([("MatMul", "x w", "y")], ["x"], ["y"], [beside(weight("w", 4, 4), "../w")])
    assert "outside the model's folder" in refused(capsys, "sites", saved(tmp_path, outside, "outside.onnx"))
    nodes = [("MatMul", "x w", "a"), ("Unheard", "a", "b"), ("MatMul", "b w", "y")]
    model = saved(tmp_path, graph_of(nodes, ["x"], ["y"], [weight("w", 4, 4)]))
    assert "with --no-measure, sites are listed without times" in refused(capsys, "sites", model)
    answer = printed(capsys, "sites", model, "--no-measure")
    assert [site["tensor"] for site in answer["sites"]] == ["b"]
    wide = graph_of([("Relu", "x", "y")], [("x", 1, ("batch", "width"))], ["y"])
    said = refused(capsys, "sites", saved(tmp_path, wide, "wide.onnx"), "--open-size", 10**15, status=1)
    assert said.startswith("Unable to allocate 7.11 PiB")


def test_sites_of_an_onnx_file_need_no_torch() -> None:
    command = ("sites", model_file("squeezenet"), "--no-measure", "--json")
    run_alone(*command, without="torch ray transformers").check_returncode()
