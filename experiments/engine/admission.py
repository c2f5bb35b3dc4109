"""What admission loses and saves where batches take unsteadily long: by its constants, by older ones, and without it.

    python -m experiments.engine.admission [--unsteady 0.4 0.8] [--loads 0.7 0.9 1 1.3] [--seconds 20] [--seeds 3]

A simulated processor with two replicas, twelve blocks and ten ramps, batches of 16 that fill, one split or two, SLO of
12.5 single inputs. What a batch takes is the profile's times a lognormal factor of mean 1, of one in a hundred three
times that. Loads are of what the plan answers by the profile. Printed: the share of all inputs that is answered within
the SLO, and of those admitted; means over the seeds. The clock is the simulator's. Writes runs/admission.json. Minutes
of one core: about 4.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any

import numpy as np

from cluster.pace import Pace
from deployments.ingress.core import admission
from earlyexit.counts import SplitCounts
from earlyexit.split import Split
from experiments.data import RUNS
from experiments.kit import keep, show
from optimizer.evaluate import evaluate
from optimizer.placement import initial_placement
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from simulator.decisions import nested
from simulator.events import Events
from simulator.outcome import Figures
from simulator.scenario import Scenario
from simulator.service import SimulatedService
from simulator.simulate import play
from simulator.sustained import poisson_arrivals
from simulator.trip import Input
from simulator.work import Exit, Size, Work

SIDES: Mapping[str, Mapping[str, float] | None] = {
    "as it is": {},
    "from half on, 1 % late": {
        "CONTESTED": 0.5,
        "LATE_SHARE": 0.01,
        "SLOW_SHARE": 0.01,
    },
    "without": None,
}
"""Other constants of `deployments.ingress.core.admission`; None: everything is let in."""
BATCHES = (1, 2, 4, 8, 16)
SURVIVAL = (1.0, 0.97, 0.93, 0.86, 0.78, 0.70, 0.62, 0.55, 0.48, 0.42, 0.36, 0.31)
RAMPS = tuple(range(1, 11))
CUTS = {"one": (0, 12), "two": (0, 5, 12)}
DEVICE = "cpu"
SLOW, TIMES_SLOWER = 0.01, 3.0
WARM_UP_S = 4.0


class UnsteadyWork(Work):
    """Of a split whose batches take now more, now less than the profile says."""

    __slots__ = ("factor", "rng", "unsteady")
    factor: float
    rng: Random
    unsteady: float

    def part(self, members: Sequence[Input]) -> tuple[list[Exit], list[Input]]:
        """A batch begins, and with it another factor."""
        self.factor = self.rng.lognormvariate(-(self.unsteady**2) / 2, self.unsteady)
        if self.rng.random() < SLOW:
            self.factor *= TIMES_SLOWER
        return super().part(members)

    def until_s(self, size: Size) -> list[float]:
        """Times the batch's factor."""
        return [self.factor * seconds for seconds in super().until_s(size)]


class UnsteadyService(SimulatedService):
    """A service whose batches do."""

    rng: Random
    unsteady: float

    def _work(self, split: Split, pace: Pace) -> Work:
        counts = self.counts.setdefault(split, SplitCounts(split.budget))
        work = UnsteadyWork(split, self._leaves_of(split), pace, counts)
        work.rng, work.unsteady, work.factor = self.rng, self.unsteady, 1.0
        return work


def problem() -> PlanProblem:
    """Sizes of a network of 12 blocks on a processor."""
    block_s_NB = np.tile([0.0022 + 0.0005 * size for size in BATCHES], (len(SURVIVAL), 1))
    table = LatencyTable(batches=BATCHES, block_s_NB=block_s_NB, ramp_s_EB=block_s_NB[: len(RAMPS)] / 25)
    return PlanProblem(
        num_blocks=len(SURVIVAL),
        ramps=RAMPS,
        survival_N=SURVIVAL,
        latency={DEVICE: table},
        devices={DEVICE: Supply(count=2)},
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=1e-4),
        bytes_per_sample_N=(1e4,) * len(SURVIVAL),
        slo=Slo(latency_s=12.5 * float(block_s_NB[:, 0].sum())),
        objective=MaximizeRate(),
    )


