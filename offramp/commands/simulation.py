"""Prepares a simulation: reads problem, plan, exit records and lengths, and draws inputs and arrivals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deployments.settings import ServeSettings
from earlyexit.data.source_file import read_source
from earlyexit.errors import DataError, InputError, PlanError
from offramp.commands.options import SimulateJob, parse_order
from offramp.commands.plan import NoPlanAnswer, answer, plan_of
from offramp.load.arrivals import parse_arrivals
from offramp.load.processes import MAX_ARRIVALS
from optimizer.calibration_file import check_policy, read_calibration_file
from optimizer.decision import strategies_for
from optimizer.evaluate import Evaluation, evaluate, violations
from optimizer.lengths_file import tokens_of
from optimizer.plan import Plan, PolicySpec, policy_of_score
from optimizer.plan_file import ModelShape, parse_plan, read_plan
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import ProblemFile, read_problem
from optimizer.tokens import in_tokens
from profiles.lengths import Lengths
from profiles.networks import decay_of
from profiles.records import ExitRecords
from profiles.records_table import read_records
from profiles.scores import SCORES, FloatArray
from simulator.inputs import Decisions, IntArray, nested, patient, recorded, truncated_normal
from simulator.scenario import Scenario, SequenceLengths

MAX_INPUTS = MAX_ARRIVALS
"""Maximum number of inputs of a simulation, which then takes hours and several GB."""
SAME_RATE = 0.01
"""Relative difference between the rate in a plan file and that by the problem above which a note reports it."""
ANSWER_KEYS = ("rate_per_s", "latency_s", "usd_per_hour")
"""Keys at the top of the output of `offramp plan --json`, which a plan file has below `predicted`."""
NO_POLICY = PolicySpec(name="entropy", thresholds=0.0)
"""Policy of plans with active ramps and no policy. The simulator does not read it: inputs leave by their decisions."""


def plan_of_file(path: Path, problem: PlanProblem) -> Plan:
    """Reads a plan file, or the output of `offramp plan --json`; raises PlanError if it does not fit the problem."""
    document = read_source(path, PlanError).document
    shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=problem.networks)
    if isinstance(document, Mapping) and "no_plan" in document:
        raise PlanError(f"{path}: contains the answer that there is no plan")
    if isinstance(document, Mapping) and any(key in document for key in ANSWER_KEYS):  # `offramp plan --json`
        keys = ("schema_version", "stages", "chains", "after_answer", "overlap_below", "networks")
        plan_fields = {key: document[key] for key in keys if key in document}
        plan_fields["predicted"] = {key: document[key] for key in ANSWER_KEYS if key in document}
        plan_fields["policy"] = {"name": NO_POLICY.name, "thresholds": NO_POLICY.thresholds}
        plan = replace(parse_plan(plan_fields, shape, where=str(path)), policy=NO_POLICY)
    else:
        plan = read_plan(path, shape)
    for key in ANSWER_KEYS:  # admission control uses these numbers, which plan files do not check
        value = plan.predicted.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise PlanError(f"{path}: predicted.{key}: it must be a finite number, 0 or above, not {value!r}")
    return plan


def policy_of(plan: Plan) -> PolicySpec | None:
    """Returns the plan's policy; None if it has none."""
    return None if plan.policy is NO_POLICY else plan.policy


def parse_thresholds(text: str) -> float | dict[int, float]:
    """Parses `--thresholds`: one number, one per ramp such as 0=0.4,3=0.2, or a calibration file; raises InputError."""
    if text.endswith(".json"):
        return read_calibration_file(Path(text)).thresholds
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.partition("=") for part in text.split(",")]
        thresholds = {int(ramp): float(value) for ramp, _, value in pairs}
    except ValueError as error:
        raise InputError(
            f"--thresholds {text!r}: it must be a number, one per ramp such as 0=0.4,3=0.2, or a calibration.json"
        ) from error
    if len(thresholds) < len(pairs):
        raise InputError(f"--thresholds {text!r}: a ramp is named twice")
    return thresholds


NUM_ROWS = 100_000
"""Number of drawn inputs, which are then repeated in the same order."""

Thresholds = float | Mapping[int, float]


