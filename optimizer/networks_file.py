"""What a problem's file says of a chain's networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from earlyexit.data.source_file import Source
from earlyexit.errors import DataError, ModelFolderError, PlanError
from earlyexit.network.chain import Chain
from optimizer.networks import measuring
from optimizer.problem import PlanProblem
from optimizer.problem_shape import ProblemDocument
from optimizer.survival_file import Recorded
from profiles.networks import kept_of, measuring_of, survival_of
from profiles.records import ExitRecords


def with_networks_of(problem: PlanProblem, document: ProblemDocument, source: Source) -> PlanProblem:
    """The problem with its networks and what a crossing takes; raises PlanError at the line of what does not fit."""
    for name in ("networks", "crossing_s", "crossing_tokens", "network_tokens"):
        given = getattr(document, name)
        with source.said_at((name,)):
            if given and name.startswith("crossing") and not document.networks:
                raise PlanError(f"{name} is of a chain; this problem has one network")
            changed: dict[str, Any] = {name: tuple(given) if isinstance(given, list) else given}
            problem = replace(problem, **changed)
    return problem


def survival_of_networks(
    problem: PlanProblem, document: ProblemDocument, recorded: Recorded | None
) -> Mapping[tuple[int, ...], tuple[float, ...]] | None:
    """By networks used, what records say of these alone, or what is written out; None where nothing is known."""
    given = {tuple(each.networks): tuple(each.survival) for each in document.survival_of}
    if given and not problem.networks:
        raise PlanError("survival_of is of a chain; this problem has one network")
    if len(given) < len(document.survival_of):
        raise PlanError("survival_of says the same networks twice")
    if recorded is None or not problem.networks:
        return given or None
    if given:
        raise PlanError("survival_of follows from survival's exit records; leave one of the two out")
    try:
        return survival_of(recorded.records, recorded.thresholds, _chain(problem), recorded.alone)
    except (DataError, ModelFolderError) as error:
        raise PlanError(f"survival.records: {error}") from error


def with_pruning(problem: PlanProblem, records: ExitRecords) -> PlanProblem:
    """As records of pruned texts say: what is left of inputs that cross, unless the file says it, and what it takes."""
    if not problem.networks or not kept_of(records):
        return problem
    times = measuring_of(records)
    latency = {device: measuring(table, problem.networks, times) for device, table in problem.latency.items()}
    return replace(problem, latency=latency, crossing_tokens=problem.crossing_tokens or kept_of(records))


def networks_document(problem: PlanProblem) -> dict[str, Any]:
    """Plain data, of what is not as in a problem of one network."""
    document: dict[str, Any] = {}
    if problem.networks:
        document["networks"] = list(problem.networks)
    if problem.survival_of is not None:
        document["survival_of"] = [
            {"networks": list(used), "survival": list(survival_N)} for used, survival_N in problem.survival_of.items()
        ]
    if problem.crossing_s:
        document["crossing_s"] = problem.crossing_s
    for name in ("network_tokens", "crossing_tokens"):
        if getattr(problem, name):
            document[name] = list(getattr(problem, name))
    return document


def _chain(problem: PlanProblem) -> Chain:
    """For the records, which know the ends of its networks as ramps."""
    starts = (0, *problem.networks[:-1])
    lengths = tuple(end - start for start, end in zip(starts, problem.networks, strict=True))
    ramps = {*problem.ramps, *(end - 1 for end in problem.networks[:-1])}
    return Chain(names=tuple(map(str, range(len(lengths)))), lengths=lengths, ramps=tuple(sorted(ramps)))
