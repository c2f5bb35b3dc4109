"""Compares the simulator with the live service: several plans and loads, the same requests at the same times.

    python -m experiments.live.validation [--plans stock,e3,best] [--loads 0.4,0.7,0.95,1.2] [--requests 600]
    python -m experiments.live.validation --devices V100=1,P100=1,K80=2 --slo-s 0.5 --plans best:2,best:3

EMULATED accelerators, batches up to 8, recorded exits, no controller. `best:3` is the best plan of three chains, each
on one accelerator type. Accelerators take the published times of BERT-base, slowed to an estimate of E3's times (its
V100 takes about 8 ms for a batch of 1). The time scale stretches these times and the SLO, so that one machine can
emulate the cluster. Loads are shares of each plan's predicted rate: Poisson arrivals of requests of 8 inputs. Every run
has a fresh service. The simulator counts only the accelerators' times and `HOP_S`, so the difference includes the time
that HTTP and Python take. Writes runs/live/validation.json. Minutes: 20.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import psutil

from deployments.controller.act import describe_plan
from deployments.local_ray.cluster import LocalCluster
from deployments.settings import EmulatedSettings, ServeSettings
from earlyexit.errors import DataError
from experiments.data import RUNS
from experiments.kit import print_table, write_json
from experiments.live.model import FOLDER, LABELS, make_model
from experiments.problems import ENTROPY, PROBLEMS, stretched
from offramp.demo.turns import served
from offramp.load.arrivals import Poisson
from offramp.load.generator import LoadConfig, RequestRecord, run_load
from offramp.load.sustained import percentile
from optimizer.calibration.calibration_file import RECORDS_FILE
from optimizer.cost.evaluate import evaluate
from optimizer.cost.rescore import joint_reach, rescore
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, chains_of
from optimizer.problems.problem import Link, PlanProblem, Slo, Supply
from optimizer.problems.problem_file import read_problem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import NoPlan, Strategy
from optimizer.search.planner import solve
from optimizer.search.space import SPACES
from profiles.records import ExitRecords
from simulator.inputs import recorded
from simulator.scenario import FloatArray, Scenario
from simulator.simulate import simulate

TEXT = "so it goes"
"""The text of every request. Recorded decisions depend only on the id that is sent with it."""
BOUNDS: Mapping[str, float] = {"goodput_per_s": 0.05, "p50_s": 0.10, "p99_s": 0.20}
"""Allowed relative difference of a simulated figure from the live one."""
INPUTS_PER_REQUEST = 8
NUM_DRAWN = 8000
"""Inputs drawn for a load. A longer load repeats them."""
WARM_SLOS = 3.0
"""Warm-up that a load's figures leave out, in SLOs."""
SLOWER, BATCH_LIMIT = 6.5, 8
"""Factor on the published times of an emulated accelerator, and its largest batch."""
HOP_S = 0.01
"""Seconds of a call between two replicas. They are real seconds, because only accelerators are emulated."""
ENDLESS_BYTES_PER_S = 1e15
"""Emulated accelerators send each other no hidden state, so a hop takes only the delay."""

