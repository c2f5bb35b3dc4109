"""Offramp as a side of the comparison: one service, which changes to a side's plan when its turn comes."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from deployments.settings import ServeSettings
from earlyexit.errors import OfframpError
from experiments.live.service import hand_control
from experiments.peers.client import ClientOptions, LoadResult, run_client
from experiments.peers.offramp_server import DONE, READY, OfframpOptions
from experiments.peers.options import Dtype, ServerOptions
from experiments.peers.plans import Machine, Prepared
from experiments.peers.processes import LOGS, ROOT, PeerProcess, end, environment
from experiments.peers.workloads import Workload
from optimizer.plan import Plan
from optimizer.plan_file import plan_document


@dataclass(slots=True)
class Remote:
    """The service's process, told over its input which plan to follow."""

    process: subprocess.Popen[str]
    log: Path
    following: str = ""

    def change_to(self, name: str) -> None:
        """Put a plan in force, and hold it; nothing is lost meanwhile. Raises OfframpError where the service ended."""
        if name != self.following:
            stdin = self.process.stdin
            assert stdin is not None
            stdin.write(f"{name}\n")
            stdin.flush()
            self.hear(DONE)
            self.following = name

    def hear(self, word: str) -> None:
        """Wait for the service to say it; raises OfframpError where it ends instead."""
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.strip() == word:
                return
        raise OfframpError(f"the service ended; {self.log} says why")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfframpSide:
    """Offramp under one plan."""

    name: str
    plan: Plan
    load: ClientOptions
    """But for rate and seed."""
    remote: Remote = field(repr=False)
    process: PeerProcess = field(repr=False)

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """Offer this rate; before and after, the service stands still."""
        self.process.resume()
        try:
            self.remote.change_to(self.name)
            changes = {"rate_per_s": rate_per_s, "concurrency": None, "seed": seed}
            return run_client(self.load.model_copy(update=changes))
        finally:
            self.process.pause()


@contextmanager
def offramp_sides(
    workload: Workload, prepared: Prepared, dtype: Dtype, machine: Machine, load: ClientOptions, *, port: int
) -> Iterator[list[OfframpSide]]:
    """The service, and a side for each of its plans; it runs only while it is measured. `load` is what is sent.

    As it is shipped, but for probes: a share of inputs that run to the end for the record answers no question here.
    """
    settings = ServeSettings(
        model=str(workload.folder.resolve()),
        plan=prepared.plans["stock"],
        slots={"cpu": 1},
        control=hand_control(prepared.problem, workload.policy, state=f"peers-{workload.name}"),
        slo_s=prepared.slo_s,
        dtype=dtype,
        threads_per_replica=machine.threads,
    )
    plans = {name: plan_document(plan) for name, plan in prepared.plans.items()}
    options = OfframpOptions(settings=settings, plans=plans, port=port, metrics_port=port + 1)
    shared = ServerOptions(model=workload.folder, dtype=dtype, threads=machine.threads)
    with _running(options, shared) as (remote, process):
        yield [
            OfframpSide(
                name=name,
                plan=plan,
                remote=remote,
                process=process,
                load=load.model_copy(update={"url": process.url}),
            )
            for name, plan in prepared.plans.items()
        ]


@contextmanager
def _running(options: OfframpOptions, shared: ServerOptions) -> Iterator[tuple[Remote, PeerProcess]]:
    mark = uuid.uuid4().hex
    LOGS.mkdir(parents=True, exist_ok=True)
    told, log = LOGS / "offramp.json", LOGS / "offramp.log"
    told.write_text(options.model_dump_json(), encoding="utf-8")
    with log.open("w", encoding="utf-8") as log_file:
        running = subprocess.Popen(
            [sys.executable, "-m", "experiments.peers.offramp_server", str(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd=ROOT,
            env=environment(shared, mark),
            start_new_session=True,
            text=True,
        )
    remote = Remote(running, log)
    process = PeerProcess(f"http://127.0.0.1:{options.port}", running.pid, mark)
    try:
        remote.hear(READY)
        yield remote, process
    finally:
        end(process, running)
