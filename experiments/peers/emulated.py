"""The same servers with 16 emulated V100 each: what they make of accelerators that are not the CPU they run on.

    python -m experiments.peers.emulated [--rounds 3] [--sides offramp early-exit stock mosec ray-serve]

Every worker of a peer, and every replica of ours, has an emulated V100: a batch takes the time of the published profile
of BERT-base, stretched. In its turn a server is alone; a closed loop has as many requests under way as its plan answers
in 0.6 of the SLO. Told are the answers within the SLO, beside what the accelerators could do with nothing around them
(the cost model), and processor time per answer. Writes runs/peers-emulated.json. Needs `make peers`. Minutes: about 2
for each side of a round.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.data import RUNS
from experiments.kit import keep, show, spread
from experiments.live.emulation import Bench, bench
from experiments.live.model import FOLDER, TEXT
from experiments.live.service import emulated_settings, hand_control
from experiments.peers.client import ClientOptions, write_inputs
from experiments.peers.compare import OURS, SERVICE
from experiments.peers.options import ServerOptions
from experiments.peers.plans import STRATEGIES
from experiments.peers.processes import PEERS, serving
from experiments.peers.sides import ServedSide, planned_sides
from experiments.peers.turns import per_answer
from offramp.commands.progress import provenance
from optimizer.plan import Plan

COUNTS = {"V100": 16}
IN_FLIGHT_SLOS = 0.6
"""Requests under way: as many as are answered in this part of the SLO."""
WARM_UP_SLOS = 1.5
WAIT_S = 0.005
"""Emulated: how long a peer's batch waits to be filled."""
COLUMNS = (
    *("side", "answers in time/s", "x stock", "x best peer", "of the accelerators"),
    *("p50 ms", "p99 ms", "CPU ms per answer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The plans, and what everybody is sent; seconds are the wall clock's."""

    on: Bench
    plans: Mapping[str, Plan]
    device_per_s: Mapping[str, float]
    """By plan, the answers that the accelerators alone could give."""
    load: ClientOptions

    def rate_per_s(self, side: str) -> float:
        """What a side's accelerators alone could answer; a peer's run the full model."""
        return self.device_per_s[side if side in OURS else "stock"]


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.peers.emulated", description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER, help="made where it is missing")
    parser.add_argument("--time-scale", type=float, default=40.0, help="wall-clock seconds of an emulated one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--sides", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every server that was started is ended
    document = run(options)
    print(f"written to {keep(document, RUNS / 'peers-emulated.json')}")


def run(options: Namespace) -> dict[str, Any]:
    """Every side in every round; gives what is written."""
    on = bench(options, COUNTS)
    plans = {
        name: on.plan(on.best("best" if name == SERVICE else strategy).stages) for name, strategy in STRATEGIES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        offered = Offered(
            on=on,
            plans=plans,
            device_per_s={name: on.predicted(plan).rate_per_s for name, plan in plans.items()},
            load=_load(on, Path(folder), options.seconds),
        )
        rounds = [_round(offered, options, index) for index in range(options.rounds)]
    scale = on.emulation.time_scale
    title = (
        f"{COUNTS['V100']} EMULATED V100, {scale:g} times slower; SLO {1e3 * on.emulation.slo_s:g} ms; seconds but "
        f"those of processors are emulated; medians of {options.rounds} rounds"
    )
    show(title, COLUMNS, table(rounds, offered.device_per_s, scale))
    return {
        "provenance": provenance(),
        "time_scale": scale,
        "slo_s": on.emulation.wall_slo_s,
        "device_per_s": offered.device_per_s,
        "rounds": rounds,
    }


def _load(on: Bench, folder: Path, seconds: float) -> ClientOptions:
    keys, slo_s = on.records.sample_ids, on.emulation.wall_slo_s
    return ClientOptions(
        url="",
        inputs=write_inputs(folder / "inputs.jsonl", [TEXT] * len(keys), keys),
        concurrency=1,
        duration_s=seconds,
        warmup_s=WARM_UP_SLOS * slo_s,
        slo_s=slo_s,
        timeout_s=4 * slo_s,
    )


def _round(offered: Offered, options: Namespace, index: int) -> dict[str, dict[str, Any]]:
    asked = [*([SERVICE] if set(OURS) & set(options.sides) else []), *(side for side in options.sides if side in PEERS)]
    found = {}
    for name in [*asked[index % len(asked) :], *asked[: index % len(asked)]]:
        with _started(offered, name, options) as sides:
            for side in sides:
                found[side.name] = _measured(offered, side)
    return found


@contextmanager
def _started(offered: Offered, name: str, options: Namespace) -> Iterator[Sequence[ServedSide]]:
    on = offered.on
    if name != SERVICE:
        with serving(name, peer_options(on, options.port + 1000)) as server:
            yield [ServedSide(name=name, server=server, load=offered.load)]
        return
    control = hand_control(on.emulation.problem(on.problem.survival_N), on.spec, state="peers-emulated")
    settings = emulated_settings(on.emulation, on.model, offered.plans["stock"], control=control, probe_share=0.0)
    with planned_sides(settings, offered.plans, offered.load, port=options.port) as sides:
        yield [side for side in sides if side.name in options.sides]


def peer_options(on: Bench, port: int) -> ServerOptions:
    """A worker for every accelerator."""
    (table,) = on.problem.latency.values()
    sizes = np.arange(1, on.emulation.batch_limit + 1, dtype=np.float64)
    return ServerOptions(
        model=on.model.resolve(),
        workers=sum(on.emulation.counts.values()),
        batch=on.emulation.batch_limit,
        batch_s=tuple(table.blocks_at(sizes).sum(0).tolist()),
        wait_s=WAIT_S * on.emulation.time_scale,
        slo_s=on.emulation.wall_slo_s,
        port=port,
    )


def _measured(offered: Offered, side: ServedSide) -> dict[str, Any]:
    side.begin()
    workers = max(1, round(IN_FLIGHT_SLOS * offered.load.slo_s * offered.rate_per_s(side.name)))
    before = side.server.cpu_s_by_part()
    result = side.saturate(workers, offered.load.duration_s)
    parts = per_answer(before, side.server.cpu_s_by_part(), result)
    print(
        f"{side.name:<12} {workers} under way: {result.goodput_per_s:.1f} in time/s, errors {result.errors}", flush=True
    )
    return result.model_dump(mode="json") | {"cpu_s": parts, "under_way": workers}


def table(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], device_per_s: Mapping[str, float], scale: float
) -> list[tuple[object, ...]]:
    """Medians of the rounds; ratios within rounds."""
    names = [side for side in (*OURS, *PEERS) if side in rounds[0]]

    def told(side: str, figure: str) -> list[float]:
        return [each[side][figure] for each in rounds if each[side][figure] is not None]

    def ratio(side: str, to: str | None) -> str:
        if to is None or to not in names:
            return ""
        found = spread(each[side]["goodput_per_s"] / (each[to]["goodput_per_s"] or np.nan) for each in rounds)
        return "" if found is None else found.told()

    best = max(
        (name for name in names if name in PEERS), key=lambda name: median(told(name, "goodput_per_s")), default=None
    )
    return [
        (
            side,
            scale * median(told(side, "goodput_per_s")),
            ratio(side, "stock"),
            ratio(side, best),
            f"{median(told(side, 'goodput_per_s')) / device_per_s[side if side in OURS else 'stock']:.2f}",
            *(1e3 * median(told(side, name)) / scale if told(side, name) else None for name in ("p50_s", "p99_s")),
            1e3 * median(sum(each[side]["cpu_s"].values()) for each in rounds),
        )
        for side in names
    ]


if __name__ == "__main__":
    main()