def plan_of(asked: PlanProblem, bounds: Sequence[int]) -> Plan:
    """Two replicas of a stage that is cut there, and what it promises."""
    splits = tuple(
        Split(first=first, end=end, batch=16, ramps=tuple(ramp for ramp in RAMPS if first <= ramp < end))
        for first, end in pairwise(bounds)
    )
    stages = (Stage(device=DEVICE, replicas=2, splits=splits),)
    policy = PolicySpec(name="entropy", thresholds=dict.fromkeys(RAMPS, 0.4))
    predicted = {"rate_per_s": evaluate(asked, stages).rate_per_s}
    return Plan(stages=stages, dispatch="filling", policy=policy, predicted=predicted)


def played(
    asked: PlanProblem, plan: Plan, *, admits: bool, load: float, unsteady: float, seconds: float, seed: int
) -> Figures:
    """One run; admission as its constants are now."""
    duration_s = WARM_UP_S + seconds
    decisions = nested(SURVIVAL, RAMPS, np.random.default_rng(seed), num_rows=10_000)
    scenario = Scenario(
        problem=asked,
        plan=plan,
        decisions=decisions,
        rows_N=np.arange(10_000),
        arrivals_s=poisson_arrivals(load * plan.predicted["rate_per_s"], duration_s, seed),
        duration_s=duration_s,
        slo_s=asked.slo.latency_s,
        admission=admits,
        warm_up_s=WARM_UP_S,
    )
    placed = initial_placement(plan)
    devices = {slot: stage.device for slot, stage in placed.stage_of.items()}
    service = UnsteadyService(scenario, Events(), placed, devices)
    service.rng, service.unsteady = Random(seed), unsteady
    service.boot()
    return play(service).figures()


@contextmanager
def constants(values: Mapping[str, float]) -> Iterator[None]:
    """Admission with these in the place of its own."""
    before = {name: getattr(admission, name) for name in values}
    try:
        for name, value in values.items():
            setattr(admission, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(admission, name, value)


def compare(
    unsteady: Sequence[float], loads: Sequence[float], *, seconds: float, seeds: int
) -> Iterator[dict[str, Any]]:
    """A row for every side of every case."""
    asked = problem()
    for splits, bounds in CUTS.items():
        plan = plan_of(asked, bounds)
        for deviation in unsteady:
            for load in loads:
                for side, values in SIDES.items():
                    with constants(values or {}):
                        runs = [
                            played(
                                asked,
                                plan,
                                admits=values is not None,
                                load=load,
                                unsteady=deviation,
                                seconds=seconds,
                                seed=seed,
                            )
                            for seed in range(seeds)
                        ]
                    yield {
                        "splits": splits,
                        "unsteady": deviation,
                        "load": load,
                        "side": side,
                        "in_time": mean(run.in_slo_share for run in runs),
                        "admitted_in_time": mean(
                            run.in_slo / max(1, run.inputs - run.drops.get("admission", 0)) for run in runs
                        ),
                    }


def main() -> None:
    """See the module's first lines."""
    parser = ArgumentParser(prog="python -m experiments.engine.admission", description=__doc__)
    parser.add_argument("--unsteady", type=float, nargs="+", default=[0.4, 0.8], help="deviation of the logarithm")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9, 1.0, 1.3])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = list(compare(options.unsteady, options.loads, seconds=options.seconds, seeds=options.seeds))
    show("answered within the SLO", list(rows[0]), [list(row.values()) for row in rows])
    print(f"written: {keep(rows, RUNS / 'admission.json')}")


if __name__ == "__main__":
    main()
