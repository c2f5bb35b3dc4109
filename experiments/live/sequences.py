"""The simulator against the live service, of a decoder: the same prompts at the same times on both.

    python -m experiments.live.sequences --model FOLDER [--rate 0.7 --sequences 90]

Profiles the decoder before and after, serves it whole on one CPU replica of one thread, asks one sequence at a time
to learn what a call costs, then Poisson arrivals. The simulator plays these by the mean of both profiles: times per
token within 5 % at the median and 15 % at the 99th percentile are asked for. It plays them once more with all batches
so much slower that they take on average what the replica's took: what differs then is not the machine's speed. Nobody
leaves early. Writes runs/live/sequences.json. Minutes: 6 with SmolLM2; the machine must have nothing else to do.
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
from optimizer.problem_file import parse_problem, table_of_length
from profiles.scores import FloatArray
from profiles.table import LatencyTable
from simulator.decisions import nested
from simulator.generate import PlayedSequences, generate
from simulator.scenario import Scenario, SequenceLengths

PORT = 8123
PROMPT_TOKENS, ANSWER_TOKENS = (4, 13), (24, 72)
"""From, and below."""
CHUNK = 4
"""The least prompt that is timed; larger ones are multiples of it."""
WARM, IDLE = 2, 4
"""Sequences, one after the other, that are not counted, and that tell what a call costs."""
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A sequence, and when it is asked for."""

    prompt: tuple[int, ...]
    num_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A replica's batches."""

    batches: int
    inputs: int
    seconds: float

    def __sub__(self, before: Ran) -> Ran:
        return Ran(
            batches=self.batches - before.batches,
            inputs=self.inputs - before.inputs,
            seconds=self.seconds - before.seconds,
        )


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
    """Profile, serve, profile again, simulate, compare."""
    options = _options()
    card, plan = read_card(options.model), resolve_plan("stock", options.model, batch=options.batch)
    rng = np.random.default_rng(options.seed)
    idle, busy = (drawn(options, number, rng) for number in (WARM + IDLE, options.sequences))
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan, max_timeout_s=PATIENCE_S)
    before = _profiled(options)
    with serving(settings, LocalCluster(port=PORT)) as url:
        alone, of_alone, told, of_busy = asyncio.run(_live(url, card.name, idle, busy))
    steps, prompts = (mean_of(*pair) for pair in zip(before, _profiled(options), strict=True))
    problem = problem_of(plan, card.ramps, steps, prompts, busy)
    call_s = cost_of_call(alone[WARM:], of_alone)
    asked_s = [each.asked_s for each in told]
    found, of_found = simulated(problem, plan, busy, asked_s, call_s)
    slower = of_busy.seconds / of_busy.batches / (of_found.seconds / of_found.batches)
    as_fast = simulated(slowed(problem, slower), plan, busy, asked_s, call_s)[0]
    print(f"{len(told)} sequences at {options.rate:g}/s, {sum(each.num_tokens for each in told)} tokens")
    print(f"a call costs {call_s * 1e3:.2f} ms; alone a step took {of_alone.seconds / of_alone.batches * 1e3:.1f} ms")
    for name, run in (("live", of_busy), ("simulated", of_found)):
        print(f"{name:10} {run.inputs / run.batches:.2f} inputs in a batch of {run.seconds / run.batches * 1e3:.1f} ms")
    _tell(options, told, found, as_fast, {"call_s": call_s, "slower": slower})


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.live.sequences", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a decoder's folder")
    parser.add_argument("--rate", type=float, default=0.7, help="sequences per second")
    parser.add_argument("--sequences", type=int, default=90)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4, help="rounds of each profile")
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


