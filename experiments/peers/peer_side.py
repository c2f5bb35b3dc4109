"""A peer as a side of the comparison, with the settings that a short sweep found best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from pydantic import BaseModel, ConfigDict

from experiments.peers.client import ClientOptions, LoadResult, run_client
from experiments.peers.options import Dtype, Kernel, ServerOptions
from experiments.peers.plans import Machine
from experiments.peers.processes import PeerProcess, serving
from experiments.peers.workloads import Workload

WAIT_S = 0.005
"""For a batch to fill, where a server waits at all."""


class Tried(BaseModel):
    """One setting of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: ServerOptions
    in_slo_per_s: float
    """Requests answered within the SLO, in a closed loop."""
    answered_per_s: float
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSide:
    """A peer's server that is up."""

    name: str
    process: PeerProcess
    load: ClientOptions
    """But for rate and seed."""

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """Offer this rate; before and after, the server stands still."""
        self.process.resume()
        try:
            changes = {"rate_per_s": rate_per_s, "concurrency": None, "seed": seed}
            return run_client(self.load.model_copy(update=changes))
        finally:
            self.process.pause()

    def saturate(self, concurrency: int) -> LoadResult:
        """Send back to back from so many workers."""
        return run_client(self.load.model_copy(update={"rate_per_s": None, "concurrency": concurrency}))


@contextmanager
def peer_side(name: str, options: ServerOptions, load: ClientOptions) -> Iterator[PeerSide]:
    """The server, until the block ends; it runs only while it is measured."""
    with serving(name, options) as process:
        yield PeerSide(name=name, process=process, load=load.model_copy(update={"url": process.url}))


def settings(
    workload: Workload, dtype: Dtype, machine: Machine, *, slo_s: float, batch: int, port: int
) -> list[ServerOptions]:
    """What a sweep tries: how the cores are shared, batches and waits; the padded modules once, to know them."""
    one_model = Machine(workers=1, threads=machine.workers * machine.threads, batch_limit=machine.batch_limit)
    base = ServerOptions(model=workload.folder.resolve(), dtype=dtype, slo_s=slo_s, port=port)

    def option(shape: Machine, batch: int, wait_s: float, kernel: Kernel) -> ServerOptions:
        changes = {"workers": shape.workers, "threads": shape.threads, "batch": batch, "wait_s": wait_s}
        return base.model_copy(update={**changes, "kernel": kernel})

    batches = sorted({max(1, batch // 4), batch})
    return [
        *(option(machine, each, 0.0, "packed") for each in batches),
        option(machine, batch, WAIT_S, "packed"),
        option(one_model, batch, 0.0, "packed"),
        option(machine, batch, 0.0, "transformers"),
    ]


def sweep(
    name: str, tried: Sequence[ServerOptions], load: ClientOptions, concurrency: int, on_tried: Callable[[Tried], None]
) -> list[Tried]:
    """Every setting, best first: by answers within the SLO under a closed loop, then by all answers."""
    results = []
    for options in tried:
        with peer_side(name, options, load) as side:
            result = side.saturate(concurrency)
        one = Tried(
            options=options,
            in_slo_per_s=result.goodput_per_s,
            answered_per_s=result.answered_per_s,
            p99_s=result.p99_s,
        )
        on_tried(one)
        results.append(one)
    return sorted(results, key=lambda one: (one.in_slo_per_s, one.answered_per_s), reverse=True)


def ports(first: int) -> Iterator[int]:
    """One per peer, apart enough for those that take several."""
    return count(first, 10)
