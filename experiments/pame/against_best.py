"""PAME's exits beside the best plan that answers soonest, by the mean batch and on recorded batches.

    OFFRAMP_DATA=... python -m experiments.pame.against_best [--most-batch 16]

Every set of recorded exits that is there, one V100 with published times, at three rates; times linear between published
batch sizes, and in steps as padded batches have them (PAME, figure 13(c)). Thresholds with a guarantee (budget 1 %,
confidence 90 %) from a half of the records; the other half is the batches. Of poses and maps of classes there are too
few for halves: budget 5 %, thresholds from all of them. `best` has every plan with splits, inputs that stay and any
ramps; by the records it is chosen anew among its candidates and those of the other strategies.
Minutes: about 10 on one core. Seed 0.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.pame.cases import KINDS, Kind, in_steps, records_of, v100
from offramp.jobs.planning import PlanAnswer, answer
from optimizer.decision import Planned
from optimizer.evaluate import evaluate, merit
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import Link, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.problem_file import ProblemFile
from optimizer.recorded import evaluate_on, reach_of
from optimizer.risk import Guarantee
from optimizer.thresholds import divide, learn_then_test
from profiles.batches import RecordedBatches
from profiles.records import ExitRecords
from profiles.table import LatencyTable

LOADS = (0.3, 0.6, 0.9)
"""Of the most that the model without exits does on the device."""
STREAMS = ("people", "cars", "imdb", "categories")
"""Of those that were recorded for Apparate's studies, where they are."""
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
OF_MAPS = Guarantee(budget=0.05, confidence=0.90)
"""Of poses and maps of classes, as `experiments.trained.vision` calibrates them."""
MOST_RAMPS = 6
"""Evenly spread, where there are more: a search among all plans at every batch size takes minutes otherwise."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question; seconds are mean answer times."""

    records: str
    times: str
    rate_per_s: float
    batch: int
    ramps: tuple[int, ...]
    """Of PAME's plan."""
    stock_s: float
    pame_s: float
    best_s: float
    pame_recorded_s: float
    """By what each recorded batch takes."""
    best_recorded_s: float
    rechosen_recorded_s: float
    """Of the plan that the records prefer."""
    pame_mean_s: float
    """By the mean batch of the same joint records: what is left to the records is the distribution."""
    best_mean_s: float

    def cells(self) -> tuple[str | float, ...]:
        """For a table."""
        off = [
            f"{on_records / by_mean - 1:+.1%}"
            for on_records, by_mean in (
                (self.pame_recorded_s, self.pame_mean_s),
                (self.best_recorded_s, self.best_mean_s),
            )
        ]
        planned = tuple(1e3 * each for each in (self.stock_s, self.pame_s, self.best_s))
        recorded = tuple(1e3 * each for each in (self.pame_recorded_s, self.best_recorded_s, self.rechosen_recorded_s))
        exits = ",".join(map(str, self.ramps)) or "none"
        return self.records, self.times, f"{self.rate_per_s:.0f}", self.batch, exits, *planned, *recorded, *off


COLUMNS = (
    *("records", "times", "rate /s", "batch", "PAME's exits", "stock ms", "PAME ms", "best ms"),
    *("PAME on records", "best on records", "rechosen", "PAME: off the mean", "best: off the mean"),
)


def recorded_exits() -> Iterator[tuple[str, Kind, ExitRecords]]:
    """Every set that is there, at most `MOST_RAMPS` ramps of each."""
    for name, kind in KINDS.items():
        records = records_of(name)
        if records is not None:
            yield name, kind, _fewer(records)
    for name in STREAMS:
        path = RUNS / "apparate" / f"{name}.npz"
        if path.is_file():
            records = ExitRecords.load(path)
            yield name, KINDS["cifar10" if records.num_blocks == 15 else "sst2"], _fewer(records)


def _fewer(records: ExitRecords) -> ExitRecords:
    at = np.unique(np.linspace(0, len(records.ramps) - 1, MOST_RAMPS).round().astype(int))
    return records.of_ramps([records.ramps[place] for place in at])


