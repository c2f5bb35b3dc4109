"""Tracing torch modules: the same outputs, the sites of the graph, and what cannot be traced."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from earlyexit.errors import GraphError
from earlyexit.foreign import torch_module
from earlyexit.foreign.dataflow import carriers, find_sites
from earlyexit.foreign.torch_module import TorchModel, read_torch
from tests.earlyexit.foreign.removal import carriers_by_removal

HERE = "tests.earlyexit.foreign.networks"


@pytest.fixture(params=["plain", "resnet14", "small_bert"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def read(name: str) -> TorchModel:
    torch.manual_seed(0)
    return read_torch(f"{HERE}:{name}")


def test_carriers_of_traced_modules_are_what_disconnects_them(name: str) -> None:
    flow = read(name).flow
    assert list(carriers(flow)) == carriers_by_removal(flow)
    assert flow.live[0].kind == "work" or name == "resnet14"


def test_a_residual_network_has_a_site_after_its_stem_and_after_each_block() -> None:
    sites = find_sites(read("resnet14").flow)
    sizes = [16 * 32 * 32] * 3 + [32 * 16 * 16] * 2 + [64 * 8 * 8] * 2
    assert [site.bytes_per_input for site in sites] == [4 * size for size in sizes]


def test_a_bert_has_sites_after_its_embedding_attentions_and_layers_and_before_its_classifier() -> None:
    graph = read("small_bert")
    assert [site.bytes_per_input for site in find_sites(graph.flow)] == [4 * 7 * 32] * 5 + [4 * 32]
    assert list(graph.examples) == ["input_ids", "attention_mask"]


def test_tokens_of_any_length_are_taken() -> None:
    graph = read("small_bert")
    [given] = graph.run(torch.ones(3, 5, dtype=torch.long), torch.ones(3, 5, dtype=torch.long))
    assert given.shape == (3, 2)


def test_nothing_writes_in_place_and_taking_a_tuple_apart_is_no_operator() -> None:
    flow = read("plain").flow
    assert not any(operator.op.endswith("_.default") or operator.op == "getitem" for operator in flow.operators)
    assert len(find_sites(flow)) == 2


def test_what_cannot_be_exported_is_traced_symbolically(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch_module, "_exported", fails)
    flow = read.__wrapped__("plain").flow
    assert [operator.op for operator in flow.operators][:3] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert list(carriers(flow)) == carriers_by_removal(flow)
    assert len(find_sites(flow)) == 2


def test_what_neither_tracer_can_follow_is_refused_in_one_line() -> None:
    with pytest.raises(
        GraphError, match=r"cannot be traced with an open batch: torch.export: .*; torch.fx: "
    ) as refused:
        read("decides")
    assert "\n" not in str(refused.value)
