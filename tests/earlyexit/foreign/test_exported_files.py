"""Torch modules written as ONNX files: the same sites as of the module itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxscript")

from earlyexit.backends.onnx import quiet_exporter
from earlyexit.foreign.dataflow import carriers, find_sites
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import read_torch
from tests.earlyexit.foreign import networks
from tests.earlyexit.foreign.removal import carriers_by_removal


def exported(name: str, folder: Path) -> Path:
    """The ONNX file of a network of `networks`, with an open batch."""
    torch.manual_seed(0)
    network, examples = getattr(networks, name)()
    named = examples if isinstance(examples, dict) else None
    axes = {key: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.AUTO} for key in named or ()}
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            network.eval(),
            () if named else examples,
            kwargs=named,
            dynamo=True,
            dynamic_shapes=axes if named else ({0: torch.export.Dim.DYNAMIC},),
            verbose=False,
        )
    assert program is not None
    program.save(folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("name", ["plain", "resnet14", "small_bert"])
def test_an_exported_module_has_the_sites_of_the_module(name: str, tmp_path: Path) -> None:
    flow = read_onnx(exported(name, tmp_path), open_size=7).flow
    assert list(carriers(flow)) == carriers_by_removal(flow)
    torch.manual_seed(0)
    traced = find_sites(read_torch(f"tests.earlyexit.foreign.networks:{name}").flow)
    assert [site.bytes_per_input for site in find_sites(flow)] == [site.bytes_per_input for site in traced]
