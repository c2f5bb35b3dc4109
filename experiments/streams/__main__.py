"""Offramp's streams beside other servers', over HTTP: the same weights, precision, threads, prompts and lengths.

    OFFRAMP_DATA=... python -m experiments.streams [--quick] [--llama-server PATH] [--dtype bfloat16]

SmolLM2-135M-Instruct, of which `make demo-generation` has made Offramp's folder with ramps. One server at a time is up,
with `--threads` of the machine's cores; the client has the rest. Each answers alone, then `--at-once` sequences at once
without a pause, then Poisson arrivals at shares of the rate that this gave. *Goodput* is the highest of those rates at
which `KEPT` of all sequences kept both bounds, times that share; the bounds are `SLACK` times what the slowest of all
sides took for a sequence alone, so that every side keeps them at a low load. Sides that are not installed are left out,
by name: `pip install 'transformers[serving]' 'llama-cpp-python[server]' xllamacpp`.
Minutes: 2 for each side and round; `--quick`: one round of shorter runs, 1.2 each.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from earlyexit.boundary import FloatName
from earlyexit.errors import OfframpError
from earlyexit.store import read_card
from experiments.data import RUNS, require_data
from experiments.generation_demo import weights
from experiments.kit import show
from experiments.peers.processes import Server
from experiments.streams.client import Asked, Caller, Course
from experiments.streams.sides import SIDES, Setting, Side, serving
from experiments.streams.weights import float_gguf, transformers_folder
from optimizer.calibration_file import RECORDS_FILE
from optimizer.plan import PolicySpec, early_exit_plan
from optimizer.plan_file import plan_document
from profiles.records import ExitRecords

KEPT = 0.9
"""Of sequences, who must keep both bounds (as DistServe has it, Zhong et al. 2024)."""
SLACK = 4.0
SHARES = (0.5, 0.75, 0.95)
PROMPT_WORDS = 40
LEAVE = 0.5
"""Of tokens, by thresholds that promise nothing: the side `half leave`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one side gave in one round."""

    side: str
    round_index: int
    alone: list[Course]
    at_once: list[Course]
    at_once_s: float
    spent_s: float
    """Processor time of the server meanwhile."""
    memory_bytes: int
    rates: list[tuple[float, list[Course]]]
    """Sequences asked for per second, and what became of them."""

    @property
    def tokens_per_s(self) -> float:
        """At once."""
        return sum(each.tokens for each in self.at_once) / self.at_once_s

    def goodput_per_s(self, ttft_s: float, tpot_s: float) -> float:
        """Sequences per second that keep both bounds, at the highest rate at which enough of them do."""
        kept = [
            (rate, sum(each.ttft_s <= ttft_s and each.tpot_s <= tpot_s for each in courses) / len(courses))
            for rate, courses in self.rates
            if courses
        ]
        return max((rate * share for rate, share in kept if share >= KEPT), default=0.0)


def main() -> None:
    """Measure and print; the records go to runs/streams."""
    options = _options()
    out = RUNS / "streams"
    setting = _setting(options, out)
    asked = prompts(options.data, options.tokens)
    runs: list[Run] = []
    for round_index in range(options.rounds):
        for side in _present(options.sides, setting):
            try:
                runs.append(measured(side, setting, asked, round_index, options))
            except OfframpError as error:
                print(f"{side.name}: {error}", file=sys.stderr)
                continue
            last = runs[-1]
            print(f"# {side.name}: {last.tokens_per_s:.1f} tokens/s at {options.at_once} at once", file=sys.stderr)
            (out / f"{options.dtype}.json").write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")
    tell(runs, options)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.streams", description=__doc__)
    parser.add_argument("--ours", type=Path, default=RUNS / "demo-generation" / "model", help="Offramp's model folder")
    parser.add_argument("--data", type=Path, help="texts that prompts are cut from; default: AG News of OFFRAMP_DATA")
    parser.add_argument("--dtype", choices=get_args(FloatName), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer; half to one and a half times as many")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, at each rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, 10 s at each rate")
    parser.add_argument("--llama-server", type=Path, help="the binary of llama.cpp's own server")
    parser.add_argument("--sides", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 10.0
    return options


def _setting(options: Namespace, out: Path) -> Setting:
    source = weights()
    plan = out / "half-leave.json"
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps(half_leave(options.ours, options.at_once)), encoding="utf-8")
    return Setting(
        ours=options.ours,
        folder=transformers_folder(source, out / "smollm2"),
        gguf=float_gguf(source, out / f"smollm2-{options.dtype}.gguf", options.dtype),
        dtype=options.dtype,
        threads=options.threads,
        at_once=options.at_once,
        context=512,
        port=options.port,
        logs=out / "logs",
        llama_server=options.llama_server,
        plans={"half leave": plan},
    )


def half_leave(folder: Path, batch: int) -> dict[str, Any]:
    """A plan of one ramp, half way, at which half of the calibration's tokens would leave, right or not."""
    card, records = read_card(folder), ExitRecords.load(folder / RECORDS_FILE)
    middle = min(card.ramps, key=lambda ramp: abs(ramp + 1 - card.num_blocks / 2))
    scores_N = records.scores_NR[:, records.ramps.index(middle)]
    policy = PolicySpec(name="foreseen", thresholds={middle: float(np.quantile(scores_N, 1 - LEAVE))})
    return plan_document(early_exit_plan(card.num_blocks, (middle,), policy, batch=batch))


