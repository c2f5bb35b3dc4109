"""Who leaves where in a simulation: recorded inputs by a policy, or inputs made up by the problem's survival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError, InputError
from offramp.jobs.simulated_plan import PlayedPlan
from optimizer.plan import PolicySpec, policy_of_score
from profiles.decay import check_decay_of, decay_of
from profiles.networks import check_weights
from profiles.records import ExitRecords
from profiles.records_table import read_records
from profiles.scores import SCORES
from simulator.decisions import Decisions, IntArray, nested, patient, recorded

if TYPE_CHECKING:
    from optimizer.problem_file import ProblemFile

NUM_ROWS = 100_000
"""Inputs that are drawn or made up; then they come again in the same order."""

Thresholds = float | Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs in the order in which they come."""

    decisions: Decisions
    rows_N: IntArray
    words: str
    document: Mapping[str, Any]
    """The words as plain data."""
    tokens_R: IntArray | None = None
    """Tokens per row of the decisions, where they were recorded."""
    lengths_R: IntArray | None = None
    """The same of what is simulated; None: inputs cost alike."""


def exit_inputs(
    file: ProblemFile, played: PlayedPlan, path: Path | None, thresholds: Thresholds | None, rng: np.random.Generator
) -> Inputs:
    """Inputs drawn from exit records (`path`, else those that the plan's policy or the problem names), or made up.

    Raises DataError for records of another model, InputError where it is not said, or not known, when inputs leave.
    """
    found = _find_records(path, file, played)
    if found is None:
        if thresholds is not None:
            raise InputError("--thresholds: only exit records need them; --records FILE names some")
        return _made_up(file, rng)
    name, records = found
    ramps = played.plan.ramps
    policy = _policy(file, played, records, thresholds)
    rule = _rule(name, records, policy, ramps)
    return Inputs(
        decisions=_decisions(records, policy, ramps),
        rows_N=rng.integers(len(records), size=NUM_ROWS),
        words=f"{len(records)} recorded ones of {name}, drawn at random; {rule}",
        document={"from": "records", "records": name, "recorded": len(records), "policy": rule},
        tokens_R=records.tokens_N,
    )


def _made_up(file: ProblemFile, rng: np.random.Generator) -> Inputs:
    problem = file.problem
    return Inputs(
        decisions=nested(problem.survival_N, problem.ramps, rng, num_rows=NUM_ROWS),
        rows_N=np.arange(NUM_ROWS),
        words="made up, they leave as the problem's survival says; --records FILE takes recorded ones",
        document={"from": "survival"},
    )


def _find_records(path: Path | None, file: ProblemFile, played: PlayedPlan) -> tuple[str, ExitRecords] | None:
    """Where the records come from, and they; None where nothing names any."""
    named = played.policy.records if played.policy is not None else None
    if path is None and named is not None:
        path = Path(named)
    if path is None:
        return None if file.records is None else ("the problem's exit records", file.records)
    records = read_records(path)
    num_blocks, ramps = file.problem.num_blocks, played.plan.ramps
    if records.num_blocks != num_blocks:
        raise DataError(f"{path}: records of a model of {records.num_blocks} blocks; the problem has {num_blocks}")
    missing = sorted(set(ramps) - set(records.ramps))
    if missing:
        raise DataError(f"{path}: no records of the plan's ramps {missing}; recorded are {list(records.ramps)}")
    return str(path), records


def _policy(
    file: ProblemFile, played: PlayedPlan, records: ExitRecords, thresholds: Thresholds | None
) -> PolicySpec | None:
    """When recorded inputs leave: by `thresholds`, else the plan's policy, else the problem's; None without ramps."""
    ramps = played.plan.ramps
    if thresholds is not None:
        of_ramps = _for_ramps(thresholds, ramps, file.problem.ramps)
        return policy_of_score(records.score, of_ramps, records.confidences, decay=decay_of(records))
    policy = played.policy or file.policy(ramps)
    if policy is None and ramps:
        raise InputError(f"ramps {list(ramps)} are active and nothing says when to leave there; give --thresholds")
    return policy if ramps else None


def _for_ramps(given: Thresholds, ramps: tuple[int, ...], known: tuple[int, ...]) -> dict[int, float]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(ramps, given)
    unknown, missing = sorted(set(given) - set(known)), sorted(set(ramps) - set(given))
    if unknown:
        raise InputError(f"--thresholds: the problem has no ramps {unknown}; its ramps are {list(known)}")
    if missing:
        raise InputError(f"--thresholds: none for the plan's ramps {missing}")
    return {ramp: given[ramp] for ramp in ramps}


def _rule(name: str, records: ExitRecords, policy: PolicySpec | None, ramps: tuple[int, ...]) -> str:
    """When inputs leave, in words; raises InputError for what scores and answers do not show."""
    if policy is None or not ramps:
        return "no ramp is active"
    if policy.name in ("voting", "own"):
        raise InputError(f"the plan leaves by {policy.name}, which exit records do not show; give --thresholds")
    if policy.name == "patience":
        return f"they leave after {policy.patience} answers in a row that repeat the one before"
    if policy.name not in ("recorded", records.score):
        raise InputError(f"the plan leaves by {policy.name}, {name} holds scores of {records.score}")
    _check_confidences(name, records, policy, ramps)
    if policy.name != "recorded":
        check_weights(records, policy.weights, name)
        check_decay_of(records, policy.decay, name)
    side = "at least" if SCORES[records.score].larger_is_surer else "at most"
    values = sorted(set(_thresholds(policy, ramps).values()))
    limits = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}, by ramp"
    return f"they leave at {'an' if records.score == 'entropy' else 'a'} {records.score} of {side} {limits}"


def _check_confidences(name: str, records: ExitRecords, policy: PolicySpec, ramps: tuple[int, ...]) -> None:
    """Refuse a plan whose shares are of values above another confidence than the recorded ones."""
    if policy.confidences is None or records.confidences is None:
        return
    for ramp, wanted in _per_ramp(policy.confidences, ramps).items():
        if wanted != records.confidences[ramp]:
            raise InputError(
                f"the plan's shares at ramp {ramp} are of values above {wanted:g}, "
                f"those of {name} of values above {records.confidences[ramp]:g}"
            )


def _decisions(records: ExitRecords, policy: PolicySpec | None, ramps: tuple[int, ...]) -> Decisions:
    if policy is None or not ramps:
        return recorded(records, {})
    if policy.patience is not None:
        return patient(records, policy.patience)
    return recorded(records, _thresholds(policy, ramps))


def _thresholds(policy: PolicySpec, ramps: tuple[int, ...]) -> dict[int, float]:
    assert policy.thresholds is not None, "only policies with thresholds are left"
    return _per_ramp(policy.thresholds, ramps)


def _per_ramp(given: float | Mapping[int, float], ramps: tuple[int, ...]) -> dict[int, float]:
    return {ramp: given[ramp] for ramp in ramps} if isinstance(given, Mapping) else dict.fromkeys(ramps, given)
