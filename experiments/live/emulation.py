"""Emulated clusters as a planner sees them, the plans for them, and what a scenario runs on.

Time comes from the published BERT-base profile of E3's accelerators, slowed to what E3's may be (its V100 at about
8 ms for a batch of 1, an estimate) and stretched by a time scale, so that a cluster of them fits one machine's cores.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from earlyexit.errors import PlanError
from experiments.live.load import Phase
from experiments.live.model import ensure_model, thresholds
from experiments.problems import PROBLEMS, stretched
from optimizer.calibration_file import RECORDS_FILE
from optimizer.decision import NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation, evaluate
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.planner import solve
from optimizer.problem import Link, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from optimizer.rescore import joint_reach, rechosen, rescore
from optimizer.what_if import with_batch_limit
from profiles.records import ExitRecords

HOP_S = 0.01
"""What a call between two replicas takes here. It is no emulated time: accelerators are emulated, networks are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A cluster that is not there."""

    counts: Mapping[str, int] = field(default_factory=lambda: {"V100": 16})
    """Accelerators by their published name."""
    time_scale: float = 40.0
    slower: float = 6.5
    """Published seconds times this are an emulated accelerator's."""
    batch_limit: int = 8
    slo_s: float = 0.1
    """Emulated, as E3's."""

    @property
    def wall_slo_s(self) -> float:
        return self.slo_s * self.time_scale

    def problem(self, survival: tuple[float, ...], *, time_scale: float | None = None) -> PlanProblem:
        """What a planner of this cluster is asked, in wall-clock seconds unless a `time_scale` of 1 is given."""
        scale = self.time_scale if time_scale is None else time_scale
        published = read_problem(PROBLEMS / "bert_base_hetero.yaml").problem
        problem = with_batch_limit(stretched(published, self.slower * scale), self.batch_limit)
        return replace(
            problem,
            survival_N=survival,
            latency={emulated(name): problem.latency[name] for name in self.counts},
            devices={
                emulated(name): Supply(count=count, usd_per_hour=problem.devices[name].usd_per_hour)
                for name, count in self.counts.items()
            },
            link=Link(bandwidth_bytes_per_s=1e15, delay_s=HOP_S),
            slo=Slo(latency_s=self.slo_s * scale, slack=problem.slo.slack),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a scenario runs on."""

    emulation: Emulation
    model: Path
    records: ExitRecords
    options: Namespace

    @property
    def spec(self) -> PolicySpec:
        return policy(self.records, self.model)

    @property
    def thresholds(self) -> dict[int, float]:
        return thresholds(self.records)

    @property
    def problem(self) -> PlanProblem:
        """In wall-clock seconds, with the survival of the records."""
        return self.emulation.problem(self.records.outcome(self.thresholds).survival)

    def best(self, strategy: Strategy = "best") -> Planned:
        """The strategy's plan; raises PlanError where there is none."""
        return best_plan(self.problem, strategy, self.records)

    def plan(self, stages: tuple[Stage, ...]) -> Plan:
        """The stages as a service takes them; the policy also where no ramp is on: it says what the answers are."""
        return Plan(stages=stages, policy=self.spec, networks=self.problem.networks)

    def predicted(self, plan: Plan) -> Evaluation:
        """What the cost model says of a plan, by the recorded exits."""
        return evaluate(self.problem, plan.stages, joint_reach(self.records, self.thresholds))

    def steady(self, name: str, seconds: float, rate_per_s: float) -> Phase:
        """All recorded inputs in turn, at one rate."""
        return Phase(name=name, seconds=seconds, keys=self.records.sample_ids, rate_per_s=rate_per_s)


def bench(options: Namespace, counts: Mapping[str, int]) -> Bench:
    """The emulated cluster of a scenario, and its model."""
    records = ensure_model(options.model)
    emulation = Emulation(counts=counts, time_scale=options.time_scale)
    return Bench(emulation=emulation, model=options.model, records=records, options=options)


def emulated(name: str) -> str:
    """The accelerator type that stands for a real one."""
    return f"emulated:{name}"


def policy(records: ExitRecords, model: Path) -> PolicySpec:
    """Recorded exits, at E3's threshold for every ramp."""
    return PolicySpec(name="recorded", thresholds=thresholds(records), records=str((model / RECORDS_FILE).resolve()))


def best_plan(problem: PlanProblem, strategy: Strategy, records: ExitRecords) -> Planned:
    """The strategy's plan under the problem's survival; of its good plans the one these records prefer.

    Raises PlanError where there is none.
    """
    decision = solve(problem, strategy)
    if isinstance(decision, NoPlan):
        raise PlanError(f"no {strategy} plan of this cluster keeps {problem.slo.limit_s:g} s: {decision.binding}")
    reach = joint_reach(records, thresholds(records))
    return rechosen(problem, decision, rescore(problem, decision, reach))
