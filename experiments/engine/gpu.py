"""Measures the batch engine on a GPU: full batches, shrinking batches, and no exits.

    python -m experiments.engine.gpu [--models bert-base] [--batches 1 8 64] [--no-graphs]
    python -m experiments.engine.gpu --dry-run    # tiny models on the CPU: runs the same code, prints no figures

BERT-base and BERT-large have random weights, bfloat16, and 128 random tokens per input. Exits come from records of
BERT-base on SST-2 at entropy 0.4, or are drawn to the same survival; the output states which. BERT-large has a ramp
after every second block. Needs torch, numpy, pydantic and safetensors, but no ray; with numba the planner adds its own
cuts. Saturated rates are medians of rounds in which the plans take turns. Latencies are measured under Poisson arrivals
at 80 % of a plan's own rate.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.backends.captured import CapturedSegments, recorder_of
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.engine.engine import MOST_RUNNING
from earlyexit.engine.queue import Member
from earlyexit.errors import DataError
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel, SegmentRunner, TorchRunner, arbitrary_tensors
from earlyexit.network.piece import Piece
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.policies.ensemble import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import EntropyPolicy
from experiments.data import RUNS, data_folder
from experiments.engine.side import Side, members_of
from experiments.kit import print_table, write_json
from experiments.recorded_exits import BERT12_SST2, bert12_sst2, drawn_exits
from experiments.turns import in_turns
from offramp.commands.output import provenance
from optimizer.plans.plan import Plan, PolicySpec, early_exit_plan, serial_plan, stock_plan
from profiles.records import ExitRecords
from profiles.table import LatencyTable

BASE: dict[str, int] = {"num_blocks": 12}
LARGE = {"num_blocks": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
MODELS = {"bert-base": BASE, "bert-large": LARGE}
"""Differences of each model from BERT-base."""
LENGTH = 128
"""Tokens per input."""
DRY = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "vocab_size": 100, "max_length": 8}
"""Configuration of a dry run's models, which have the real depth but almost no work."""
DTYPE = torch.bfloat16
THRESHOLD, NEVER = 0.4, -1.0
"""Entropies in nats: the default of E3 (section 5), and a threshold that no prediction reaches."""
POLICY = PolicySpec(name="entropy", thresholds=THRESHOLD)
SHOWN_SPLITS = 6
"""Largest number of splits that a table's last column shows."""
SURVIVAL = (1.0, 0.75, 0.60, 0.45, 0.38, 0.375, 0.33, 0.31, 0.29, 0.27, 0.25, 0.24)
"""Share of inputs that reach each block, for drawn exits: close to that of the recorded exits at the threshold."""
NUM_DRAWN = 1000
COST_ROUNDS, COST_SHARE = 3, 0.2
"""Number of runs that measure costs, and the duration of each as a share of a run's seconds."""
FIRST_BATCHES = 8
"""Batches that warm up, and estimate how many inputs fill the duration of a run."""
MOST_INPUTS = 100_000
"""Largest number of inputs in a run. All their tokens and objects are created before it."""
LOAD = 0.8
"""Arrival rate while latencies are measured, as a share of the plan's own saturated rate."""
FEWEST_ARRIVALS = 20
COLUMNS = (
    "model",
    "batch",
    "side",
    "samples/s",
    "p50 ms",
    "p99 ms",
    "/early",
    "/stock",
    "mean batch",
    "splits (ramps)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one plan at one batch limit."""

    model: str
    batch: int
    side: str
    splits: str
    """Each split's blocks and the number of its active ramps, or the number of splits if there are many."""
    rounds_per_s: list[float]
    """Samples per second with all inputs queued."""
    predicted_per_s: float
    """The rate by the planner's cost model, from the costs measured before."""
    p50_s: float
    p99_s: float
    """Latency from arrival to answer."""
    mean_batch: float
    """Mean number of inputs at the start of a batch, under saturation."""

    @property
    def samples_per_s(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_per_s)


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """Returns the checked command line; a dry run has other defaults."""
    dry = "--dry-run" in (sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(
        prog="python -m experiments.engine.gpu", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    batches = (1, 2, 4) if dry else (1, 2, 4, 8, 16, 32, 64)
    parser.add_argument("--batches", nargs="+", type=int, default=batches, help="batch limits")
    parser.add_argument("--rounds", type=int, default=2 if dry else 5)
    parser.add_argument("--seconds", type=float, default=0.05 if dry else 1.0, help="seconds of a run in each round")
    parser.add_argument("--records", choices=("auto", "recorded", "synthetic"), default="auto")
    parser.add_argument("--at-once", type=int, choices=(1, 2), default=1, help="batches that run at once")
    parser.add_argument("--no-graphs", action="store_true", help="run without CUDA graphs")
    parser.add_argument("--device", default="cpu" if dry else "cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RUNS / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="run tiny models on the CPU")
    options = parser.parse_args(arguments)
    if min(*options.batches, options.rounds) < 1 or options.seconds <= 0:
        parser.error("batches and rounds must be at least 1, seconds above 0")
    options.batches = sorted({*options.batches})
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes one file per model."""
    options = parse(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("skipped: this machine has no CUDA device; --dry-run runs the code on the CPU")
    torch.set_num_threads(1)  # the host's work is small tensors; on the CPU, more threads would hide its cost
    records, source = find_exits(options.records, np.random.default_rng(options.seed))
    how = f"graphs {'off' if options.no_graphs else 'on'}; {options.at_once} at once"
    print(f"device: {options.device}; {how}\nexits: {source}", flush=True)
    if not can_plan():
        print("the best ramps and the best cuts are skipped: the planner needs numba, which is not installed")
    for name in options.models:
        bench = workbench(name, options, records, MonotonicClock(), np.random.default_rng(options.seed))
        costs = measure_costs(bench)
        rows = [row for batch in options.batches for row in compare(bench, costs, batch)]
        print_table(name, COLUMNS, [_cells(row, rows) for row in rows])
        document: dict[str, object] = {"provenance": provenance(seed=options.seed, **_device(options)), "exits": source}
        document |= {"options": {key: str(value) for key, value in vars(options).items()}, "costs": costs, "rows": rows}
        print(f"wrote {write_json(document, options.out / f'{name}.json')}", flush=True)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[object, ...]:
    beside = {each.side: each.samples_per_s for each in rows if each.batch == row.batch}
    over = [row.samples_per_s / beside[name] for name in ("early-exit", "stock")]
    seconds = (1000 * row.p50_s, 1000 * row.p99_s)
    return row.model, str(row.batch), row.side, row.samples_per_s, *seconds, *over, row.mean_batch, row.splits


def find_exits(source: str, rng: np.random.Generator) -> tuple[ExitRecords, str]:
    """Returns recorded exits if OFFRAMP_DATA has them, else drawn exits, of 12 blocks; and a description of them."""
    folder = data_folder()
    if source == "recorded" or (source == "auto" and folder is not None and (folder / BERT12_SST2).is_file()):
        return bert12_sst2("entropy"), f"recorded: {BERT12_SST2}"
    shares = ", ".join(f"{share:g}" for share in SURVIVAL)
    return drawn_exits(SURVIVAL, num_inputs=NUM_DRAWN, rng=rng), f"synthetic: drawn to survive {shares}"


def on_blocks(records: ExitRecords, num_blocks: int) -> ExitRecords:
    """Returns the same exits in a deeper model: each ramp moves to the same share of the depth.

    Raises DataError if the number of blocks is not a multiple.
    """
    times, rest = divmod(num_blocks, records.num_blocks)
    if rest or not times:
        raise DataError(f"exits of {records.num_blocks} blocks do not fit a model of {num_blocks} blocks")
    return replace(records, num_blocks=num_blocks, ramps=tuple(times * (ramp + 1) - 1 for ramp in records.ramps))


class WaitedPolicy(RecordedPolicy):
    """Takes exits from records, after it has computed the entropy of the logits as a real policy does."""

    name = "recorded"

    def __init__(self, answers: RecordedAnswers, judge: EntropyPolicy) -> None:
        super().__init__(answers, judge)
        self._reader = judge

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        self._reader.decide(ramp, output, state_BS, sample_ids)
        return super().decide(ramp, output, state_BS, sample_ids)

    def conclude(self, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        self._reader.conclude(output, state_BS, sample_ids)
        return super().conclude(output, state_BS, sample_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """Everything that the plans of one model share."""

    name: str
    options: Namespace
    records: ExitRecords
    """Records of a model of this depth."""
    model: EarlyExitModel
    segments: SegmentRunner
    clock: Clock
    rng: np.random.Generator

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Captures the segments that these plans need, if segments are captured."""
        splits = [split for plan in plans for split in plan.splits]
        self.segments.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def side(self, plan: Plan, *, leaving: bool = True) -> Side:
        """Returns a live device under the plan. Without `leaving`, every ramp is evaluated but no input leaves."""
        runner = TorchRunner(self.model, self.policy(THRESHOLD if leaving else NEVER), self.segments)
        plan = plan.in_pairs() if self.options.at_once == MOST_RUNNING else plan
        return Side(plan.splits, runner, self.clock, self.expected(plan.ramps if leaving else ()))

    def members(self, number: int) -> list[Member[Piece]]:
        """Returns inputs of random tokens, all of one length, with the exits of the records in random order."""
        ids = self.records.sample_ids
        rows = np.resize(self.rng.permutation(len(ids)), number)
        lengths_B = np.full(number, self.model.max_length, dtype=np.int32)
        piece = Piece(
            sample_ids=tuple(f"{ids[row]}#{k}" for k, row in enumerate(rows.tolist())),
            next_block=0,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(self.model, 0, lengths_B, self.rng),
            state_BS=self.policy(THRESHOLD).initial_state(number, self.model.task.num_outputs, self.model.device),
        )
        return members_of(piece)

    def policy(self, threshold: float) -> ExitPolicy:
        """Returns a policy that follows the records at this entropy; at NEVER no input leaves early."""
        answers = RecordedAnswers(
            row_of={sample_id: row for row, sample_id in enumerate(self.records.sample_ids)},
            ramps=self.records.ramps,
            scores_NR=self.records.scores_NR,
            answers_NE=self.records.answers(),
        )
        judge = EntropyPolicy(threshold)
        return WaitedPolicy(answers, judge)

    def expected(self, active: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Returns every input's exit and label, with these ramps active."""
        outcome = self.records.outcome(dict.fromkeys(active, THRESHOLD))
        assert outcome.answers_N is not None
        pairs = zip(outcome.exits_N.tolist(), outcome.answers_N.tolist(), strict=True)
        return dict(zip(self.records.sample_ids, pairs, strict=True))


def workbench(name: str, options: Namespace, records: ExitRecords, clock: Clock, rng: np.random.Generator) -> Workbench:
    """Returns the model with random weights on its device, with DeeBERT's ramps (pooler on the first token)."""
    config = {**MODELS[name], "max_length": LENGTH} | (DRY if options.dry_run else {})
    own_exits = on_blocks(records, config["num_blocks"])
    ramps = RampOptions(style="pooler", pooling="first", at=own_exits.ramps)
    model = random_model(config, name=name, ramps=ramps, seed=options.seed)
    model = model.to(torch.device(options.device), DTYPE).requires_grad_(False)
    model.attention = "apart"  # all inputs have the same length, so no shapes of mixed lengths are captured
    segments = model if options.no_graphs else CapturedSegments(model, recorder_of(model.device))
    return Workbench(
        name=name, options=options, records=own_exits, model=model, segments=segments, clock=clock, rng=rng
    )


def measure_costs(bench: Workbench) -> LatencyTable:
    """Measures costs at the batch limits and every power of two below, by two plans under which no input leaves.

    With R ramps and N blocks, a block takes stock / N and a ramp (all ramps on - stock) / R. Embedding and head are
    spread over the blocks. The costs of selecting survivors and of another split are in neither.
    """
    powers = [1 << k for k in range(max(bench.options.batches).bit_length())]
    sizes = tuple(sorted({*powers, *bench.options.batches}))
    blocks, ramps = bench.records.num_blocks, bench.records.ramps
    found = []
    for size in sizes:
        plans = baselines(blocks, ramps, size)
        bench.prepare(plans.values())
        sides = {name: bench.side(plan, leaving=False) for name, plan in plans.items()}
        rates = saturated_rates(bench, sides, size, COST_SHARE * bench.options.seconds, COST_ROUNDS)
        stock_s, ramps_s = (size / median(each) for each in rates.values())
        found.append((stock_s / blocks, max((ramps_s - stock_s) / len(ramps), 0.0)))
    block_s, ramp_s = zip(*found, strict=True)
    return LatencyTable(
        batches=sizes, block_s_NB=np.tile(block_s, (blocks, 1)), ramp_s_EB=np.tile(ramp_s, (len(ramps), 1))
    )


def compare(bench: Workbench, costs: LatencyTable, batch: int) -> list[Row]:
    """Measures stock, early-exit, and a cut after every ramp; with a planner also the best ramps and the best cuts."""
    blocks, ramps = bench.records.num_blocks, bench.records.ramps
    known = costs.batches.index(batch) + 1
    limited = LatencyTable(
        batches=costs.batches[:known], block_s_NB=costs.block_s_NB[:, :known], ramp_s_EB=costs.ramp_s_EB[:, :known]
    )
    survival = bench.records.outcome(dict.fromkeys(ramps, THRESHOLD)).survival
    plans = baselines(blocks, ramps, batch)
    if can_plan():
        plans |= planned(limited, ramps, survival)
    plans["serial, every ramp"] = serial_plan(blocks, ramps, POLICY, batch=batch, device="gpu")
    bench.prepare(plans.values())
    sides = {name: bench.side(plan) for name, plan in plans.items()}
    rates = saturated_rates(bench, sides, batch, bench.options.seconds, bench.options.rounds)
    return [_row(bench, name, side, plans[name], rates[name], limited, survival) for name, side in sides.items()]


def baselines(num_blocks: int, ramps: tuple[int, ...], batch: int) -> dict[str, Plan]:
    """Returns the plans of one split: without ramps, and with all of them."""
    early_exit = early_exit_plan(num_blocks, ramps, POLICY, batch=batch, device="gpu")
    return {"stock": stock_plan(num_blocks, batch=batch, device="gpu"), "early-exit": early_exit}


def _row(
    bench: Workbench,
    name: str,
    side: Side,
    plan: Plan,
    rates: list[float],
    costs: LatencyTable,
    survival: Sequence[float],
) -> Row:
    mean_batch, offered_per_s = float(np.mean(side.log.sizes)), LOAD * median(rates)
    number = max(int(offered_per_s * bench.options.seconds), FEWEST_ARRIVALS)
    members, arrivals_s = bench.members(number), np.cumsum(bench.rng.exponential(1 / offered_per_s, number))
    with no_collections():
        p50_s, p99_s = np.percentile(side.serve(members, arrivals_s), (50, 99)).tolist()
    return Row(
        model=bench.name,
        batch=costs.batches[-1],
        side=name,
        splits=shown(plan),
        rounds_per_s=rates,
        predicted_per_s=predicted_per_s(costs, bench.records.ramps, survival, plan),
        p50_s=p50_s,
        p99_s=p99_s,
        mean_batch=mean_batch,
    )


def saturated_rates(
    bench: Workbench, sides: dict[str, Side], batch: int, seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Returns samples per second of full batches in runs of about `seconds`. Plans take turns, after a warm-up."""

    def rate_per_s(side: Side, number: int) -> float:
        members = bench.members(number)
        with no_collections():
            return number / side.saturate(members)

    numbers = {}
    for name, side in sides.items():
        first = FIRST_BATCHES * batch
        rate_per_s(side, first)
        wanted = min(int(rate_per_s(side, first) * seconds), MOST_INPUTS)
        numbers[name] = max(wanted // batch, FIRST_BATCHES) * batch
    turns = {name: partial(lambda name: {"rate": rate_per_s(sides[name], numbers[name])}, name) for name in sides}
    return {name: figures["rate"] for name, figures in in_turns(turns, rounds, warm_ups=0).items()}


def can_plan() -> bool:
    """Returns whether numba is installed; a bare machine may lack it."""
    return importlib.util.find_spec("numba") is not None


def problem_of(table: LatencyTable, ramps: tuple[int, ...], survival: Sequence[float]) -> Any:
    """Returns a `PlanProblem`: the highest rate of one device, without a latency limit."""
    from optimizer.problems.problem import ANY_LATENCY_S, Link, MaximizeRate, PlanProblem, Slo, Supply

    return PlanProblem(
        num_blocks=len(survival),
        ramps=ramps,
        survival_N=tuple(survival),
        latency={"gpu": table},
        devices={"gpu": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0,) * len(survival),
        slo=Slo(latency_s=ANY_LATENCY_S, slack=0.0),
        objective=MaximizeRate(),
    )


def planned(table: LatencyTable, ramps: tuple[int, ...], survival: Sequence[float]) -> dict[str, Plan]:
    """Returns the planner's plans for this device: the best ramps of one split, and the best cuts."""
    from optimizer.search.decision import Planned
    from optimizer.search.planner import solve
    from optimizer.search.space import SPACES, Space

    one_split = Space(strategy="early-exit", splits_per_stage=False, several_stages=False)
    plans = {}
    for name, space in (("early-exit, best ramps", one_split), ("serial", SPACES["serial"])):
        decision = solve(problem_of(table, ramps, survival), space)
        assert isinstance(decision, Planned), "any latency will do"
        plans[name] = Plan(stages=decision.stages, policy=POLICY)
    return plans


def predicted_per_s(table: LatencyTable, ramps: tuple[int, ...], survival: Sequence[float], plan: Plan) -> float:
    """Returns the rate by the product's cost model, which ignores the overhead of a split."""
    from optimizer.cost.evaluate import evaluate

    return evaluate(problem_of(table, ramps, survival), plan.stages).rate_per_s


def shown(plan: Plan) -> str:
    """Returns a plan in the form of `Row.splits`."""
    if len(plan.splits) > SHOWN_SPLITS:
        return f"{len(plan.splits)} splits ({len(plan.ramps)})"
    return " | ".join(f"{split.first}-{split.end - 1} ({len(split.ramps)})" for split in plan.splits)


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables Python's garbage collector; it would scan tens of thousands of live inputs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _device(options: Namespace) -> dict[str, object]:
    if options.device == "cpu":
        return {"device": f"CPU, {platform.machine()}", "driver": None, "cuda": torch.version.cuda}
    name = torch.cuda.get_device_name(options.device)
    return {"device": name, "driver": _driver(), "cuda": torch.version.cuda}


def _driver() -> str | None:
    """Returns the version of the device's driver, or None if nvidia-smi does not report it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


if __name__ == "__main__":
    main()