def _profiled(options: Namespace) -> tuple[LatencyTable, LatencyTable]:
    """Of steps, at the sequences' mean length, and of prompts."""
    batches = tuple(1 << k for k in range((options.batch + PROMPT_TOKENS[1]).bit_length()))
    context = (sum(PROMPT_TOKENS) + sum(ANSWER_TOKENS) // 2) // 2
    job = ProfileJob(batches=batches, lengths=(1, CHUNK), context=context, repeats=options.repeats, seed=options.seed)
    profile = profile_model(options.model, job)[0]
    return profile.at(1), profile.at(CHUNK)


def mean_of(one: LatencyTable, other: LatencyTable) -> LatencyTable:
    """Of two profiles, before and after: the machine is not always as fast."""
    return replace(
        one,
        block_s_NB=(one.block_s_NB + other.block_s_NB) / 2,
        ramp_s_EB=(one.ramp_s_EB + other.ramp_s_EB) / 2,
        context_s=(one.context_s + other.context_s) / 2,
    )


async def _live(
    url: str, model: str, idle: Sequence[Asked], busy: Sequence[Asked]
) -> tuple[list[Told], Ran, list[Told], Ran]:
    await asyncio.to_thread(Client(url).wait_until_ready, PATIENCE_S)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http:
        began_s = time.perf_counter()
        warm = [await _told(http, model, each, began_s) for each in idle[:WARM]]
        ready = await _ran(http)
        alone = [await _told(http, model, each, began_s) for each in idle[WARM:]]
        quiet = await _ran(http)
        began_s = time.perf_counter()
        told = await asyncio.gather(*(_later(http, model, each, began_s) for each in busy))
        return [*warm, *alone], quiet - ready, told, await _ran(http) - quiet


async def _ran(http: httpx.AsyncClient) -> Ran:
    [[[split]]] = [[each["splits"] for each in stage] for stage in (await http.get("/stats")).json()["stages"]]
    return Ran(batches=split["batches"], inputs=split["inputs"], seconds=split["busy_s"])


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


def cost_of_call(alone: Sequence[Told], ran: Ran) -> float:
    """Seconds of sequences, one after the other, in which the replica ran no batch of theirs, per batch.

    Of the same seconds: a time of one spell less the batches of another would be the machine's drift.
    """
    waited_s = sum(each.last_s - each.asked_s for each in alone)
    return max(0.0, (waited_s - ran.seconds) / ran.batches)


def problem_of(
    plan: Plan, ramps: Sequence[int], steps: LatencyTable, prompts: LatencyTable, asked: Sequence[Asked]
) -> PlanProblem:
    """One CPU, nobody leaves, nothing hops."""
    return parse_problem(
        {
            "schema_version": 1,
            "blocks": plan.num_blocks,
            "ramps": list(ramps),
            "survival": [1.0] * plan.num_blocks,
            "latency": {"cpu": table_of_length(steps)},
            "devices": {"cpu": {"count": 1}},
            "link": {"bandwidth_bytes_per_s": 1e9},
            "bytes_per_sample": 0,
            "objective": {"maximize": "rate"},
            "generation": {
                "prompt_tokens": float(np.mean([len(each.prompt) for each in asked])),
                "output_tokens": float(np.mean([each.num_tokens for each in asked])),
                "tpot_s": PATIENCE_S,
                "prefill": {"cpu": table_of_length(prompts)},
            },
        }
    ).problem


def slowed(problem: PlanProblem, by: float) -> PlanProblem:
    """All that a batch takes, so many times."""
    assert problem.generation is not None
    assert problem.generation.prefill is not None
    tables = [
        replace(each, block_s_NB=each.block_s_NB * by, ramp_s_EB=each.ramp_s_EB * by, context_s=each.context_s * by)
        for each in (problem.latency["cpu"], problem.generation.prefill["cpu"])
    ]
    generation = replace(problem.generation, prefill={"cpu": tables[1]})
    return replace(problem, latency={"cpu": tables[0]}, generation=generation)


def simulated(
    problem: PlanProblem, plan: Plan, asked: Sequence[Asked], at_s: Sequence[float], call_s: float
) -> tuple[PlayedSequences, Ran]:
    """The same sequences at the same times; half of what a call costs is there, half is back."""
    settings = ServeSettings.model_fields
    lengths = SequenceLengths(
        prompt_K=np.array([len(each.prompt) for each in asked]),
        answer_K=np.array([each.num_tokens for each in asked]),
        chunk=settings["prompt_chunk"].default,
        timeout_s=settings["default_timeout_s"].default,
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
        entry_s=call_s / 2,
        answer_s=call_s / 2,
    )
    found = generate(scenario)
    [counts] = found.splits.values()
    return found, Ran(batches=counts.batches, inputs=counts.inputs, seconds=counts.busy_s)


def percentiles(tpot_s: FloatArray, ttft_s: FloatArray, *played: PlayedSequences) -> dict[str, tuple[float, ...]]:
    """Median and 99th percentile of times per token and to the first one, in seconds: live, then of what was played."""
    figures = {
        "time per token": (tpot_s, *(each.tpot_s_K for each in played)),
        "first token": (ttft_s, *(each.ttft_s_K for each in played)),
    }
    return {
        f"{name} p{percent}": tuple(float(np.nanpercentile(seconds, percent)) for seconds in of_sides)
        for name, of_sides in figures.items()
        for percent in (50, 99)
    }


def _tell(
    options: Namespace,
    told: Sequence[Told],
    found: PlayedSequences,
    as_fast: PlayedSequences,
    measured: dict[str, float],
) -> None:
    live_s = np.array([each.tpot_s for each in told])
    first_s = np.array([each.first_s - each.asked_s for each in told])
    rows = percentiles(live_s, first_s, found, as_fast)
    print(f"{'':20} {'live':>9} {'by the profile':>20} {'batches ' + format(measured['slower'], '.3f') + ' x':>20}")
    for name, (live, *sims) in rows.items():
        print(f"{name:20} {live * 1e3:6.1f} ms", *(f"{sim * 1e3:9.1f} ms {sim / live:.3f} x" for sim in sims))
    each = [{"live": asdict(one), "tpot_s": tpot_s} for one, tpot_s in zip(told, found.tpot_s_K.tolist(), strict=True)]
    path = RUNS / "live" / "sequences.json"
    keep(
        {
            "provenance": provenance(seed=options.seed, model=str(options.model)),
            **measured,
            "figures": rows,
            "sequences": each,
        },
        path,
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