# The emulated cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The cluster and records of live runs; all seconds are real."""

    counts: Mapping[str, int]
    """Number of accelerators by published name."""
    records: ExitRecords
    options: Namespace
    """The options of `options_of` and the command's own."""

    @property
    def slo_s(self) -> float:
        return float(self.options.slo_s * self.options.time_scale)

    @property
    def thresholds(self) -> dict[int, float]:
        """The same entropy at every ramp, as in E3."""
        return dict.fromkeys(self.records.ramps, ENTROPY)

    @property
    def policy(self) -> PolicySpec:
        records = str((FOLDER / RECORDS_FILE).resolve())
        return PolicySpec(name="recorded", thresholds=self.thresholds, records=records)

    @property
    def problem(self) -> PlanProblem:
        """The planning problem of this cluster, with the survival of the records."""
        published = read_problem(PROBLEMS / "bert_base_hetero.yaml").problem
        problem = with_batch_limit(stretched(published, SLOWER * self.options.time_scale), BATCH_LIMIT)
        return replace(
            problem,
            survival_N=self.records.outcome(self.thresholds).survival,
            latency={f"emulated:{name}": problem.latency[name] for name in self.counts},
            devices={
                f"emulated:{name}": Supply(count=count, usd_per_hour=problem.devices[name].usd_per_hour)
                for name, count in self.counts.items()
            },
            link=Link(bandwidth_bytes_per_s=ENDLESS_BYTES_PER_S, delay_s=HOP_S),
            slo=Slo(latency_s=self.slo_s, slack=problem.slo.slack),
        )

    def settings(self, plan: Plan) -> ServeSettings:
        """Returns the settings of a service that follows `plan`."""
        problem = self.problem
        return ServeSettings(
            model=str(FOLDER.resolve()),
            plan=plan,
            emulated={
                device: EmulatedSettings(**table.document(as_measured=False))
                for device, table in problem.latency.items()
            },
            slo_s=self.slo_s,
            probe_share=0.0,
            slack=problem.slo.slack,
        )

    def best(self, name: str) -> Plan:
        """Returns the plan of a strategy that scores best on the records.

        `name` is a strategy, or `best:3` for plans of three chains. Each chain is then on one accelerator type, because
        one chain over all types is as good if networks cost nothing. The plan carries the figures that the joint
        records predict, and admission starts from them. It has a policy even without active ramps, because the policy
        determines the answers. Raises DataError if the best plan has fewer chains.
        """
        strategy, _, chains = name.partition(":")
        num_chains, space = int(chains or 1), SPACES[cast(Strategy, strategy)]
        problem, reach = replace(self.problem, most_chains=num_chains), joint_reach(self.records, self.thresholds)
        decision = solve(problem, replace(space, several_stages=False) if num_chains > 1 else space)
        assert not isinstance(decision, NoPlan), decision.binding
        stages = rescore(problem, decision, reach).planned.stages
        if len(chains_of(stages)) != num_chains:
            raise DataError(f"the best plan has fewer than {num_chains} chains: {stages}")
        expected = evaluate(problem, stages, reach)
        predicted = {"rate_per_s": expected.rate_per_s, "latency_s": expected.latency_s}
        return Plan(stages=stages, shares=expected.shares, policy=self.policy, predicted=predicted)


# A load on a live service.


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """A load and the outcome of every request; times are seconds after the start."""

    seconds: float
    keys: tuple[str, ...]
    """Sample ids, sent in turn."""
    records: tuple[RequestRecord, ...]
    """Requests in the order in which they were due."""
    machine: float
    """Share of the machine's processors that was busy."""

    def sample_ids(self, record: RequestRecord) -> list[str]:
        """Returns the sample ids of a request's inputs."""
        return [self.keys[index] for index in record.input_indices]


async def drive(setup: Bench, url: str, rate_per_s: float, seconds: float, *, slo_s: float) -> Driven:
    """Sends Poisson arrivals at a rate of inputs per second; returns when every request has its outcome."""
    process, seed = Poisson(rate_per_s=rate_per_s / INPUTS_PER_REQUEST), setup.options.seed
    times_s = process.draw(seconds, np.random.default_rng(seed)).tolist()
    rows_N = np.random.default_rng(seed).integers(len(setup.records), size=NUM_DRAWN)
    keys = tuple(setup.records.sample_ids[row] for row in rows_N)
    config = LoadConfig(
        url=url,
        inputs=(TEXT,) * len(keys),
        keys=keys,
        send_times_s=times_s,
        inputs_per_request=INPUTS_PER_REQUEST,
        timeout_s=4 * slo_s,
        seed=seed,
    )
    psutil.cpu_percent()
    records = await run_load(config)
    return Driven(seconds=seconds, keys=keys, records=records, machine=psutil.cpu_percent() / 100)


