"""Offramp's streams beside other servers', over HTTP: the same weights, precision, threads, prompts and lengths.

    OFFRAMP_DATA=... python -m experiments.streams [--quick] [--llama-server PATH] [--dtype bfloat16]

SmolLM2-135M-Instruct, of which `python -m experiments.streams.ramps` makes Offramp's folder with ramps and thresholds.
One server at a time is up, with `--threads` of the machine's cores; the client has the rest. Each answers alone, then
`--at-once` sequences at once without a pause. What it *sustains* is the highest Poisson rate at which `KEPT` of all
sequences keep both bounds, found by the bisection that `experiments.peers` has, from the rate that this gave. The
bounds are `SLACK` times what `stock` takes for a sequence alone in the first round, unless said. Sides that are not
installed are left out, by name: `pip install 'transformers[serving]' 'llama-cpp-python[server]' xllamacpp`.
Minutes: 5 for each side and round; `--quick`: one round of shorter runs, 2.5 each.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

from earlyexit.boundary import FloatName
from earlyexit.errors import OfframpError
from experiments.data import RUNS
from experiments.generation.demo import weights
from experiments.generation.slos import Slos
from experiments.kit import show
from experiments.peers.processes import Server
from experiments.peers.search import Bounds, Search
from experiments.streams.client import Asked, Caller, Streamed
from experiments.streams.news import to_measure
from experiments.streams.sides import SIDES, Setting, Side, serving
from experiments.streams.weights import float_gguf, transformers_folder

KEPT = 0.9
"""Of sequences, who must keep both bounds (as DistServe has it, Zhong et al. 2024)."""
SLACK = 5.0
ROOM = 4
"""Times so many sequences at once, that a server may have under way: at a rate they come in crowds."""
START, GROWTH = 0.9, 1.25
"""Of the rate that so many at once gave, what the search begins with; and its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one side gave in one round."""

    side: str
    round_index: int
    alone: list[Streamed]
    at_once: list[Streamed]
    at_once_s: float
    spent_s: float
    """Processor time of the server meanwhile."""
    memory_bytes: int
    rates: list[tuple[float, list[Streamed]]]
    """Sequences asked for per second, and what became of them."""
    sustained_per_s: float
    ending: str

    @property
    def tokens_per_s(self) -> float:
        """At once."""
        return sum(each.tokens for each in self.at_once) / self.at_once_s


def main() -> None:
    """Measure and print; the records go to runs/streams."""
    options = _options()
    out = RUNS / "streams"
    setting = _setting(options, out)
    asked = prompts(options.data, options.tokens)
    slos = None if options.slos is None else Slos(ttft_s=options.slos[0], tpot_s=options.slos[1])
    runs: list[Run] = []
    for round_index in range(options.rounds):
        for side in _present(options.sides, setting):
            try:
                run, slos = measured(side, setting, asked, round_index, slos, options)
            except OfframpError as error:
                print(f"{side.name}: {error}", file=sys.stderr)
                continue
            runs.append(run)
            told = (
                f"{run.tokens_per_s:.1f} tokens/s at {options.at_once} at once, {run.sustained_per_s:.2f} sequences/s"
            )
            print(f"# {side.name}: {told} within bounds", file=sys.stderr)
            (out / f"{options.dtype}.json").write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")
    tell(runs, slos, options)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.streams", description=__doc__)
    parser.add_argument("--ours", type=Path, default=RUNS / "streams" / "ramps", help="Offramp's model folder")
    parser.add_argument("--data", type=Path, help="texts that prompts are cut from; default: AG News of OFFRAMP_DATA")
    parser.add_argument("--dtype", choices=get_args(FloatName), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer; half to one and a half times as many")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, at each rate")
    parser.add_argument("--resolution", type=float, default=0.05, help="of the search; ratio less 1")
    parser.add_argument("--probes", type=int, default=12, help="rates that are tried of a side, at most")
    slos = parser.add_argument("--slos", type=float, nargs=2, help="seconds to the first token, and per token after it")
    slos.metavar = ("FIRST", "PER_TOKEN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, 5 rates of 8 s each")
    parser.add_argument("--llama-server", type=Path, help="the binary of llama.cpp's own server")
    parser.add_argument("--sides", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.resolution, options.probes = 1, 8.0, 0.08, 5
    return options


def _setting(options: Namespace, out: Path) -> Setting:
    source = weights()
    out.mkdir(parents=True, exist_ok=True)
    return Setting(
        ours=options.ours,
        folder=transformers_folder(source, out / "smollm2"),
        gguf=float_gguf(source, out / f"smollm2-{options.dtype}.gguf", options.dtype),
        dtype=options.dtype,
        threads=options.threads,
        most=ROOM * options.at_once,
        context=512,
        port=options.port,
        logs=out / "logs",
        llama_server=options.llama_server,
    )


def prompts(data: Path | None, tokens: int) -> list[Asked]:
    """Beginnings of real texts, and lengths from half to one and a half times the mean, in turn."""
    long_enough = to_measure(data)
    lengths = [tokens // 2 + (k * 7) % (tokens + 1) for k in range(len(long_enough))]
    return [Asked(prompt=text, tokens=length) for text, length in zip(long_enough, lengths, strict=True)]


def _present(named: Sequence[str], setting: Setting) -> Iterable[Side]:
    for side in SIDES:
        if not side.name.startswith(tuple(named)):
            continue
        missing = side.needs(setting)
        if missing is None:
            yield side
        else:
            print(f"{side.name} is left out: {missing}", file=sys.stderr)


def measured(
    side: Side, setting: Setting, asked: Sequence[Asked], round_index: int, slos: Slos | None, options: Namespace
) -> tuple[Run, Slos]:
    """One server, from its start to its end, and the bounds, which are its own where there are none yet."""
    with serving(side, setting) as server:
        caller = Caller(url=server.url, model=side.model(setting), more=partial(side.more, setting))
        return asyncio.run(_measured(side, caller, server, asked, round_index, slos, options))


async def _measured(
    side: Side,
    caller: Caller,
    server: Server,
    asked: Sequence[Asked],
    round_index: int,
    slos: Slos | None,
    options: Namespace,
) -> tuple[Run, Slos]:
    at_once = options.at_once
    await caller.at_once(asked[:at_once], at_once)  # warm
    alone, _ = await caller.at_once(asked[:4], 1)
    slos = slos or Slos.of(alone, SLACK)
    before_s = server.cpu_s()
    together, took_s = await caller.at_once(asked[: 3 * at_once], at_once)
    spent_s = server.cpu_s() - before_s
    full_per_s = len(together) / took_s
    bounds = Bounds(
        low_per_s=full_per_s / 10, high_per_s=full_per_s * 4, resolution=options.resolution, most_probes=options.probes
    )
    begun = Search(start_per_s=START * full_per_s, bounds=bounds, growth=GROWTH)
    search, rates = await searched(begun, slos, lambda rate, seed: caller.at_rate(asked, rate, options.seconds, seed))
    run = Run(
        side=side.name,
        round_index=round_index,
        alone=alone,
        at_once=together,
        at_once_s=took_s,
        spent_s=spent_s,
        memory_bytes=server.memory_bytes(),
        rates=rates,
        sustained_per_s=search.best_per_s,
        ending=str(search.ending),
    )
    return run, slos


async def searched(
    search: Search, slos: Slos, at_rate: Callable[[float, int], Awaitable[list[Streamed]]]
) -> tuple[Search, list[tuple[float, list[Streamed]]]]:
    """To its end; a rate's seed is its place, so that all sides see the same arrivals, each at its own rates."""
    rates: list[tuple[float, list[Streamed]]] = []
    while (rate_per_s := search.next_rate()) is not None:
        rates.append((rate_per_s, await at_rate(rate_per_s, len(rates))))
        search = search.learn(rate_per_s, "passed" if slos.kept(rates[-1][1]) >= KEPT else "failed")
    return search, rates


