"""The sides of a comparison: a peer with the settings that a sweep found best, and Offramp under each of its plans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO

from pydantic import BaseModel, ConfigDict

from deployments.settings import ServeSettings
from earlyexit.backends.backends import BackendName
from earlyexit.errors import OfframpError
from experiments.peers.client import ClientOptions, LoadResult, run_client
from experiments.peers.offramp_server import DONE, READY, OfframpOptions
from experiments.peers.plans import Prepared
from experiments.peers.processes import LOGS, Server, running, serving, threads_of
from experiments.peers.stock import Dtype, Kernel, ServerOptions
from experiments.peers.workloads import FOLDER, Workload
from offramp.demo.plans import Processors
from offramp.demo.service import hand_control
from optimizer.plan_file import plan_document

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
class ServedSide:
    """A server that is up, alone on the machine."""

    name: str
    server: Server = field(repr=False)
    load: ClientOptions
    """But for rate and seed."""
    is_ours: bool = False
    begin: Callable[[], None] = lambda: None
    """Puts the server into the state that is measured; raises OfframpError where it has ended."""

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """Offer this rate."""
        self.begin()
        changes = {"url": self.server.url, "rate_per_s": rate_per_s, "concurrency": None, "seed": seed}
        return run_client(self.load.model_copy(update=changes))

    def saturate(self, concurrency: int, seconds: float) -> LoadResult:
        """A closed loop of so many workers."""
        self.begin()
        changes = {"url": self.server.url, "concurrency": concurrency, "rate_per_s": None, "duration_s": seconds}
        return run_client(self.load.model_copy(update=changes))


def settings(workload: Workload, dtype: Dtype, machine: Processors, *, batch: int, port: int) -> list[ServerOptions]:
    """What a sweep tries: how the cores are shared, batches, waits, backends."""
    base = ServerOptions(model=workload.folder.resolve(), dtype=dtype, port=port)
    all_cores = machine.workers * machine.threads
    onnx: list[Kernel] = ["onnx"] if dtype == "float32" else []
    shapes: list[tuple[int, int, int, float, Kernel]] = [
        *((machine.workers, machine.threads, each, 0.0, "packed") for each in sorted({max(1, batch // 4), batch})),
        (machine.workers, machine.threads, batch, WAIT_S, "packed"),
        (1, all_cores, batch, 0.0, "packed"),
        *((machine.workers, machine.threads, batch, 0.0, kernel) for kernel in onnx),
    ]
    names = ("workers", "threads", "batch", "wait_s", "kernel")
    return [base.model_copy(update=dict(zip(names, shape, strict=True))) for shape in shapes]


def sweep(
    name: str, tried: Sequence[ServerOptions], load: ClientOptions, concurrency: int, on_tried: Callable[[Tried], None]
) -> list[Tried]:
    """Every setting, best first: by answers within the SLO under a closed loop, then by all answers."""
    results = []
    for options in tried:
        with serving(name, options) as server:
            changes = {"url": server.url, "rate_per_s": None, "concurrency": concurrency}
            result = run_client(load.model_copy(update=changes))
        one = Tried(
            options=options,
            in_slo_per_s=result.goodput_per_s,
            answered_per_s=result.answered_per_s,
            p99_s=result.p99_s,
        )
        on_tried(one)
        results.append(one)
    return sorted(results, key=lambda one: (one.in_slo_per_s, one.answered_per_s), reverse=True)


@contextmanager
def offramp_sides(
    workload: Workload,
    prepared: Prepared,
    dtype: Dtype,
    machine: Processors,
    load: ClientOptions,
    *,
    port: int,
    backend: BackendName = "torch",
) -> Iterator[list[ServedSide]]:
    """One service whose controller never plans, and a side for each of the plans that it is told to follow.

    The service is as it is shipped, without probes, which answer no question here.
    """
    service = ServeSettings(
        model=str(workload.folder.resolve()),
        plan=prepared.plans["stock"],
        slots={"cpu": 1},
        control=hand_control(prepared.problem, workload.policy, FOLDER / "state" / f"{workload.name}.sqlite"),
        slo_s=prepared.slo_s,
        dtype=dtype,
        backend=backend,
        threads_per_replica=machine.threads,
    )
    told = LOGS / "offramp.json"
    told.parent.mkdir(parents=True, exist_ok=True)
    documents = {name: plan_document(plan) for name, plan in prepared.plans.items()}
    options = OfframpOptions(settings=service, plans=documents, port=port, metrics_port=port + 1)
    told.write_text(options.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "experiments.peers.offramp_server", str(told)]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    log, environment = told.with_suffix(".log"), threads_of(service.threads_per_replica)
    with running(command, f"http://127.0.0.1:{port}", log, environment, **piped) as server:
        remote = Remote(server)
        remote.hear(READY)
        yield [
            ServedSide(
                name=name,
                server=server,
                load=load,
                is_ours=True,
                begin=partial(remote.change_to, name),
            )
            for name in prepared.plans
        ]


@dataclass(slots=True)
class Remote:
    """The service's process, told over its input which plan to follow."""

    server: Server
    following: str = ""

    def change_to(self, name: str) -> None:
        """Put a plan in force, and hold it; nothing is lost meanwhile. Raises OfframpError where the service ended."""
        if name != self.following:
            stdin: IO[str] = self.server.process.stdin  # type: ignore[assignment] # it was opened as text
            stdin.write(f"{name}\n")
            stdin.flush()
            self.hear(DONE)
            self.following = name

    def hear(self, word: str) -> None:
        """Wait for the service to say it; raises OfframpError where it ends instead."""
        assert self.server.process.stdout is not None
        if not any(line.strip() == word for line in self.server.process.stdout):
            raise OfframpError(f"the service ended; {self.server.log} says why")
