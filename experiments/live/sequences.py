"""The simulator against the live service, of a decoder: the same prompts at the same times on both.

    python -m experiments.live.sequences --model FOLDER [--rate 0.7 --sequences 110]

Profiles the decoder's steps, serves it whole on one CPU replica of one thread, asks one sequence at a time
to learn what a call costs, then Poisson arrivals. The simulator plays these by the profile: times per token within
5 % at the median and 15 % at the 99th percentile are asked for. Nobody leaves early. Writes
runs/live/sequences.json. Minutes: 5 with the defaults and SmolLM2; the machine must have nothing else to do.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.store import read_card
from experiments.data import RUNS
from experiments.kit import keep
from offramp.client.client import Client
from offramp.client.generation import Reading
from offramp.jobs.profiling import ProfileJob, profile_model
from offramp.jobs.provenance import provenance
from offramp.service.application import resolve_plan
from optimizer.plan import Plan
from optimizer.problem import PlanProblem
from optimizer.problem_file import parse_problem
from profiles.table import LatencyTable
from simulator.decisions import nested
from simulator.generate import Generated, generate
from simulator.scenario import Scenario, SequenceLengths

PORT = 8123
PROMPT_TOKENS, ANSWER_TOKENS = (4, 13), (24, 72)
"""From, and below."""
WARM, IDLE = 2, 6
"""Sequences, one after the other, that are not counted, and that tell what a call costs."""
BOUNDS = {50: 0.05, 99: 0.15}
"""By percentile of the times per token."""
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A sequence, and when it is asked for."""

    prompt: tuple[int, ...]
    num_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What its caller saw, in seconds from the first request on."""

    asked_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Per token after the first."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


def main() -> None:
    """Profile, serve, simulate, compare."""
    options = _options()
    plan = resolve_plan("stock", options.model, batch=options.batch)
    table = _profiled(options)
    rng = np.random.default_rng(options.seed)
    idle, busy = (drawn(options, number, rng) for number in (WARM + IDLE, options.sequences))
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan, max_timeout_s=PATIENCE_S)
    with serving(settings, LocalCluster(port=PORT)) as url:
        alone, told = asyncio.run(_live(url, read_card(options.model).name, idle, busy))
        [[[split]]] = [[each["splits"] for each in stage] for stage in httpx.get(f"{url}/stats").json()["stages"]]
    print(f"live, {split['inputs'] / split['batches']:.2f} steps shared a batch")
    problem = problem_of(plan, read_card(options.model).ramps, table)
    bare = simulated(problem, plan, idle[WARM:], [each.asked_s for each in alone[WARM:]])
    call_s = max(0.0, float(np.median([each.tpot_s for each in alone[WARM:]])) - bare.tpot_s(50))
    told_of = simulated(with_calls(problem, call_s), plan, busy, [each.asked_s for each in told])
    _tell(options, told, told_of, call_s, bare.tpot_s(50))


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.live.sequences", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a decoder's folder")
    parser.add_argument("--rate", type=float, default=0.7, help="sequences per second")
    parser.add_argument("--sequences", type=int, default=110)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the profile")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def drawn(options: Namespace, number: int, rng: np.random.Generator) -> list[Asked]:
    """Sequences of random tokens and lengths, at a Poisson process' times."""
    at_s = rng.exponential(1 / options.rate, number).cumsum()
    lengths = zip(rng.integers(*PROMPT_TOKENS, number), rng.integers(*ANSWER_TOKENS, number), strict=True)
    vocabulary = int(read_card(options.model).task["vocab_size"])
    return [
        Asked(prompt=tuple(rng.integers(3, vocabulary, prompt).tolist()), num_tokens=int(answer), at_s=float(at))
        for (prompt, answer), at in zip(lengths, at_s, strict=True)
    ]


