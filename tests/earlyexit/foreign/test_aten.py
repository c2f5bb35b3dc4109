"""Graphs as data: only operators on tensors run, whatever the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.errors import ModelFolderError
from earlyexit.foreign.torch_backbone import Graph, module_of

CPU = torch.device("cpu")


def graph_of(operator: str, *args: Any, **kwargs: Any) -> Graph:
    """One call, of a tensor `a` that is given."""
    call = ["r", operator, list(args), kwargs]
    return Graph.model_validate({"takes": ["a"], "weights": [], "calls": [call], "gives": ["r"]})


def test_operators_on_tensors_run() -> None:
    [result] = module_of(graph_of("aten.relu.default", {"tensor": "a"}), CPU)(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, 2.0]


def test_operators_that_make_tensors_run() -> None:
    graph = graph_of("aten.full.default", [2], 3, dtype={"dtype": "int64"}, device={"device": None})
    [result] = module_of(graph, CPU)(torch.zeros(1))
    assert result.tolist() == [3, 3]


@pytest.mark.parametrize("operator", ["aten.relu.default", "add"])
def test_names_of_arguments_cannot_be_code(operator: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    code = f"x=__import__('pathlib').Path({str(touched)!r}).touch(), y"
    with pytest.raises(ModelFolderError, match="has no argument"):
        module_of(graph_of(operator, {"tensor": "a"}, **{code: 1}), CPU)(torch.zeros(1))
    assert not touched.exists()


def test_no_operator_reaches_a_file(tmp_path: Path) -> None:
    made = tmp_path / "made"
    graph = graph_of("aten.from_file.default", str(made), shared=True, size=4, dtype={"dtype": "uint8"})
    with pytest.raises(ModelFolderError, match="no operator that computes"):
        module_of(graph, CPU)(torch.zeros(1))
    assert not made.exists()


@pytest.mark.parametrize(
    "name",
    [
        "aten.__class__.__class__",
        "aten.__init__.__getattribute__",
        "aten.__dict__.__setitem__",
        "aten.relu.__class__",
        "aten.relu.default.__class__",
        "aten.relu.redispatch",
        "aten.relu_.default",  # writes to what it is given
        "aten.save.default",
        "os.system.default",
        "aten",
        "",
    ],
)
def test_names_reach_nothing_but_operators(name: str) -> None:
    with pytest.raises(ModelFolderError):
        module_of(graph_of(name, {"tensor": "a"}), CPU)