def prompts(data: Path | None, tokens: int) -> list[Asked]:
    """Beginnings of real texts, and lengths from half to one and a half times the mean, in turn."""
    path = data or require_data("ag_news") / "test.csv"
    with path.open(encoding="utf-8", newline="") as file:
        texts = [row[-1].split() for row in islice(csv.reader(file), 1, 400)]
    long_enough = [" ".join(words[:PROMPT_WORDS]) for words in texts if len(words) >= PROMPT_WORDS]
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


def measured(side: Side, setting: Setting, asked: Sequence[Asked], round_index: int, options: Namespace) -> Run:
    """One server, from its start to its end."""
    with serving(side, setting) as server:
        caller = Caller(url=server.url, model=side.model(setting), more=partial(side.more, setting))
        return asyncio.run(_measured(side, caller, server, asked, round_index, options))


async def _measured(
    side: Side, caller: Caller, server: Server, asked: Sequence[Asked], round_index: int, options: Namespace
) -> Run:
    at_once = options.at_once
    await caller.at_once(asked[:at_once], at_once)  # warm
    alone, _ = await caller.at_once(asked[:4], 1)
    before_s = server.cpu_s()
    together, took_s = await caller.at_once(asked[: 3 * at_once], at_once)
    spent_s = server.cpu_s() - before_s
    full_per_s = len(together) / took_s
    rates = []
    for index, share in enumerate(SHARES):
        rate_per_s = share * full_per_s
        rates.append((rate_per_s, await caller.at_rate(asked, rate_per_s, options.seconds, 100 * round_index + index)))
    return Run(
        side=side.name,
        round_index=round_index,
        alone=alone,
        at_once=together,
        at_once_s=took_s,
        spent_s=spent_s,
        memory_bytes=server.memory_bytes(),
        rates=rates,
    )


def tell(runs: Sequence[Run], options: Namespace) -> None:
    """A table; ratios are within each round."""
    if not runs:
        raise SystemExit("no side answered")
    bounds = {
        figure: SLACK * max(median(getattr(each, figure) for each in run.alone) for run in runs)
        for figure in ("ttft_s", "tpot_s")
    }
    by_side: dict[str, list[Run]] = {}
    for run in runs:
        by_side.setdefault(run.side, []).append(run)
    good = {name: median(run.goodput_per_s(**bounds) for run in each) for name, each in by_side.items()}
    stock = {run.round_index: run.tokens_per_s for run in runs if run.side == "offramp stock"}
    show(
        f"{options.at_once} at once, {options.tokens} tokens an answer, {options.dtype}, {options.threads} thread(s), "
        f"{options.rounds} round(s); bounds: {bounds['ttft_s']:.2f} s to the first token, "
        f"{1000 * bounds['tpot_s']:.0f} ms per token",
        (
            *("side", "tokens/s", "x stock", "ms CPU/token", "first token, p50 s", "per token, p50 ms"),
            *("alone: first s", "per token ms", "goodput, seq/s", "left early", "MiB", "failed"),
        ),
        [_row(name, each, good[name], stock) for name, each in by_side.items()],
    )


def _row(name: str, runs: Sequence[Run], good: float, stock: Mapping[int, float]) -> tuple[object, ...]:
    def of(courses: str, figure: str) -> float:
        return float(median(median(getattr(each, figure) for each in getattr(run, courses)) for run in runs))

    ratios = [run.tokens_per_s / stock[run.round_index] for run in runs if run.round_index in stock]
    return (
        name,
        median(run.tokens_per_s for run in runs),
        median(ratios) if ratios else None,
        median(1000 * run.spent_s / sum(each.tokens for each in run.at_once) for run in runs),
        of("at_once", "ttft_s"),
        1000 * of("at_once", "tpot_s"),
        of("alone", "ttft_s"),
        1000 * of("alone", "tpot_s"),
        good,
        _early_share(runs),
        median(run.memory_bytes for run in runs) / 2**20,
        sum(each.error is not None for run in runs for _, courses in run.rates for each in courses),
    )


def _early_share(runs: Sequence[Run]) -> str:
    exits = Counter[int]()
    for run in runs:
        for course in run.at_once:
            exits.update({int(block): number for block, number in course.exits.items()})
    return f"{1 - exits[max(exits)] / exits.total():.0%}" if exits else ""


if __name__ == "__main__":
    main()