def problem_of(records: ExitRecords, table: LatencyTable, size: int) -> PlanProblem | None:
    """At the highest rate of the model without exits; None where nothing can be promised of the records."""
    rows, rest = divide(len(records), len(records) // 2, SEED)
    known, guarantee = (records.subset(rows), GUARANTEE) if records.zero_one else (records, OF_MAPS)
    design, tested = divide(len(known), len(known) // 4, SEED)
    try:
        thresholds = learn_then_test(known.subset(design), known.subset(tested), guarantee).thresholds
    except DataError:
        return None
    if not thresholds:
        return None
    batches = RecordedBatches.of_records(records.subset(rest), thresholds, size)
    most_per_s = max(batch / table.block_s_NB[:, place].sum() for place, batch in enumerate(table.batches))
    return PlanProblem(
        num_blocks=records.num_blocks,
        ramps=records.ramps,
        survival_N=tuple(reach_of(batches)(batches.ramps)),
        latency={"V100": table},
        devices={"V100": Supply(count=1, usd_per_hour=2.93)},
        link=Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
        bytes_per_sample_N=(0.0,) * records.num_blocks,
        slo=Slo(latency_s=10.0),
        objective=MinimizeLatency(rate_per_s=float(most_per_s)),
        batches=batches,
    )


def compare(name: str, times: str, problem: PlanProblem) -> Row | None:
    """None where one of the strategies has no plan."""
    stock, pame = solve(problem, "stock"), solve(problem, "pame")
    told = answer(ProblemFile(problem=problem), "best", solve)
    best = solve(problem, "best")
    if not (isinstance(stock, Planned) and isinstance(pame, Planned) and isinstance(best, Planned)):
        return None
    assert isinstance(told, PlanAnswer)
    assert problem.batches is not None
    assert merit(problem, best.figures) >= merit(problem, pame.figures) or best.gap > 0
    reach = reach_of(problem.batches)

    def recorded_s(stages: Sequence[Stage]) -> float:
        assert problem.batches is not None
        return evaluate_on(problem, stages, problem.batches).mean_latency_s

    return Row(
        records=name,
        times=times,
        rate_per_s=problem.asked_per_s or 0.0,
        batch=pame.stages[0].splits[0].batch,
        ramps=pame.stages[0].splits[0].ramps,
        stock_s=stock.figures.mean_latency_s,
        pame_s=pame.figures.mean_latency_s,
        best_s=best.figures.mean_latency_s,
        pame_recorded_s=recorded_s(pame.stages),
        best_recorded_s=recorded_s(best.stages),
        rechosen_recorded_s=recorded_s(told.planned.stages),
        pame_mean_s=evaluate(problem, pame.stages, reach).mean_latency_s,
        best_mean_s=evaluate(problem, best.stages, reach).mean_latency_s,
    )


def tables_of(kind: Kind, records: ExitRecords, most: int) -> Mapping[str, LatencyTable]:
    """Linear between published sizes, and in steps up to the next of them."""
    table = v100(kind, records.num_blocks, len(records.ramps))
    sizes = [size for size in table.batches if size <= most]
    every = tuple(range(1, most + 1))
    linear = LatencyTable(
        batches=every,
        block_s_NB=table.blocks_at(np.array(every, dtype=np.float64)),
        ramp_s_EB=table.ramps_at(np.array(every, dtype=np.float64)),
    )
    return {"linear": linear, "steps": in_steps(table, sizes, most)}


def main() -> None:
    """Plan, print and write."""
    parser = ArgumentParser(prog="python -m experiments.pame.against_best", description=__doc__)
    parser.add_argument("--most-batch", type=int, default=16)
    options = parser.parse_args()
    rows: list[Row] = []
    for name, kind, records in recorded_exits():
        for times, table in tables_of(kind, records, options.most_batch).items():
            problem = problem_of(records, table, options.most_batch)
            for load in LOADS if problem is not None else ():
                assert problem is not None
                row = compare(name, times, problem.with_rate(load * (problem.asked_per_s or 0.0)))
                if row is not None:
                    rows.append(row)
                    print(*row.cells(), flush=True)
    show("Mean answer time (ms) on one V100", COLUMNS, [row.cells() for row in rows])
    print(f"written: {keep(rows, RUNS / 'pame-against-best.json')}")


if __name__ == "__main__":
    main()
