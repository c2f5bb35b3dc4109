"""Whether the planner regroups a decoder's survivors where that pays: its choice beside what was measured.

    python -m experiments.generation.choice FOLDER --data $OFFRAMP_DATA/ag_news/test.csv [--concurrency 1 2 4 8 16 32]

The model is profiled as `offramp profile` does it (steps, at the context that these sequences have on average, and a
prompt), and for every number of sequences at a time the planner is asked for the best plan of each strategy. Then the
engine runs the sequences with scripted exits, as `experiments.generation.speed` does: `stock`, one batch that shrinks,
and batches that are filled again behind the ramp, whole ones and halves. All of one thread, times over `stock`'s; the
planner's are its cost model's rates. *Regrouped* is a plan of several splits. Minutes: 5 with the defaults and SmolLM2.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from earlyexit.backends import open_segments
from earlyexit.clock import MonotonicClock
from earlyexit.memory import PAGE_TOKENS, Fill
from earlyexit.model import EarlyExitModel
from earlyexit.split import Split
from experiments.data import RUNS
from experiments.generation.speed import (
    SPENT,
    Engine,
    ScriptedPolicy,
    enough_for,
    figures,
    jobs_of,
    loaded,
    parser_of,
    plans,
)
from experiments.kit import keep, show
from experiments.turns import in_turns
from offramp.jobs.profiling import Bench, ProfileJob
from optimizer.decision import Planned
from optimizer.evaluate import evaluate
from optimizer.generation.demand import Generation
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.lengths import Lengths
from profiles.live_splits import LiveSplits, room_for
from profiles.table import LatencyTable

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Of steps; the largest holds those that are filled in, too."""
ANY_S = 1e6
STOCK, SHRINKING, HALF = "stock", "shrinking", "constant of half"
REGROUPED = ("constant", HALF)
CLOSE = 0.03
"""Measured ratios this near to each other are equal: the machine is not steadier."""


def main() -> None:
    """Profile, plan, measure, compare."""
    options = _options()
    torch.set_num_threads(1)
    text, model = loaded(options)
    steps, prompt = profiled(model, options) if options.profile is None else tables_of(options.profile)
    path, tables = RUNS / "generation_choice.json", [rows_of(steps), rows_of(prompt)]
    keep({"tables": tables, "rows": []}, path)
    model.open_memory(max(options.concurrency) * (options.prompt + 2 * options.tokens + 2 * PAGE_TOKENS))
    rows, kept = [], []
    before = {} if options.measured is None else measured_before(options.measured)
    for at_once in options.concurrency:
        spent_ms = before.get(at_once) or measured_now(model, text, at_once, options)
        measured = {name: spent_ms[STOCK] / each for name, each in spent_ms.items()}
        problem = problem_of(model.num_blocks, steps, prompt, at_once, options)
        planned, chosen = by_the_model(problem, at_once), chosen_of(problem)
        rows.append(row(at_once, spent_ms[STOCK], measured, planned, chosen))
        kept.append({"at once": at_once, "measured": spent_ms, "planned": planned, "chosen": chosen})
        show("", COLUMNS, rows[-1:])
    show(f"{options.share:g} leave after block {options.ramp}, {options.fill}, {options.dtype}", COLUMNS, rows)
    keep({"tables": tables, "rows": kept}, path)


def rows_of(table: LatencyTable) -> dict[str, Any]:
    """A table as it is kept."""
    rows = {"block_s": table.block_s_NB.tolist(), "ramp_s": table.ramp_s_EB.tolist()}
    return {"batches": table.batches, "length": table.length, **rows}


def tables_of(path: Path) -> tuple[LatencyTable, LatencyTable]:
    """Steps and prompt, as this command has kept them."""
    steps, prompt = (
        replace(LatencyTable.of_rows(each["batches"], each["block_s"], each["ramp_s"]), length=each["length"])
        for each in json.loads(path.read_text(encoding="utf-8"))["tables"]
    )
    return steps, prompt


