"""What a running service costs beside its requests: processor time and memory, by process; plain Ray Serve beside it.

    python -m experiments.costs.footprint                # 6 minutes
    python -m experiments.costs.footprint --rate 0       # idle alone, 3 minutes

Both serve the same network from one replica of one thread, `offramp serve` as it is shipped, with the full model in
one split, and `@serve.batch` behind HAProxy (`experiments/peers`): the first of MiniLM-L6's blocks and its words, with
random weights, so that the model costs little. Processor time while nobody asks and at a rate, in percent of a core;
memory as proportional set size (PSS), before the first request and after the load.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePath
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from earlyexit.network.checkpoint import copy_tokenizer, random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from experiments.kit import show
from experiments.models import LABELS, VOCABULARY
from experiments.peers.client import ClientOptions, run_client, write_inputs
from experiments.peers.options import ServerOptions
from experiments.peers.processes import LOGS, Server, running, serving, wait_until_ready
from offramp.commands.train import resolve_backbone

IMPORTS = ("offramp", "offramp.client.client", "offramp.cli.app", "optimizer.plan_file", "deployments.settings")
TEXTS = ("how much money do i have", "what is the meaning of life and who said so first")
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 384, "num_blocks": 1, "num_heads": 12, "intermediate_size": 1536}
SETTLE_S = 20.0
"""What starts, or had load, is at rest after so long: Ray's and Serve's slowest reports are 10 s apart."""
WARMUP_S = 5.0
SLO_S = 0.5
ALL = "all of them"
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a service's processes, by what they are."""

    busy_s: Mapping[str, float]
    """Processor time since they started."""
    pss_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one service; percent of a core and MiB, by what its processes are."""

    idle: Mapping[str, float]
    loaded: Mapping[str, float]
    at_start: Mapping[str, float]
    after_load: Mapping[str, float]


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(
        prog="python -m experiments.costs.footprint", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of being idle, and of the load")
    parser.add_argument("--rate", type=float, default=450.0, help="requests/s of the load; 0: none")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--serve", default="", help="further options of `offramp serve`, in one word")
    parser.add_argument("--imports", action="store_true", help="what importing costs, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = _model(Path(folder) / "model")
        inputs = write_inputs(Path(folder) / "inputs.jsonl", TEXTS)
        found = {side: _measure(SIDES[side](model, options), options, inputs) for side in options.sides}
    if options.json:
        print(json.dumps({side: asdict(footprint) for side, footprint in found.items()}))
        return
    for side, footprint in found.items():
        _tell(side, footprint, options)
    if options.imports:
        show("importing, seconds", ("module", "median of 5"), ((module, _import_s(module)) for module in IMPORTS))


@contextmanager
def offramp(model: Path, options: Namespace) -> Iterator[Server]:
    """`offramp serve`, the full model in one split."""
    command = [sys.executable, "-m", "offramp", "serve", str(model), "--plan", "stock", "--port", str(options.port)]
    url = f"http://127.0.0.1:{options.port}"
    with running([*command, *options.serve.split()], url, LOGS / "footprint.log", {}) as server:
        wait_until_ready(server, "offramp")
        yield server


def ray_serve(model: Path, options: Namespace) -> AbstractContextManager[Server]:
    """The peer of that name."""
    return serving("ray-serve", ServerOptions(model=model, port=options.port))


SIDES: Mapping[str, Callable[[Path, Namespace], AbstractContextManager[Server]]] = {
    "offramp": offramp,
    "ray-serve": ray_serve,
}


def _model(folder: Path) -> Path:
    save_model(random_model(SIZES, name="footprint", task=LabelTask(LABELS)), folder)
    copy_tokenizer(resolve_backbone("minilm"), folder)
    return folder


def _measure(serving: AbstractContextManager[Server], options: Namespace, inputs: Path) -> Footprint:
    with serving as server:
        time.sleep(SETTLE_S)
        idle = _share(server, partial(time.sleep, options.seconds))
        before = _usage(server)
        loaded: Mapping[str, float] = {}
        if options.rate:
            load = ClientOptions(
                url=server.url, inputs=inputs, rate_per_s=options.rate, duration_s=options.seconds, slo_s=SLO_S
            )
            run_client(load.model_copy(update={"duration_s": WARMUP_S}))
            loaded = _share(server, partial(_send, load))
            time.sleep(SETTLE_S)
        after = _usage(server)
    mib = [{name: pss / MIB for name, pss in usage.pss_bytes.items()} for usage in (before, after)]
    return Footprint(idle=idle, loaded=loaded, at_start=mib[0], after_load=mib[1])


def _send(load: ClientOptions) -> None:
    result = run_client(load)
    if result.lost_share:
        print(f"{result.lost_share:.0%} of the requests were lost: this is no load that the machine carries")


def _share(server: Server, meanwhile: Callable[[], object]) -> dict[str, float]:
    """Percent of a core that each kind of process takes meanwhile."""
    before, began_s = _usage(server).busy_s, time.monotonic()
    meanwhile()
    took_s, after = time.monotonic() - began_s, _usage(server).busy_s
    return {name: 100 * (busy_s - before.get(name, 0.0)) / took_s for name, busy_s in after.items()}


def _usage(server: Server) -> Usage:
    busy_s: Counter[str] = Counter()
    pss_bytes: Counter[str] = Counter()
    for process in server.processes():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
            name, times = kind_of(process.cmdline()), process.cpu_times()
            busy_s[name] += times.user + times.system  # type: ignore[assignment] # a Counter of seconds
            pss_bytes[name] += process.memory_full_info().pss
    return Usage(busy_s=busy_s, pss_bytes=pss_bytes)


def kind_of(command: list[str]) -> str:
    """What a process is, by its command line."""
    words = [PurePath(word).name for word in command if not word.startswith("-")]
    title = command[0].split()[0] if command else "-"
    if title.startswith("ray::"):
        return title.removeprefix("ray::").removeprefix("ServeReplica:").partition(".")[0]  # the rest: what it does now
    if "offramp" in words or "experiments.peers.serve_batch" in words:
        return "driver"
    script = next((word for word in words if word.endswith(".py")), "")
    return script or (words[0] if words else "-")


def _tell(side: str, footprint: Footprint, options: Namespace) -> None:
    columns = (footprint.idle, footprint.loaded, footprint.at_start, footprint.after_load)
    names = sorted(footprint.at_start, key=lambda name: -footprint.idle.get(name, 0.0))
    rows = [(name, *(column.get(name) for column in columns)) for name in names]
    rows.append((ALL, *(sum(column.values()) for column in columns)))
    heads = ("process", "% of a core, idle", f"at {options.rate:g}/s", "MiB at start", "MiB after load")
    show(side, heads, rows)


def _import_s(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return median(float(run.stdout) for run in runs)


if __name__ == "__main__":
    main()
