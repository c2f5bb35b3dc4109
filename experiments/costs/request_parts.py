"""Processor time per request by part of a service, at some rates and saturated; this checkout alone, or beside another.

Each side's service is started anew in every round, by its own checkout, around a model that costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.checkout import Checkout, checked_out
from experiments.peers.client import ROOT, ClientOptions, run_client, write_inputs
from experiments.peers.processes import LOGS, Server, running
from experiments.peers.turns import per_input
from experiments.turns import Figures, Side
from offramp.client.client import Client

RATES_PER_S = (100.0, 450.0, 1000.0)
WORKERS = 64
"""Of the closed loop that saturates."""
SLO_S = 0.25
WARM_S = 2.0
TEXTS = (
    "turn on the light",
    "what is the weather like tomorrow",
    "book a table for two at eight",
    "how much of my salary goes into taxes",
)
SERVE = """
import sys
from argparse import Namespace
from experiments.overhead import costless
with costless(Namespace(port=int(sys.argv[1]), backend=sys.argv[2], front=sys.argv[3])):
    sys.stdin.read()
"""


@contextmanager
def parts(options: Namespace) -> Iterator[Mapping[str, Side]]:
    """The older checkout, behind HAProxy, then ours behind each front."""
    ours = Checkout(name="this checkout", root=ROOT)
    sides = {f"this checkout, {front}": (ours, front) for front in options.fronts}
    if options.beside is not None:
        sides = {options.beside: (Checkout(name=options.beside, root=checked_out(options.beside)), "haproxy"), **sides}
    with TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder) / "inputs.jsonl", TEXTS)
        yield {name: partial(cost_by_part, *side, inputs, options) for name, side in sides.items()}


def cost_by_part(checkout: Checkout, front: str, inputs: Path, options: Namespace) -> Figures:
    """Milliseconds of processor time per answer, by part and in all, at every rate and saturated."""
    figures: Figures = {}
    loads: dict[str, dict[str, float]] = {f"{rate:g}/s": {"rate_per_s": rate} for rate in RATES_PER_S}
    loads["saturated"] = {"concurrency": WORKERS}
    with served(checkout, front, options) as server:
        for name, load in loads.items():
            told = {"url": server.url, "inputs": inputs, "slo_s": SLO_S} | load
            run_client(ClientOptions.model_validate(told | {"duration_s": WARM_S}))
            before = server.cpu_s_by_part()
            result = run_client(ClientOptions.model_validate(told | {"duration_s": options.seconds}))
            assert not result.lost_share, result
            parts_s = per_input(before, server.cpu_s_by_part(), result.num_sent)
            parts_s["beside the stages"] = sum(each_s for part, each_s in parts_s.items() if part != "stages")
            figures |= {f"{name}, ms, {part}": 1000 * each_s for part, each_s in parts_s.items()}
            figures[f"{name}, p50 ms"] = 1000 * (result.p50_s or 0.0)
            figures[f"{name}, answers/s"] = result.answered_per_s
    return figures


@contextmanager
def served(checkout: Checkout, front: str, options: Namespace) -> Iterator[Server]:
    """A checkout's service, once it is ready."""
    url = f"http://127.0.0.1:{options.port}"
    command = [sys.executable, "-c", SERVE, str(options.port), options.backend, front]
    log = LOGS / f"parts-{front}-{checkout.name.replace(' ', '-')}.log"
    with running(command, url, log, checkout.environment(), cwd=checkout.root, stdin=subprocess.PIPE) as server:
        try:
            with Client(url, timeout_s=10.0) as client:
                client.wait_until_ready(timeout_s=120.0)
            yield server
        finally:
            server.process.communicate()  # the end of its input ends it