def measured_before(path: Path) -> dict[int, dict[str, float]]:
    """What this command has kept, by sequences at a time and side: ms of processor time per token."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {int(each["at once"]): each["measured"] for each in rows}


def measured_now(model: EarlyExitModel, text: Tokenizer, at_once: int, options: Namespace) -> dict[str, float]:
    """The same, anew."""
    jobs = jobs_of(options, text, enough_for(at_once))
    sides = {
        name: partial(figures, Engine(model, splits, ScriptedPolicy(options.share), text, fill=fill), jobs, at_once, 64)
        for name, (splits, fill) in plans(model.num_blocks, (options.ramp,), at_once, (options.fill,)).items()
    }
    found = in_turns(sides, options.rounds, warm_ups=0)
    return {name.partition(",")[0]: median(each[SPENT]) for name, each in found.items()}


COLUMNS = (
    *("at once", "stock, ms per token", "shrinking", "constant", "of half"),
    *("by the model: shrinking", "of half", "planned", "where regrouping loses it is not planned"),
)


def _options() -> Namespace:
    parser = parser_of("python -m experiments.generation.choice", __doc__, prompt=16, tokens=12, rounds=1)
    parser.add_argument("--fill", choices=get_args(Fill), default="compute")
    parser.add_argument("--measured", type=Path, help="take what was measured from what this command has kept")
    parser.add_argument("--profile", type=Path, help="the same of its profile")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the profile")
    return parser.parse_args()


def profiled(model: EarlyExitModel, options: Namespace) -> tuple[LatencyTable, LatencyTable]:
    """Of steps, and of a prompt."""
    context = options.prompt + options.tokens // 2
    wanted = {1: BATCHES, options.prompt: (1,)}
    tables = []
    for length, batches in wanted.items():
        job = ProfileJob(
            dtype=options.dtype, batches=batches, lengths=(length,), context=context, repeats=options.repeats
        )
        model.open_memory(room_for(job.splits(model), context), "compute")
        rng = np.random.default_rng(0)
        splits = LiveSplits(model, rng, open_segments("torch", model, Path(), 1), context)
        bench = Bench(job=job, name=model.info.name, model=model, splits=splits, rng=rng)
        table = bench.profile(bench.time(job.splits(model), MonotonicClock())).tables[length]
        tables.append(replace(table, length=length))
    steps, prompt = tables
    return steps, prompt


def problem_of(
    num_blocks: int, steps: LatencyTable, prompt: LatencyTable, at_once: int, options: Namespace
) -> PlanProblem:
    """One thread, nothing promised, so many sequences at a time."""
    survival = [1.0] * (options.ramp + 1) + [1 - options.share] * (num_blocks - options.ramp - 1)
    generation = Generation(
        prompt=Lengths(mean=options.prompt),
        output=Lengths(mean=options.tokens),
        fill=options.fill,
        prefill={"cpu": prompt},
        late_head=True,
        most_running=at_once,
    )
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=(options.ramp,),
        survival_N=tuple(survival),
        latency={"cpu": steps},
        devices={"cpu": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0,) * num_blocks,
        slo=Slo(latency_s=ANY_S),
        objective=MaximizeRate(),
        generation=generation,
    )


def by_the_model(problem: PlanProblem, at_once: int) -> dict[str, float]:
    """Rates over `stock`'s, of plans that so many sequences keep full."""
    last, (ramp,), half = problem.num_blocks, problem.ramps, (at_once + 1) // 2
    stages = {
        STOCK: (Split(first=0, end=last, batch=at_once),),
        SHRINKING: (Split(first=0, end=last, batch=at_once, ramps=(ramp,)),),
        HALF: (
            Split(first=0, end=ramp + 1, batch=half, ramps=(ramp,)),
            Split(first=ramp + 1, end=last, batch=half),
        ),
    }
    rates = {
        name: evaluate(problem, (Stage(device="cpu", replicas=1, splits=splits),)).rate_per_s
        for name, splits in stages.items()
    }
    return {name: rate / rates[STOCK] for name, rate in rates.items()}


def chosen_of(problem: PlanProblem) -> str:
    """What kind of plan the planner takes."""
    decision = solve(problem)
    assert isinstance(decision, Planned), "nothing is promised, so there is a plan"
    splits = decision.stages[0].splits
    if len(splits) > 1:
        return HALF
    return SHRINKING if splits[0].ramps else STOCK


def row(
    at_once: int, stock_ms: float, measured: Mapping[str, float], planned: Mapping[str, float], chosen: str
) -> tuple[object, ...]:
    """Of the table. Regrouping loses where the better of its plans is slower than the better of the others."""
    regrouped = max(measured.get(name, 0.0) for name in REGROUPED)
    whole = max(measured[name] for name in (STOCK, SHRINKING))
    right = chosen not in REGROUPED or regrouped >= whole * (1 - CLOSE)
    shown = (measured.get(name) for name in (SHRINKING, *REGROUPED))
    return (str(at_once), stock_ms, *shown, planned[SHRINKING], planned[HALF], chosen, "yes" if right else "NO")


if __name__ == "__main__":
    main()
