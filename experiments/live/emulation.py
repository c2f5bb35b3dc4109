"""Emulated clusters: what a planner sees of them, what a service of them is told, and the command of a scenario.

Time comes from the published BERT-base profile of E3's accelerators, slowed to what E3's may be (its V100 at about
8 ms for a batch of 1, an estimate) and stretched by a time scale, so that a cluster of them fits one machine's cores.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deployments.settings import ControlSettings, EmulatedSettings, ServeSettings
from experiments.data import RUNS
from experiments.kit import keep
from experiments.live.model import FOLDER, ensure_model, thresholds
from experiments.problems import PROBLEMS, stretched
from offramp.demo import service
from optimizer.calibration_file import RECORDS_FILE
from optimizer.decision import NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation, evaluate
from optimizer.plan import Plan, PolicySpec, Stage, stock_plan
from optimizer.planner import solve
from optimizer.problem import Link, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from optimizer.rescore import joint_reach, rechosen, rescore
from optimizer.what_if import with_batch_limit
from profiles.records import ExitRecords

HOP_S = 0.01
"""What a call between two replicas takes here. It is no emulated time: accelerators are emulated, networks are not."""
SLOTS = 6
"""Per accelerator type: more stages than any plan here has, so that new ones start beside those that end."""
EMULATED = (
    "emulated: the Serve graph is real, accelerators are not. Decisions come from exit records, time from the "
    "published BERT-base profile, stretched"
)


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

    def settings(self, model: Path, plan: Plan, control: ControlSettings | None = None) -> ServeSettings:
        """Settings of a service for `plan`.

        With a controller every idle slot has a replica until the controller takes it away, which leaves no room for a
        plan of all accelerators: the settings then begin with the model without exits on what the idle slots leave.
        """
        problem = self.problem((1.0,) * plan.num_blocks, time_scale=1.0)
        slots = {emulated(name): min(SLOTS, count) for name, count in self.counts.items()}
        name, count = next(iter(self.counts.items()))
        first = stock_plan(
            plan.num_blocks,
            batch=self.batch_limit,
            device=emulated(name),
            replicas=count - min(SLOTS, count) + 1,
            networks=plan.networks,
        )
        return ServeSettings(
            model=str(model.resolve()),
            plan=plan if control is None else first,
            emulated={
                device: EmulatedSettings(
                    batch=list(table.batches),
                    block_s=table.block_s_NB.tolist(),
                    ramp_s=table.ramp_s_EB.tolist(),
                    time_scale=self.time_scale,
                )
                for device, table in problem.latency.items()
            },
            slots={} if control is None else slots,
            control=control,
            slo_s=self.wall_slo_s,
            probe_share=0.0 if control is None else 0.02,
            slack=problem.slo.slack,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a scenario runs on."""

    emulation: Emulation
    model: Path
    records: ExitRecords
    options: Namespace

    @property
    def policy(self) -> PolicySpec:
        """Recorded exits, at E3's threshold for every ramp."""
        path = str((self.model / RECORDS_FILE).resolve())
        return PolicySpec(name="recorded", thresholds=self.thresholds, records=path)

    @property
    def thresholds(self) -> dict[int, float]:
        return thresholds(self.records)

    @property
    def problem(self) -> PlanProblem:
        """In wall-clock seconds, with the survival of the records."""
        return self.emulation.problem(self.records.outcome(self.thresholds).survival)

    def best(self, strategy: Strategy = "best") -> Planned:
        """The strategy's plan, of its good plans the one that the records prefer."""
        decision = solve(self.problem, strategy)
        assert not isinstance(decision, NoPlan), decision.binding
        reach = joint_reach(self.records, self.thresholds)
        return rechosen(self.problem, decision, rescore(self.problem, decision, reach))

    def plan(self, stages: tuple[Stage, ...]) -> Plan:
        """The stages as a service takes them; the policy also where no ramp is on: it says what the answers are."""
        return Plan(stages=stages, policy=self.policy, networks=self.problem.networks)

    def predicted(self, plan: Plan) -> Evaluation:
        """What the cost model says of a plan, by the recorded exits."""
        return evaluate(self.problem, plan.stages, joint_reach(self.records, self.thresholds))

    def control(self, **options: Any) -> ControlSettings:
        """A controller that remembers nothing of earlier runs; without options one that never plans."""
        make = service.control_settings if options else service.hand_control
        return make(self.problem, self.policy, RUNS / "live" / "state" / "scenario.sqlite", **options)


def bench(options: Namespace, counts: Mapping[str, int]) -> Bench:
    """The emulated cluster of a scenario, and its model."""
    records = ensure_model(options.model)
    emulation = Emulation(counts=counts, time_scale=options.time_scale)
    return Bench(emulation=emulation, model=options.model, records=records, options=options)


def emulated(name: str) -> str:
    """The accelerator type that stands for a real one."""
    return f"emulated:{name}"


def command(
    name: str,
    description: str | None,
    run: Callable[[Bench], Mapping[str, Any]],
    counts: Mapping[str, int],
    *,
    time_scale: float = 40.0,
    **own: Any,
) -> None:
    """Run a scenario from its command line and write its figures to runs/live.

    `counts`: accelerators by their published name; `own`: further options, with their defaults.
    """
    parser = ArgumentParser(prog=f"python -m experiments.live.{name}", description=description)
    parser.add_argument("--model", type=Path, default=FOLDER, help="made where it is missing")
    parser.add_argument("--time-scale", type=float, default=time_scale, help="wall-clock seconds of an emulated one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    for option, default in own.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    on = bench(parser.parse_args(), counts)
    print(f"{EMULATED} {on.emulation.time_scale:g} times; SLO {on.emulation.wall_slo_s:g} s")
    figures = {"time_scale": on.emulation.time_scale, "slo_s": on.emulation.wall_slo_s, **run(on)}
    print(f"written: {keep({'emulated': True, 'what': EMULATED, **figures}, RUNS / 'live' / f'{name}.json')}")