def draw_inputs(
    job: SimulateJob, file: ProblemFile, plan: Plan, thresholds: Thresholds | None, lengths: ParsedLengths | None
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Returns inputs as fields of the scenario, with a description of them as text and as JSON data.

    They are drawn from exit records (those of the job, the plan or the problem), or by survival. `lengths`: those of
    the job. Raises DataError for records of another model, and InputError if there are no thresholds, or unknown ones.
    """
    rng, named_records = np.random.default_rng([job.seed, 1]), _find_records(job.records, file, plan)
    if named_records is None:
        if thresholds is not None:
            raise InputError("--thresholds goes with exit records: add --records FILE")
        decisions: Decisions = nested(file.problem.survival_N, file.problem.ramps, rng, num_rows=NUM_ROWS)
        rows_N, tokens_R = np.arange(NUM_ROWS), None
        description = "random, they leave according to the problem's survival; --records FILE uses recorded ones"
        document: dict[str, Any] = {"from": "survival"}
    else:
        name, records = named_records
        decisions, rule = _exit_decisions(name, records, _policy(file, plan, records, thresholds), plan.ramps)
        rows_N, tokens_R = rng.integers(len(records), size=NUM_ROWS), records.tokens_N
        description = f"{len(records)} recorded ones of {name}, drawn at random; {rule}"
        document = {"from": "records", "records": name, "recorded": len(records), "policy": rule}
    fields: dict[str, Any] = {"decisions": decisions, "rows_N": rows_N}
    if file.problem.lengths is not None:
        fields["lengths_R"], text = _row_lengths(file.problem.lengths, decisions.num_rows, lengths, tokens_R, job.seed)
        description, document = f"{description}; lengths: {text}", document | {"lengths": text}
    return fields, description, document


def _find_records(path: Path | None, file: ProblemFile, plan: Plan) -> tuple[str, ExitRecords] | None:
    """Returns the name of the exit records, and the records; None if there are none."""
    policy = policy_of(plan)
    if path is None and policy is not None and policy.records is not None:
        path = Path(policy.records)
    if path is None:
        return None if file.recorded is None else ("the problem's exit records", file.recorded.records)
    records = read_records(path)
    num_blocks, ramps = file.problem.num_blocks, plan.ramps
    if records.num_blocks != num_blocks:
        raise DataError(f"{path}: records of a model with {records.num_blocks} blocks; the problem has {num_blocks}")
    missing = sorted(set(ramps) - set(records.ramps))
    if missing:
        raise DataError(f"{path}: no records of the plan's ramps {missing}; recorded are {list(records.ramps)}")
    return str(path), records


def _policy(file: ProblemFile, plan: Plan, records: ExitRecords, thresholds: Thresholds | None) -> PolicySpec | None:
    """Returns the policy with `thresholds`, else the plan's, else the problem's; None without active ramps."""
    ramps = plan.ramps
    if thresholds is not None:
        known, named = file.problem.ramps, thresholds if isinstance(thresholds, Mapping) else ramps
        if unknown := sorted(set(named) - set(known)):
            raise InputError(f"--thresholds: the problem has no ramps {unknown}; its ramps are {list(known)}")
        if missing := sorted(set(ramps) - set(named)):
            raise InputError(f"--thresholds: none for the plan's ramps {missing}")
        of_ramps = _per_ramp(thresholds, ramps)
        return policy_of_score(records.score, of_ramps, records.confidences, decay=decay_of(records))
    policy = policy_of(plan) or file.policy(ramps)
    if policy is None and ramps:
        raise InputError(f"ramps {list(ramps)} are active and have no thresholds; give --thresholds")
    return policy if ramps else None


def _exit_decisions(
    name: str, records: ExitRecords, policy: PolicySpec | None, ramps: tuple[int, ...]
) -> tuple[Decisions, str]:
    """Returns the exits of inputs, and a description; raises InputError for a policy that needs more than records."""
    if policy is None or not ramps:
        return recorded(records, {}), "no ramp is active"
    if policy.name in ("voting", "own"):
        raise InputError(f"the plan's policy {policy.name} cannot be simulated with exit records; give --thresholds")
    if policy.patience is not None:
        rule = f"they leave after {policy.patience} answers in a row that repeat the one before"
        return patient(records, policy.patience), rule
    check_policy(policy, "the plan", records, name, ramps)
    assert policy.thresholds is not None, "all other policies have thresholds"
    thresholds = _per_ramp(policy.thresholds, ramps)
    side = "at least" if SCORES[records.score].larger_is_surer else "at most"
    values = sorted(set(thresholds.values()))
    limits = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}, by ramp"
    an = "an" if records.score == "entropy" else "a"
    return recorded(records, thresholds), f"they leave at {an} {records.score} of {side} {limits}"


def _per_ramp(thresholds: float | Mapping[int, float], ramps: tuple[int, ...]) -> dict[int, float]:
    if isinstance(thresholds, Mapping):
        return {ramp: thresholds[ramp] for ramp in ramps}
    return dict.fromkeys(ramps, thresholds)


STREAM, SEQUENCE_STREAM = 2, 3
"""Random streams of lengths, which are independent of those of arrivals and exits."""
NUM_SEQUENCES = 20_000
"""Number of sequences with drawn lengths, which are then repeated in the same order."""
CHUNK: int = ServeSettings.model_fields["prompt_chunk"].default
TIMEOUT_S: float = ServeSettings.model_fields["max_timeout_s"].default
FORM = "mean,variance,low,high"


ParsedLengths = tuple[IntArray, str]
"""Value of `--lengths`: numbers of tokens (N), and a description."""


def parse_lengths(text: str, seed: int) -> ParsedLengths:
    """Parses `--lengths`: reads lengths from a file, or draws them; raises InputError."""
    try:
        if "," not in text:
            tokens_N = tokens_of(Path(text))
            return tokens_N, f"{len(tokens_N)} lengths of {text}, drawn at random"
        mean, variance, low, high = _numbers(text)
        drawn_N = truncated_normal(NUM_ROWS, mean=mean, variance=variance, low=round(low), high=round(high), seed=seed)
    except DataError as error:
        raise InputError(f"--lengths {text}: {error}") from error
    return drawn_N, f"normal: mean {mean:g}, variance {variance:g}, {low:g} to {high:g}"


def with_lengths(file: ProblemFile, lengths: ParsedLengths | None) -> ProblemFile:
    """Returns the problem with these lengths; raises InputError if its latencies do not cover them."""
    if lengths is None:
        return file
    try:
        problem = replace(file.problem, lengths=Lengths.of(lengths[0].tolist()), batches=None)
        in_tokens(problem)
    except (PlanError, DataError) as error:
        raise InputError(f"--lengths: {error}") from error
    return replace(file, problem=problem)


def _row_lengths(
    lengths: Lengths, num_rows: int, given: ParsedLengths | None, tokens_R: IntArray | None, seed: int
) -> tuple[IntArray, str]:
    """Returns the lengths of all rows (those `given`, the recorded ones, or the problem's), and a description."""
    rng = np.random.default_rng([seed, STREAM])
    if given is not None:
        lengths_R, origin = rng.choice(given[0], num_rows), given[1]
    elif tokens_R is not None:
        lengths_R, origin = tokens_R, "as recorded"
    elif lengths.shares is None:
        lengths_R, origin = np.full(num_rows, _drawn(lengths, 1, rng)), "the problem's mean for all"
    else:
        lengths_R, origin = _drawn(lengths, num_rows, rng), "drawn from the problem's"
    return lengths_R.astype(np.int64), f"{origin}, {lengths_R.mean():.4g} tokens on average"


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--lengths {text!r}: it must be a file, or {FORM}") from error
    if len(numbers) != len(FORM.split(",")) or not all(np.isfinite(numbers)):
        raise InputError(f"--lengths {text!r}: it must be a file, or {FORM}, four finite numbers")
    if any(number != round(number) for number in numbers[2:]):
        raise InputError(f"--lengths {text!r}: low and high must be whole numbers of tokens")
    return numbers


def check_sequences(job: SimulateJob, problem: PlanProblem) -> None:
    """Raises InputError for options that contradict the problem's sequences."""
    if problem.generation is None:
        return
    if job.lengths is not None:
        raise InputError("--lengths: the problem's generation defines the lengths of prompts and answers")
    if job.inputs_per_request != 1:
        raise InputError("--inputs-per-request: for a model that generates, each request is one sequence")
    for device, table in problem.latency.items():
        if table.length not in (None, 1):
            raise InputError(f"latency of {device}: measured with {table.length} tokens per input; decode steps have 1")


def with_sequences(scenario: Scenario, problem: PlanProblem, job: SimulateJob) -> Scenario:
    """Returns the scenario with the sequences of a problem with generation as requests."""
    generation = problem.generation
    if generation is None:
        return scenario
    rng = np.random.default_rng([job.seed, SEQUENCE_STREAM])
    if generation.recorded is not None:  # in order
        prompt_K, answer_K = np.array(generation.recorded, dtype=np.int64).T
    else:
        prompt_K, answer_K = (_drawn(each, NUM_SEQUENCES, rng) for each in (generation.prompt, generation.output))
    lengths = SequenceLengths(
        prompt_K=prompt_K,
        answer_K=answer_K,
        chunk=generation.chunk or CHUNK,
        ttft_slo_s=generation.ttft_s if job.admission else None,
        tpot_slo_s=problem.slo.latency_s if job.admission else None,
        timeout_s=TIMEOUT_S,
    )
    latency = {device: replace(table, length=1) for device, table in problem.latency.items()}
    return replace(scenario, problem=replace(problem, latency=latency), sequences=lengths, slo_s=math.inf)


def _drawn(lengths: Lengths, number: int, rng: np.random.Generator) -> IntArray:
    """Returns lengths drawn by their shares, or the mean (1 value) if shares are unknown."""
    if lengths.shares is None:
        return np.full(1, max(1, round(lengths.mean)))
    values, shares = zip(*lengths.shares, strict=True)
    return rng.choice(values, number, p=np.array(shares) / sum(shares)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """A simulation that is ready to run."""

    job: SimulateJob
    scenario: Scenario
    predicted: Evaluation
    """The cost model's prediction, with the problem's survival."""
    inputs: Mapping[str, Any]
    """A description of the inputs, as JSON data."""
    notes: tuple[str, ...]


def plan_source(job: SimulateJob) -> str:
    """Returns a description of where the plan comes from."""
    return f"the planner's, {job.strategy or 'best'}" if job.plan is None else str(job.plan)


def prepare(job: SimulateJob) -> Simulation | NoPlanAnswer:
    """Reads the files of a job, plans if necessary, and draws inputs and arrivals; raises InputError."""
    thresholds = None if job.thresholds is None else parse_thresholds(job.thresholds)
    order = parse_order(job.order)
    lengths = None if job.lengths is None else parse_lengths(job.lengths, job.seed)
    read = read_problem(job.problem)
    check_sequences(job, read.problem)
    file = with_lengths(read, lengths)
    arrivals = parse_arrivals(job.arrivals)
    if job.plan is not None:
        plan = plan_of_file(job.plan, file.problem)
    else:  # exit records may prefer the plan of another strategy
        compared = () if file.recorded is None else strategies_for(file.problem)
        result = answer(file, job.strategy or "best", solve, compared=compared)
        if isinstance(result, NoPlanAnswer):
            return result
        plan = plan_of(file, result.planned, NO_POLICY)
        plan = replace(plan, policy=file.policy(plan.ramps) or NO_POLICY)
    if job.overlap_below is not None:
        plan = plan.with_splits(overlap_below=job.overlap_below)
    if order is not None:
        plan = replace(plan, order=order)
    fields, description, document = draw_inputs(job, file, plan, thresholds, lengths)
    try:  # a plan that does not fit the problem is refused before arrivals are drawn
        predicted = evaluate(file.problem, plan.stages)
        scenario = Scenario(
            problem=file.problem,
            plan=plan,
            **fields,
            arrivals_s=np.empty(0),
            duration_s=job.duration_s,
            warm_up_s=job.warm_up_s,
            inputs_per_request=job.inputs_per_request,
            slo_s=file.problem.slo.latency_s,
            admission=job.admission,
            num_ingresses=job.num_ingresses,
        )
        scenario = with_sequences(scenario, file.problem, job)
    except PlanError as error:
        raise PlanError(f"{plan_source(job)}: {error}") from error
    arrivals_s = arrivals.process.draw(job.duration_s, np.random.default_rng(job.seed))  # as `offramp bench` draws them
    _check_arrivals(job, arrivals_s)
    return Simulation(
        job=job,
        scenario=replace(scenario, arrivals_s=arrivals_s),
        predicted=predicted,
        inputs=document,
        notes=(f"inputs: {description}", *arrivals.notes, *_plan_notes(file.problem, plan, predicted)),
    )


def _check_arrivals(job: SimulateJob, arrivals_s: FloatArray) -> None:
    if not len(arrivals_s):
        raise InputError(f"--arrivals {job.arrivals}: no request arrives in {job.duration_s:g} s")
    if arrivals_s[-1] < job.warm_up_s:
        raise InputError(f"--arrivals {job.arrivals}: no request arrives after the {job.warm_up_s:g} s of --warm-up")
    num_inputs = len(arrivals_s) * job.inputs_per_request
    if num_inputs > MAX_INPUTS:
        raise InputError(
            f"{num_inputs:,} inputs, {len(arrivals_s):,} requests of {job.inputs_per_request:,}; at most "
            f"{MAX_INPUTS:,} are allowed: lower the rate or the duration"
        )


def _plan_notes(problem: PlanProblem, plan: Plan, predicted: Evaluation) -> tuple[str, ...]:
    """Returns notes on differences between the plan and the problem's figures."""
    broken = violations(problem, plan.stages, predicted)
    notes = [f"by the problem's figures the plan {'; '.join(broken)}"] if broken else []
    planned_per_s, per_s = plan.predicted.get("rate_per_s"), predicted.rate_per_s
    if isinstance(planned_per_s, float | int) and abs(planned_per_s / per_s - 1) > SAME_RATE:
        notes.append(f"the plan file predicts {planned_per_s:.1f}/s; by the problem's figures it is {per_s:.1f}/s")
    return tuple(notes)