def possible_answers(records: ExitRecords, plan: Plan) -> dict[str, set[tuple[int, str]]]:
    """Returns the possible answers of each input, as exit and label: one for each chain of the plan."""
    answers_of = defaultdict(set)
    for chain in plan.chains:
        outcome = records.outcome(active_thresholds(chain))
        assert outcome.answers_N is not None, "records of answers"
        for sample_id, left, answer in zip(records.sample_ids, outcome.exits_N, outcome.answers_N, strict=True):
            answers_of[sample_id].add((int(left), LABELS[answer]))
    return answers_of


def is_right(sample_ids: Sequence[str], record: RequestRecord, answers_of: Mapping[str, set[tuple[int, str]]]) -> bool:
    """Returns whether every input of a request got one of its possible answers."""
    answers = [(each.exit, each.label) for each in record.predictions]
    if len(sample_ids) != len(answers):
        return False
    return all(answer in answers_of[key] for key, answer in zip(sample_ids, answers, strict=True))


def active_thresholds(plan: Plan) -> dict[int, float]:
    """Returns the thresholds of the active ramps."""
    given = None if plan.policy is None else plan.policy.thresholds
    return {ramp: given[ramp] for ramp in plan.ramps} if isinstance(given, Mapping) else {}


# The comparison.


def run(setup: Bench) -> list[dict[str, Any]]:
    """Runs every plan under every load, each on its own service; simulates each run and compares."""
    rows = []
    for name in setup.options.plans.split(","):
        plan = setup.best(name)
        print(f"{name}: {describe_plan(PlacedPlan(plan=plan))}, shares {plan.shares}", flush=True)
        for share in map(float, setup.options.loads.split(",")):
            rate_per_s = share * plan.predicted["rate_per_s"]
            seconds = WARM_SLOS * setup.slo_s + setup.options.requests * INPUTS_PER_REQUEST / rate_per_s
            with served(setup.settings(plan), plan, LocalCluster(port=setup.options.port)) as url:
                driven = asyncio.run(drive(setup, url, rate_per_s, seconds, slo_s=setup.slo_s))
            rows.append({"run": f"{name}-{share:g}", **compare(setup.problem, plan, setup.records, driven)})
            print(rows[-1], flush=True)
    return rows


def compare(problem: PlanProblem, plan: Plan, records: ExitRecords, driven: Driven) -> dict[str, Any]:
    """Returns the figures of a run, live and simulated, and the ratio of simulated to live."""
    scheduled_s_R = np.array([record.scheduled_s for record in driven.records])
    live_s_R = np.array([record.latency_s if record.error is None else np.nan for record in driven.records])
    slo_s, until_s, answers_of = problem.slo.latency_s, driven.seconds, possible_answers(records, plan)
    live = figures(scheduled_s_R, live_s_R, slo_s, until_s)
    simulated = figures(scheduled_s_R, simulated_s(problem, plan, records, driven), slo_s, until_s)
    pairs = ((name, simulated[name], live[name]) for name in BOUNDS)
    answered = [record for record in driven.records if record.error is None]
    return {
        "planned_per_s": plan.predicted.get("rate_per_s"),
        "live": live,
        "simulated": simulated,
        "ratios": {name: ours / theirs if ours is not None and theirs else None for name, ours, theirs in pairs},
        "wrong": sum(not is_right(driven.sample_ids(record), record, answers_of) for record in answered),
        "machine": driven.machine,
    }


def figures(due_s_R: FloatArray, latency_s_R: FloatArray, slo_s: float, until_s: float) -> dict[str, float | None]:
    """Returns the figures of a run after its warm-up; the latency of a failed request is NaN.

    Goodput counts inputs by the time of their answer. The other figures count requests by their due time.
    """
    since_s, done_s_R = WARM_SLOS * slo_s, due_s_R + latency_s_R
    good_R = (since_s <= done_s_R) & (done_s_R < until_s) & (latency_s_R <= slo_s)
    counted_s = latency_s_R[due_s_R >= since_s]
    answered_s = counted_s[~np.isnan(counted_s)].tolist()
    return {
        "goodput_per_s": float(good_R.sum()) * INPUTS_PER_REQUEST / (until_s - since_s),
        "p50_s": percentile(answered_s, 50),
        "p99_s": percentile(answered_s, 99),
        "failed": float(np.isnan(counted_s).sum()),
    }


