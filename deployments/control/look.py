"""What the controller notices between two plans: the stream left its forecast, or a replica is slow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.control.intake import Interval, ReplicaIntake, total
from deployments.control.outlook import Outlook
from deployments.reports import ReplicaReport
from earlyexit.split import Split
from optimizer.batch_seconds import split_seconds
from optimizer.live.reaction import expected_shares, rate_deviation, survival_deviation
from optimizer.live.stragglers import ReplicaTimes, Run, Straggler, find
from optimizer.live.trial import Delivered
from optimizer.plan import Plan
from optimizer.problem import PlanProblem
from optimizer.reach import Reach, nested_reach

RECENT_INPUTS = (100, 300, 1000)
"""Answers that are held against the forecast: the least that tell anything, so that a jump shows at once and its begin
is known, and enough for smaller ones."""
RATE_LOOKS = 4
"""Looks whose arrivals are held against the forecast rate."""
REFUSED = frozenset({"overloaded", "admission"})
"""Drops of inputs that never entered the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The stream is no longer what was expected."""

    since_s: float
    """Begin of the intervals that show it."""
    words: str


def survival_left(
    outlook: Outlook,
    plan: Plan,
    intervals: Sequence[Interval],
    reach: Reach | None,
    *,
    looks: float,
) -> Deviation | None:
    """How the last answers under a plan left the forecast; None where they did not.

    `looks`: how often it is asked until the next forecast; each has its part of the forecast's chance to err.
    """
    if not plan.ramps:
        return None
    expected = expected_shares(outlook.of(plan.used), plan.ramps, reach)
    expected = replace(expected, coverage=_strict(expected.coverage, looks * len(RECENT_INPUTS)))
    for seen in filter(None, (_last(intervals, answers) for answers in RECENT_INPUTS)):
        # As many leave the service as enter it, whatever they are, unless those inside become more or fewer.
        more_inside = abs(seen.arrived - seen.answered - sum(seen.drops.values()))
        given_up = sum(count for reason, count in seen.drops.items() if reason not in REFUSED)
        found = survival_deviation(expected, seen.exits, unknown=more_inside + given_up)
        if found is not None:
            return Deviation(since_s=seen.since_s, words=found.words)
    return None


def rate_left(
    outlook: Outlook, intervals: Sequence[Interval], sized_for_rps: float | None, *, looks: float
) -> Deviation | None:
    """The same of the rate."""
    seen = total(intervals[-RATE_LOOKS:])
    if seen is None or outlook.rate is None:
        return None
    forecast = replace(outlook.rate, coverage=_strict(outlook.rate.coverage, looks))
    found = rate_deviation(forecast, seen.arrived, seen.seconds, sized_for_rps=sized_for_rps)
    return None if found is None else Deviation(since_s=seen.since_s, words=found.words)


def _last(intervals: Sequence[Interval], answers: int) -> Interval | None:
    """As many of the last intervals as hold so many answers, as one; None where all do not."""
    for index in range(len(intervals) - 1, -1, -1):
        answers -= sum(intervals[index].exits.values())
        if answers <= 0:
            return total(intervals[index:])
    return None


def _strict(coverage: float, looks: float) -> float:
    return 1 - (1 - coverage) / max(1.0, looks)


def stragglers(
    problem: PlanProblem,
    plan: Plan,
    reports: Sequence[ReplicaReport],
    intake: ReplicaIntake,
    *,
    ratio: float,
    resting: Iterable[str],
) -> tuple[Straggler, ...]:
    """Replicas slower than their peers; `problem` is the one that the plan in force was weighed on."""
    share_N = nested_reach(problem)(plan.ramps)

    def expected(device: str, split: Split, size: float) -> float:
        return split_seconds(problem.latency[device], problem.ramps, split, share_N, size)

    times = [_times(report, intake, problem) for report in reports if report.device in problem.latency]
    return find(times, expected, ratio, resting=frozenset(resting))


def served(intervals: Sequence[Interval]) -> Delivered | None:
    """What was done over some intervals; None for none."""
    seen = total(intervals)
    if seen is None:
        return None
    return Delivered(
        seconds=seen.seconds,
        arrived=seen.arrived,
        answered=seen.answered,
        in_slo=seen.in_slo,
        dropped=sum(seen.drops.values()),
    )


def used(occupied: Mapping[str, int], devices: Mapping[str, str]) -> dict[str, int]:
    """Accelerators per type that replicas per slot take."""
    taken: dict[str, int] = {}
    for slot, replicas in occupied.items():
        taken[devices[slot]] = taken.get(devices[slot], 0) + replicas
    return taken


def _times(report: ReplicaReport, intake: ReplicaIntake, problem: PlanProblem) -> ReplicaTimes:
    """Where inputs have lengths, a batch counts as so many of the profile's inputs as hold its tokens.

    Ramps that the problem does not have take no time by it: probes run every ramp of the model.
    A batch that another ran beside took longer for it, which is not the replica's fault: it is left out.
    """
    length = None if problem.lengths is None else problem.latency[report.device].length
    runs = tuple(
        Run(
            split=Split(
                first=each.first,
                end=each.end,
                batch=each.size,
                ramps=tuple(ramp for ramp in each.ramps if ramp in problem.ramps),
                after_answer=each.after_answer,
            ),
            size=each.size if length is None else each.tokens / each.batches / length,
            batches=each.batches,
            seconds=each.seconds,
        )
        for each in intake.since_mark(report)
        if not each.shared
    )
    return ReplicaTimes(replica=report.replica, slot=report.slot, device=report.device, runs=runs)
