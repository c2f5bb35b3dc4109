"""News and film reviews served live: batches bounded by tokens, against batches bounded by rows, at equal load.

    OFFRAMP_DATA=... python -m experiments.live.token_batches [--on cpu|emulated] [--batch 8] [--rounds 2]

AG News and IMDB mixed 4:1 (workload `long` of `experiments/peers/workloads.py`), cut at 512 tokens. A budget of tokens
is the least of which no more batches come than of rows, so both sides' batches hold as much on average (the batch of
rows times the mean length holds some 5 % less: the input that does not fit waits). A closed loop finds what rows can
do; then both sides get the same open loops, at shares of that. Sides take turns, another one first each round.

- `cpu`: MiniLM with ramps trained on these texts, really computed, cut after its third block.
- `emulated`: a V100 whose time is BERT-base's published one at 128 tokens, stretched, and tokens / 128 inputs long; its
  exits are those recorded of SST-2, which have nothing to do with the texts. EMULATED: the Serve graph is real.

Writes runs/live/token_batches-*.json. Minutes: 2 for each side and round.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.split import Split
from earlyexit.tokenizer import TextTokenizer
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.emulation import Emulation, emulated, policy
from experiments.live.meter import Meter, Usage
from experiments.live.model import NUM_BLOCKS, ensure_model
from experiments.live.service import emulated_settings
from experiments.peers.workloads import LONGEST, WORKLOADS
from experiments.tokens.budgets import budget_of
from offramp.client.client import Client
from offramp.load.run import LoadConfig, LoadReport, run_load
from optimizer.plan import Plan, PolicySpec, Stage

FOLDER = RUNS / "emulated" / "long-texts"
PROFILE_LENGTH = 128
TIME_SCALE = 20.0
SHARES = (0.5, 0.8, 1.0)
"""Of what rows can do: the open loops."""
WIDE = 8
"""So many times the batch of rows may be in a batch of tokens, where inputs are short."""
CLIENTS = 8
"""Of the closed loop, per input of a batch."""
READY_S = 180.0
ROWS, TOKENS = "rows", "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is served, and the texts that are sent."""

    settings: ServeSettings
    """With the plan of rows."""
    slo_s: float
    texts: tuple[str, ...]
    keys: tuple[str, ...] | None
    lengths: tuple[int, ...]
    """Tokens of the texts, as the service cuts them."""

    @property
    def mean_tokens(self) -> float:
        """Per text."""
        return float(np.mean(self.lengths))

    def of(self, side: str) -> ServeSettings:
        """The same plan, its batches bounded as a side has them."""
        if side == ROWS:
            return self.settings
        plan = self.settings.plan
        stages = tuple(replace(stage, splits=tuple(map(self._by_tokens, stage.splits))) for stage in plan.stages)
        return self.settings.model_copy(update={"plan": replace(plan, stages=stages)})

    def _by_tokens(self, split: Split) -> Split:
        return replace(split, batch=WIDE * split.batch, tokens=budget_of(self.lengths, split.batch))


def cpu_case(options: Namespace) -> Case:
    """MiniLM, really computed, in two splits of which the first holds three blocks."""
    long = WORKLOADS["long"]()
    ramps = tuple(sorted(long.thresholds))
    plan = Plan(stages=(stage("cpu", (0, 3, 6), ramps, options.batch),), policy=long.policy)
    settings = ServeSettings(model=str(long.folder.resolve()), plan=plan, slo_s=options.slo)
    texts, lengths = shuffled(long.texts, TextTokenizer.load(long.folder, LONGEST), options.seed)
    return Case(settings=settings, slo_s=options.slo, texts=texts, keys=None, lengths=lengths)


def emulated_case(options: Namespace) -> Case:
    """BERT-base on one V100 that is not there."""
    records = ensure_model(FOLDER, max_length=LONGEST)
    spec: PolicySpec = policy(records, FOLDER)
    device = emulated("V100")
    plan = Plan(stages=(stage(device, (0, 6, NUM_BLOCKS), records.ramps, options.batch),), policy=spec)
    emulation = Emulation(counts={"V100": 1}, time_scale=TIME_SCALE, slower=1.0, batch_limit=128, slo_s=options.slo)
    emulation = replace(emulation, slo_s=options.slo / TIME_SCALE)
    settings = emulated_settings(emulation, FOLDER, plan)
    accelerator = settings.emulated[device].model_copy(update={"length": PROFILE_LENGTH})
    texts, lengths = shuffled(WORKLOADS["long"]().texts, TextTokenizer.load(FOLDER, LONGEST), options.seed)
    ids = records.sample_ids
    return Case(
        settings=settings.model_copy(update={"emulated": {device: accelerator}}),
        slo_s=options.slo,
        texts=texts,
        keys=tuple(ids[at % len(ids)] for at in range(len(texts))),
        lengths=lengths,
    )


