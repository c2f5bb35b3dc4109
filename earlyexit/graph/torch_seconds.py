"""Times the operators of a traced torch module one by one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import fx

from earlyexit.graph.shares import REPEATS, with_shares
from earlyexit.graph.sites import Site
from earlyexit.graph.torch_module import TorchGraph


class _Stopwatch(fx.Interpreter):
    """Runs a module and notes how long every node took, of all runs the shortest."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = perf_counter()
        given = super().run_node(n)
        self.seconds[n.name] = min(self.seconds.get(n.name, inf), perf_counter() - begin)
        return given


def time_torch(graph: TorchGraph, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
    """The sites with shares of seconds: one input alone, on one thread of this CPU."""
    watch, threads = _Stopwatch(graph.module), torch.get_num_threads()
    inputs = [value[:1] for value in graph.examples.values()]
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(repeats):
                watch.run(*inputs, enable_io_processing=False)
    finally:
        torch.set_num_threads(threads)
    return with_shares(sites, graph.flow, graph.flow.outputs, watch.seconds)