def tell(runs: Sequence[Run], slos: Slos | None, options: Namespace) -> None:
    """A table; ratios are within each round."""
    if not runs or slos is None:
        raise SystemExit("no side answered")
    by_side: dict[str, list[Run]] = {}
    for run in runs:
        by_side.setdefault(run.side, []).append(run)
    stock = {run.round_index: run for run in runs if run.side == "offramp stock"}
    show(
        f"{options.at_once} at once, {options.tokens} tokens an answer, {options.dtype}, {options.threads} thread(s), "
        f"{options.rounds} round(s); bounds: {slos.ttft_s:.2f} s to the first token, "
        f"{1000 * slos.tpot_s:.0f} ms per token",
        (
            *("side", "tokens/s", "x stock", "ms CPU/token", "first token, p50 s", "per token, p50 ms"),
            *("alone: first s", "per token ms", "sustained, seq/s", "x stock", "search", "left early", "MiB", "failed"),
        ),
        [_row(name, each, stock) for name, each in by_side.items()],
    )


def _row(name: str, runs: Sequence[Run], stock: Mapping[int, Run]) -> tuple[object, ...]:
    def of(streams: str, figure: str) -> float:
        return float(median(median(getattr(each, figure) for each in getattr(run, streams)) for run in runs))

    def beside(figure: str) -> float | None:
        pairs = [
            (getattr(run, figure), getattr(stock[run.round_index], figure)) for run in runs if run.round_index in stock
        ]
        return median(ours / theirs for ours, theirs in pairs if theirs) if pairs else None

    return (
        name,
        median(run.tokens_per_s for run in runs),
        beside("tokens_per_s"),
        median(1000 * run.spent_s / sum(each.tokens for each in run.at_once) for run in runs),
        of("at_once", "ttft_s"),
        1000 * of("at_once", "tpot_s"),
        of("alone", "ttft_s"),
        1000 * of("alone", "tpot_s"),
        median(run.sustained_per_s for run in runs),
        beside("sustained_per_s"),
        ", ".join(dict.fromkeys(run.ending for run in runs)),
        _early_share(runs),
        median(run.memory_bytes for run in runs) / 2**20,
        sum(each.error is not None for run in runs for _, streamed in run.rates for each in streamed),
    )


def _early_share(runs: Sequence[Run]) -> str:
    exits = Counter[int]()
    for run in runs:
        for each in run.at_once:
            exits.update({int(block): number for block, number in each.exits.items()})
    return f"{1 - exits[max(exits)] / exits.total():.0%}" if exits else ""


if __name__ == "__main__":
    main()