def stage(device: str, bounds: Sequence[int], ramps: Sequence[int], batch: int) -> Stage:
    """One replica, its blocks cut at the bounds, every ramp on."""
    splits = tuple(
        Split(first=first, end=end, batch=batch, ramps=tuple(ramp for ramp in ramps if first <= ramp < end))
        for first, end in pairwise(bounds)
    )
    return Stage(device=device, replicas=1, splits=splits)


def shuffled(texts: Sequence[str], tokenizer: TextTokenizer, seed: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts in an order drawn once, and their lengths."""
    order = np.random.default_rng(seed).permutation(len(texts))
    lengths = [each.length for each in tokenizer.encode(texts, truncate=True)]
    return tuple(texts[at] for at in order), tuple(lengths[at] for at in order)


CASES = {"cpu": cpu_case, "emulated": emulated_case}


@dataclass(slots=True)
class Bench:
    """Both sides under the same loads."""

    case: Case
    options: Namespace
    rates_per_s: tuple[float, ...] = ()

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """Round by round; rows first, whose capacity is the measure of the loads."""
        found: dict[str, list[dict[str, Any]]] = {ROWS: [], TOKENS: []}
        for turn in range(self.options.rounds):
            for side in (ROWS, TOKENS) if turn % 2 == 0 else (TOKENS, ROWS):
                found[side].append(self.serve(side))
        return found

    def serve(self, side: str) -> dict[str, Any]:
        """One service, from its start to its end: what it can do, and what it does at every load."""
        with serving(self.case.of(side), LocalCluster(port=self.options.port, front=self.options.front)) as url:
            with Client(url, timeout_s=READY_S) as client:
                client.wait_until_ready(timeout_s=READY_S)
            meter = Meter()
            closed = asyncio.run(run_load(self._closed(url)))
            if not self.rates_per_s:
                self.rates_per_s = tuple(share * closed.achieved_rps for share in SHARES)
            opened = [asyncio.run(run_load(self._open(url, rate))) for rate in self.rates_per_s]
            usage = meter.read()  # of processes that have ended nothing is known
        return _told(side, closed, opened, usage)

    def _closed(self, url: str) -> LoadConfig:
        clients = CLIENTS * self.options.batch
        asked = self._config(url, max(clients, self.options.requests))
        return replace(asked, rate_rps=None, concurrency=clients, warmup_requests=clients)

    def _open(self, url: str, rate_per_s: float) -> LoadConfig:
        return replace(self._config(url, max(1, round(rate_per_s * self.options.seconds))), rate_rps=rate_per_s)

    def _config(self, url: str, num_requests: int) -> LoadConfig:
        return LoadConfig(
            url=url,
            inputs=self.case.texts,
            keys=self.case.keys,
            num_requests=num_requests,
            rate_rps=1.0,
            truncate=True,
            timeout_s=4 * self.case.slo_s,
            slo_s=self.case.slo_s,
            seed=self.options.seed,
        )


def _told(side: str, closed: LoadReport, opened: Sequence[LoadReport], usage: Usage) -> dict[str, Any]:
    print(f"{side}: closed loop {closed.achieved_rps:.3g}/s; {usage.told()}", flush=True)
    return {
        "closed": closed.to_json(),
        "open": [each.to_json() for each in opened],
        "machine": usage.machine,
        "ours": usage.ours,
    }


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], rates_per_s: Sequence[float]) -> list[tuple[object, ...]]:
    """Medians of the rounds: load, side, goodput, p50, p99, errors."""
    rows: list[tuple[object, ...]] = []
    for at, rate in enumerate(rates_per_s):
        for side, rounds in found.items():
            reports = [each["open"][at] for each in rounds]
            quantiles = [
                median([each["latency"][name] for each in reports if each["latency"]] or [float("nan")])
                for name in ("p50_s", "p99_s")
            ]
            failed = sum(sum(each["errors"].values()) for each in reports)
            rows.append((f"{rate:.3g}/s", side, median(each["goodput_rps"] for each in reports), *quantiles, failed))
    return rows


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.live.token_batches", description=__doc__)
    parser.add_argument("--on", choices=tuple(CASES), default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="of every open loop")
    parser.add_argument("--requests", type=int, default=300, help="of the closed loop")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    options = parser.parse_args()
    case = CASES[options.on](options)
    bench = Bench(case, options)
    found = bench.run()
    closed = {side: median(each["closed"]["achieved_rps"] for each in rounds) for side, rounds in found.items()}
    show(
        f"{options.on}: {case.mean_tokens:.0f} tokens on average, batches of {options.batch} or as many tokens; SLO "
        f"{case.slo_s:g} s; closed loop: rows {closed[ROWS]:.3g}/s, tokens {closed[TOKENS]:.3g}/s",
        ("load", "side", "goodput/s", "p50 s", "p99 s", "errors"),
        table(found, bench.rates_per_s),
    )
    document = {"options": vars(options), "mean_tokens": case.mean_tokens, "rates_per_s": bench.rates_per_s, **found}
    print(f"written: {keep(document, RUNS / 'live' / f'token_batches-{options.on}.json')}")


if __name__ == "__main__":
    main()