def _profiled(options: Namespace) -> LatencyTable:
    """Of steps, at the sequences' mean length; as large as a batch of which some are prompts."""
    batches = tuple(1 << k for k in range((options.batch + PROMPT_TOKENS[1]).bit_length() + 1))
    context = (sum(PROMPT_TOKENS) + sum(ANSWER_TOKENS) // 2) // 2
    job = ProfileJob(batches=batches, lengths=(1,), context=context, repeats=options.repeats, seed=options.seed)
    return profile_model(options.model, job)[0].at(1)


async def _live(url: str, model: str, idle: Sequence[Asked], busy: Sequence[Asked]) -> tuple[list[Told], list[Told]]:
    await asyncio.to_thread(Client(url).wait_until_ready, PATIENCE_S)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http:
        began_s = time.perf_counter()
        alone = [await _told(http, model, each, began_s) for each in idle]
        began_s = time.perf_counter()
        return alone, await asyncio.gather(*(_later(http, model, each, began_s) for each in busy))


async def _later(http: httpx.AsyncClient, model: str, asked: Asked, began_s: float) -> Told:
    await asyncio.sleep(max(0.0, began_s + asked.at_s - time.perf_counter()))
    return await _told(http, model, asked, began_s)


async def _told(http: httpx.AsyncClient, model: str, asked: Asked, began_s: float) -> Told:
    body: dict[str, Any] = {
        "model": model,
        "prompt": asked.prompt,
        "max_tokens": asked.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "exits": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reading, asked_s = Reading(""), time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        came_s = [
            time.perf_counter() - began_s async for line in response.aiter_lines() if reading.line(line) is not None
        ]
    num_tokens = len(reading.whole().exits)
    return Told(asked_s=asked_s - began_s, first_s=came_s[0], last_s=came_s[-1], num_tokens=num_tokens)


def problem_of(plan: Plan, ramps: Sequence[int], table: LatencyTable) -> PlanProblem:
    """One CPU, nobody leaves, nothing hops."""
    latency = {"batch": list(table.batches), "length": 1, "ramp_s": table.ramp_s_EB.tolist()}
    return parse_problem(
        {
            "schema_version": 1,
            "blocks": plan.num_blocks,
            "ramps": list(ramps),
            "survival": [1.0] * plan.num_blocks,
            "latency": {"cpu": latency | {"block_s": table.block_s_NB.tolist()}},
            "devices": {"cpu": {"count": 1}},
            "link": {"bandwidth_bytes_per_s": 1e9},
            "bytes_per_sample": 0,
            "slo": {"latency_s": PATIENCE_S},
            "objective": {"maximize": "rate"},
        }
    ).problem


def with_calls(problem: PlanProblem, call_s: float) -> PlanProblem:
    """What a call costs is part of every batch.

    Were steps on their way while the next batch begins, sequences would fall into two groups that take turns, for ever.
    Live they do for a few steps: while a replica sees to one batch's answers, the next steps of these are often back
    before it chooses the next batch, and who once shares a batch goes on doing so.
    """
    table = problem.latency["cpu"]
    block_s_NB = table.block_s_NB.copy()
    block_s_NB[0] += call_s
    return replace(problem, latency={"cpu": replace(table, block_s_NB=block_s_NB)})


def simulated(problem: PlanProblem, plan: Plan, asked: Sequence[Asked], at_s: Sequence[float]) -> Generated:
    """The same sequences at the same times."""
    lengths = SequenceLengths(
        prompt_K=np.array([len(each.prompt) for each in asked]),
        answer_K=np.array([each.num_tokens for each in asked]),
        chunk=ServeSettings.model_fields["prompt_chunk"].default,
    )
    arrivals_s = np.array(at_s)
    scenario = Scenario(
        problem=problem,
        plan=plan,
        decisions=nested(problem.survival_N, problem.ramps, np.random.default_rng(0), num_rows=1),
        rows_N=np.zeros(1, dtype=np.int64),
        sequences=lengths,
        arrivals_s=arrivals_s,
        duration_s=float(arrivals_s[-1]) + 1.0,
        admission=False,
    )
    return generate(scenario)


def _tell(options: Namespace, told: Sequence[Told], found: Generated, call_s: float, alone_s: float) -> None:
    live_s = np.array([each.tpot_s for each in told])
    first_s = np.array([each.first_s - each.asked_s for each in told])
    rows = {
        "time per token p50": (float(np.percentile(live_s, 50)), found.tpot_s(50)),
        "time per token p99": (float(np.percentile(live_s, 99)), found.tpot_s(99)),
        "first token p50": (float(np.percentile(first_s, 50)), found.ttft_s(50)),
        "first token p99": (float(np.percentile(first_s, 99)), found.ttft_s(99)),
    }
    print(f"{len(told)} sequences at {options.rate:g}/s, {sum(each.num_tokens for each in told)} tokens; alone a token")
    print(f"takes {alone_s * 1e3:.2f} ms by the profile, and {call_s * 1e3:.2f} ms more live: what a call costs")
    for name, (live, sim) in rows.items():
        print(f"{name:20} live {live * 1e3:8.1f} ms   simulated {sim * 1e3:8.1f} ms   {sim / live:.3f}")
    each = [{"live": asdict(one), "tpot_s": tpot_s} for one, tpot_s in zip(told, found.tpot_s_K.tolist(), strict=True)]
    path = RUNS / "live" / "sequences.json"
    keep(
        {
            "provenance": provenance(seed=options.seed, model=str(options.model)),
            "call_s": call_s,
            "alone_s": alone_s,
            "figures": rows,
            "sequences": each,
        },
        path,
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
