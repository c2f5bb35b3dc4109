"""The simulated side of the validation: a kept run in the simulator, with the same requests at the same times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from deployments.settings import ServeSettings
from earlyexit.errors import DataError
from experiments.live.load import INPUTS_PER_REQUEST, Driven
from experiments.live.validation_runs import IDLE, Run, active_thresholds, digest, stages_left
from optimizer.plan_file import parse_plan
from optimizer.problem import Link
from optimizer.problem_file import parse_problem
from profiles.records import ExitRecords
from simulator.decisions import recorded
from simulator.outcome import DROPS, Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate

ENDLESS_BYTES_PER_S = 1e15
"""What is sent between emulated accelerators has no hidden state: only the delay counts."""
MAX_QUEUED: int = ServeSettings.model_fields["max_queued"].default
LATER_S = 0.005
"""What HTTP and the machine do to a request, about, and do otherwise the next time."""
GIVEN_UP = "deadline"
"""What a service calls a request that it ended at its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What requests take beyond the accelerators' time, at idle: HTTP, calls, Python."""

    entry_s: float
    """In all, of a request that is answered by the first stage."""
    hop_s: float
    """More for every further stage."""


NO_OVERHEAD = Overhead(entry_s=0.0, hop_s=0.0)


def simulated(run: Run, records: ExitRecords, overhead: Overhead) -> Driven:
    """What becomes of the run's requests in the simulator; raises DataError where the records are others."""
    return as_driven(run, simulate(scenario_of(run, records, overhead)))


def later(run: Run, rng: np.random.Generator) -> Run:
    """The same requests, each up to `LATER_S` later."""
    late_s = np.minimum(np.array(run.scheduled_s) + rng.uniform(0, LATER_S, len(run.rows)), run.seconds)
    order = np.argsort(late_s, kind="stable").tolist()
    update = {"scheduled_s": late_s[order].tolist(), "rows": [run.rows[index] for index in order]}
    return run.model_copy(update=update)


def scenario_of(run: Run, records: ExitRecords, overhead: Overhead) -> Scenario:
    """The kept run's plan, inputs and times of arrival.

    Half of the entry's overhead is taken to come before the first stage, half after the last: from outside only their
    sum is seen.
    """
    if run.records_sha256 != digest(records):
        raise DataError(f"the run {run.name} asked inputs of other exit records than these")
    plan, problem = parse_plan(run.plan), parse_problem(run.problem).problem
    link = Link(bandwidth_bytes_per_s=ENDLESS_BYTES_PER_S, delay_s=overhead.hop_s)
    return Scenario(
        problem=replace(problem, link=link),
        plan=plan,
        decisions=recorded(records, active_thresholds(plan)),
        rows_N=np.array(run.rows, dtype=np.int64).reshape(-1),
        arrivals_s=np.array(run.scheduled_s),
        duration_s=run.seconds,
        inputs_per_request=INPUTS_PER_REQUEST,
        slo_s=run.slo_s,
        warm_up_s=run.warm_s,
        entry_s=overhead.entry_s / 2,
        answer_s=overhead.entry_s / 2,
        max_queued=MAX_QUEUED,
    )


def as_driven(run: Run, outcome: Outcome) -> Driven:
    """Requests as the client of a service sees them: whole or failed, and failed where the deadline has passed."""
    parts = (outcome.latency_s_N, outcome.drop_N, outcome.exit_N)
    done_s: list[float] = []
    errors: list[str | None] = []
    exits: list[list[int]] = []
    whole = zip(*(part.reshape(-1, INPUTS_PER_REQUEST).tolist() for part in parts), strict=True)
    for scheduled_s, (latencies_s, drops, left) in zip(run.scheduled_s, whole, strict=True):
        error = _error(latencies_s, drops, run.slo_s)
        errors.append(error)
        exits.append([] if error else left)
        done_s.append(scheduled_s + (0.0 if error else max(latencies_s)))
    update = {"sent_s": run.scheduled_s, "done_s": done_s, "errors": errors, "exits": exits}
    return run.model_copy(update=update).driven()


def _error(latencies_s: list[float], drops: list[int], slo_s: float) -> str | None:
    dropped = next((drop for drop in drops if drop >= 0), None)
    if dropped is not None:
        return DROPS[dropped]
    return GIVEN_UP if max(latencies_s) > slo_s else None


def overhead_of(idle: Run, records: ExitRecords) -> Overhead:
    """From the run with one request at a time: what its requests took beyond a simulation in which calls cost nothing.

    Medians by the stage that answers a request, and the line through them. Raises DataError for a run that is not
    idle, or that failed.
    """
    if idle.load != IDLE:
        raise DataError(f"overhead is taken from an idle run, not from {idle.name}")
    if any(error is not None for error in idle.errors):
        raise DataError(f"requests of the idle run {idle.name} failed")
    pairs = zip(idle.driven().records, simulated(idle, records, NO_OVERHEAD).records, strict=True)
    beyond_s = np.array([live.latency_s - bare.latency_s for live, bare in pairs])
    stages = stages_left(parse_plan(idle.plan), np.array([max(exits) for exits in idle.exits]))
    reached = np.unique(stages)
    medians_s = [float(np.median(beyond_s[stages == stage])) for stage in reached]
    if len(reached) == 1:
        return Overhead(entry_s=max(0.0, medians_s[0]), hop_s=0.0)
    hop_s, entry_s = np.polyfit(reached, medians_s, 1)
    return Overhead(entry_s=max(0.0, float(entry_s)), hop_s=max(0.0, float(hop_s)))