def simulated_s(problem: PlanProblem, plan: Plan, records: ExitRecords, driven: Driven) -> FloatArray:
    """Returns the simulated latency of every request; NaN if an input was dropped or its deadline had passed."""
    row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
    rows = [row_of[key] for record in driven.records for key in driven.sample_ids(record)]
    scenario = Scenario(
        problem=problem,
        plan=plan,
        decisions=recorded(records, active_thresholds(plan)),
        rows_N=np.array(rows, dtype=np.int64),
        arrivals_s=np.array([record.scheduled_s for record in driven.records]),
        duration_s=driven.seconds,
        inputs_per_request=INPUTS_PER_REQUEST,
        slo_s=problem.slo.latency_s,
        max_queued=ServeSettings.model_fields["max_queued"].default,
    )
    latency_s_R = simulate(scenario).latency_s_N.reshape(-1, INPUTS_PER_REQUEST).max(1)
    return np.where(latency_s_R <= problem.slo.latency_s, latency_s_R, np.nan)


def _print_comparison(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table, and how many figures are within the bounds."""
    columns = ["run", "planned_per_s"]
    columns += [f"{of}{name}" for name in BOUNDS for of in ("", "simulated ", "ratio of ")] + ["CPU", "failed"]
    cells = [[row["run"], row["planned_per_s"]] for row in rows]
    for of, row in zip(cells, rows, strict=True):
        of += [each[name] for name in BOUNDS for each in (row["live"], row["simulated"], row["ratios"])]
        of += [f"{row['machine']:.0%}", f"{row['live']['failed']:g}, {row['simulated']['failed']:g}"]
    print_table("live and simulated", columns, cells)
    for name, bound in BOUNDS.items():
        near = sum(abs(row["ratios"][name] - 1) <= bound for row in rows if row["ratios"][name] is not None)
        print(f"{name}: {near} of {len(rows)} within {bound:.0%}")
    print(f"requests with wrong answers: {sum(row['wrong'] for row in rows)}")


def options_of(name: str, words: str | None, *, devices: str = "V100=6", slo_s: float = 0.1) -> ArgumentParser:
    """Returns the options of a command that runs on an emulated cluster, with some defaults."""
    parser = ArgumentParser(prog=f"python -m {name}", description=words)
    parser.add_argument("--devices", default=devices, help="number of accelerators by type")
    parser.add_argument("--time-scale", type=float, default=40.0, help="real seconds of an emulated second")
    parser.add_argument("--slo-s", type=float, default=slo_s, help="SLO in emulated seconds; E3's is 0.1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    return parser


def bench(options: Namespace) -> Bench:
    """Returns the cluster and records that the options describe."""
    counts = {name: int(count) for name, _, count in (each.partition("=") for each in options.devices.split(","))}
    setup = Bench(counts=counts, records=make_model(), options=options)
    print(f"emulated {options.devices}, {options.time_scale:g} times stretched; SLO {setup.slo_s:g} s")
    return setup


def main() -> None:
    """Compares, prints and writes."""
    parser = options_of("experiments.live.validation", __doc__)
    parser.add_argument("--plans", default="stock,e3,best", help="strategies; best:3 has three chains")
    parser.add_argument("--loads", default="0.4,0.7,0.95,1.2", help="shares of a plan's predicted rate")
    parser.add_argument("--requests", type=int, default=600, help="requests per load")
    setup = bench(parser.parse_args())
    rows = run(setup)
    _print_comparison(rows)
    facts = {"emulated": True, "time_scale": setup.options.time_scale, "slo_s": setup.slo_s, "bounds": BOUNDS}
    print(f"written: {write_json(facts | {'runs': rows}, RUNS / 'live' / 'validation.json')}")


if __name__ == "__main__":
    main()
