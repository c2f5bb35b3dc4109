"""What `offramp simulate` plays: a problem, a plan, arrivals, and inputs that are recorded or drawn by survival."""

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
from offramp.commands.options import SimulateJob, order_option
from offramp.commands.plan import NoPlanAnswer, answer, plan_of
from offramp.load.arrivals import parse_arrivals
from offramp.load.processes import MOST_ARRIVALS, FloatArray
from optimizer.calibration_file import check_policy, read_calibration_file
from optimizer.decision import Strategy, strategies_for
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
from profiles.scores import SCORES
from simulator.inputs import Decisions, IntArray, nested, patient, recorded, truncated_normal
from simulator.scenario import Scenario, SequenceLengths

MOST_INPUTS = MOST_ARRIVALS
"""Most inputs of one simulation, which takes hours and several GB."""
SAME_RATE = 0.01
"""A plan's own prediction that differs by more than this share from the problem's is reported."""
ANSWER_KEYS = ("rate_per_s", "latency_s", "usd_per_hour")
"""Keys at the top of what `offramp plan --json` prints; a plan file has them below `predicted`."""
STAND_IN = PolicySpec(name="entropy", thresholds=0.0)
"""Policy for plans without one. The simulator never reads it, since inputs leave by their decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """A plan, its policy, and its source."""

    plan: Plan
    policy: PolicySpec | None
    """The exit policy; None if the plan has active ramps and no policy."""
    words: str
    """The source of the plan."""


def planner_plan(file: ProblemFile, strategy: Strategy) -> PlayedPlan | NoPlanAnswer:
    """Returns the planner's plan for the problem."""
    # With records, for these may prefer the plan of another strategy.
    compared = () if file.recorded is None else strategies_for(file.problem)
    found = answer(file, strategy, solve, compared=compared)
    if isinstance(found, NoPlanAnswer):
        return found
    plan = plan_of(file, found.planned, STAND_IN)
    policy = file.policy(plan.ramps)
    return PlayedPlan(plan=replace(plan, policy=policy or STAND_IN), policy=policy, words=f"the planner's, {strategy}")


def plan_of_file(path: Path, problem: PlanProblem) -> PlayedPlan:
    """Returns the plan of a file, or of `offramp plan --json`; raises PlanError if it does not fit the problem."""
    document = read_source(path, PlanError).document
    shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=problem.networks)
    if isinstance(document, Mapping) and "no_plan" in document:
        raise PlanError(f"{path}: holds the answer that there is no plan")
    if isinstance(document, Mapping) and any(key in document for key in ANSWER_KEYS):  # which has no policy
        keys = ("schema_version", "stages", "chains", "after_answer", "overlap_below", "networks")
        given = {key: document[key] for key in keys if key in document}
        given["predicted"] = {key: document[key] for key in ANSWER_KEYS if key in document}
        given["policy"] = {"name": STAND_IN.name, "thresholds": STAND_IN.thresholds}
        plan, policy = parse_plan(given, shape, where=str(path)), None
    else:
        plan = read_plan(path, shape)
        policy = plan.policy
    for key in ANSWER_KEYS:  # admission reckons with these numbers; plan files may hold anything there
        value = plan.predicted.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise PlanError(f"{path}: predicted.{key}: a finite number, 0 or above, is needed, not {value!r}")
    return PlayedPlan(plan=plan, policy=policy, words=str(path))


def thresholds_option(text: str) -> float | dict[int, float]:
    """Returns the value of `--thresholds`: one number, one per ramp like 0=0.4,3=0.2, or those of a calibration.

    Raises InputError for anything else.
    """
    if text.endswith(".json"):
        return read_calibration_file(Path(text)).thresholds
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.partition("=") for part in text.split(",")]
        found = {int(ramp): float(value) for ramp, _, value in pairs}
    except ValueError as error:
        raise InputError(
            f"--thresholds {text!r}; a number, one for each ramp like 0=0.4,3=0.2, or a calibration's .json is needed"
        ) from error
    if len(found) < len(pairs):
        raise InputError(f"--thresholds {text!r}: a ramp is named twice")
    return found


NUM_ROWS = 100_000
"""Number of drawn inputs, which are then repeated in the same order."""

Thresholds = float | Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs in the order of their arrival."""

    decisions: Decisions
    rows_N: IntArray
    words: str
    document: Mapping[str, Any]
    """The same as plain data."""
    tokens_R: IntArray | None = None
    """Recorded tokens per row of the decisions; None if there are none."""
    lengths_R: IntArray | None = None
    """Simulated tokens per row; None if all inputs cost the same."""


def exit_inputs(
    file: ProblemFile, played: PlayedPlan, path: Path | None, thresholds: Thresholds | None, rng: np.random.Generator
) -> Inputs:
    """Returns inputs drawn from exit records (`path`, else those of the plan or the problem), or by survival.

    Raises DataError for records of another model, InputError where it is not said, or not known, when inputs leave.
    """
    found = _find_records(path, file, played)
    if found is None:
        if thresholds is not None:
            raise InputError("--thresholds: only exit records need them; --records FILE names some")
        return Inputs(
            decisions=nested(file.problem.survival_N, file.problem.ramps, rng, num_rows=NUM_ROWS),
            rows_N=np.arange(NUM_ROWS),
            words="made up, they leave as the problem's survival says; --records FILE takes recorded ones",
            document={"from": "survival"},
        )
    name, records = found
    ramps = played.plan.ramps
    policy = _policy(file, played, records, thresholds)
    decisions, rule = _leaving(name, records, policy, ramps)
    return Inputs(
        decisions=decisions,
        rows_N=rng.integers(len(records), size=NUM_ROWS),
        words=f"{len(records)} recorded ones of {name}, drawn at random; {rule}",
        document={"from": "records", "records": name, "recorded": len(records), "policy": rule},
        tokens_R=records.tokens_N,
    )


def _find_records(path: Path | None, file: ProblemFile, played: PlayedPlan) -> tuple[str, ExitRecords] | None:
    """Returns the source of the records, and the records; None if there are none."""
    named = played.policy.records if played.policy is not None else None
    if path is None and named is not None:
        path = Path(named)
    if path is None:
        return None if file.recorded is None else ("the problem's exit records", file.recorded.records)
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
    """Returns the policy of recorded inputs: `thresholds`, else the plan's, else the problem's; None without ramps."""
    ramps = played.plan.ramps
    if thresholds is not None:
        known, named = file.problem.ramps, thresholds if isinstance(thresholds, Mapping) else ramps
        if unknown := sorted(set(named) - set(known)):
            raise InputError(f"--thresholds: the problem has no ramps {unknown}; its ramps are {list(known)}")
        if missing := sorted(set(ramps) - set(named)):
            raise InputError(f"--thresholds: none for the plan's ramps {missing}")
        of_ramps = _per_ramp(thresholds, ramps)
        return policy_of_score(records.score, of_ramps, records.confidences, decay=decay_of(records))
    policy = played.policy or file.policy(ramps)
    if policy is None and ramps:
        raise InputError(f"ramps {list(ramps)} are active and nothing says when to leave there; give --thresholds")
    return policy if ramps else None


def _leaving(
    name: str, records: ExitRecords, policy: PolicySpec | None, ramps: tuple[int, ...]
) -> tuple[Decisions, str]:
    """Returns the decisions of inputs, also in words; raises InputError for policies that records do not show."""
    if policy is None or not ramps:
        return recorded(records, {}), "no ramp is active"
    if policy.name in ("voting", "own"):
        raise InputError(f"the plan leaves by {policy.name}, which exit records do not show; give --thresholds")
    if policy.patience is not None:
        return patient(
            records, policy.patience
        ), f"they leave after {policy.patience} answers in a row that repeat the one before"
    check_policy(policy, "the plan", records, name, ramps)
    assert policy.thresholds is not None, "only policies with thresholds are left"
    thresholds = _per_ramp(policy.thresholds, ramps)
    side = "at least" if SCORES[records.score].larger_is_surer else "at most"
    values = sorted(set(thresholds.values()))
    limits = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}, by ramp"
    an = "an" if records.score == "entropy" else "a"
    return recorded(records, thresholds), f"they leave at {an} {records.score} of {side} {limits}"


def _per_ramp(given: float | Mapping[int, float], ramps: tuple[int, ...]) -> dict[int, float]:
    return {ramp: given[ramp] for ramp in ramps} if isinstance(given, Mapping) else dict.fromkeys(ramps, given)


STREAM, SEQUENCE_STREAM = 2, 3
"""Streams of the seed, apart from those of arrivals and exits."""
NUM_SEQUENCES = 20_000
"""Number of sequences with drawn lengths, which are then repeated in the same order."""
CHUNK: int = ServeSettings.model_fields["prompt_chunk"].default
TIMEOUT_S: float = ServeSettings.model_fields["max_timeout_s"].default
FORM = "mean,variance,low,high"


GivenLengths = tuple[IntArray, str]
"""Value of `--lengths`: tokens (N), and the same in words."""


def given_lengths(text: str, seed: int) -> GivenLengths:
    """Returns a file's lengths, or drawn ones; raises InputError that names the option."""
    try:
        if "," not in text:
            tokens_N = tokens_of(Path(text))
            return tokens_N, f"{len(tokens_N)} lengths of {text}, drawn at random"
        mean, variance, low, high = _numbers(text)
        drawn_N = truncated_normal(NUM_ROWS, mean=mean, variance=variance, low=round(low), high=round(high), seed=seed)
    except DataError as error:
        raise InputError(f"--lengths {text}: {error}") from error
    return drawn_N, f"normal: mean {mean:g}, variance {variance:g}, {low:g} to {high:g}"


def with_lengths(file: ProblemFile, given: GivenLengths | None) -> ProblemFile:
    """Returns the problem with these lengths; raises InputError if its latencies are not known for them."""
    if given is None:
        return file
    try:
        problem = replace(file.problem, lengths=Lengths.of(given[0].tolist()), batches=None)
        in_tokens(problem)
    except (PlanError, DataError) as error:
        raise InputError(f"--lengths: {error}") from error
    return replace(file, problem=problem)


def lengthened(inputs: Inputs, file: ProblemFile, given: GivenLengths | None, seed: int) -> Inputs:
    """Returns the inputs with lengths: those of the option, or for a problem with lengths the recorded or its own."""
    lengths, rows = file.problem.lengths, inputs.decisions.num_rows
    if lengths is None:
        return inputs
    rng = np.random.default_rng([seed, STREAM])
    if given is not None:
        lengths_R, words = rng.choice(given[0], rows), given[1]
    elif inputs.tokens_R is not None:
        lengths_R, words = inputs.tokens_R, "as recorded"
    elif lengths.shares is None:
        lengths_R, words = np.full(rows, _drawn(lengths, 1, rng)), "the problem's mean, all alike"
    else:
        lengths_R, words = _drawn(lengths, rows, rng), "drawn from the problem's"
    said = f"{words}, {lengths_R.mean():.4g} tokens on average"
    return replace(
        inputs,
        lengths_R=lengths_R.astype(np.int64),
        words=f"{inputs.words}; lengths: {said}",
        document={**inputs.document, "lengths": said},
    )


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--lengths {text!r}; a file, or {FORM} is needed") from error
    if len(numbers) != len(FORM.split(",")) or not all(np.isfinite(numbers)):
        raise InputError(f"--lengths {text!r}; a file, or {FORM}, four finite numbers, is needed")
    if any(number != round(number) for number in numbers[2:]):
        raise InputError(f"--lengths {text!r}; low and high are whole numbers of tokens")
    return numbers


def check_sequences(job: SimulateJob, problem: PlanProblem) -> None:
    """Raises InputError for options that contradict the problem's sequences."""
    if problem.generation is None:
        return
    if job.lengths is not None:
        raise InputError("--lengths: the problem's generation says how long prompts and answers are")
    if job.inputs_per_request != 1:
        raise InputError("--inputs-per-request: a request of a model that generates is one sequence")
    for device, table in problem.latency.items():
        if table.length not in (None, 1):
            raise InputError(f"latency of {device}: measured with {table.length} tokens an input; steps have 1")


def in_sequences(scenario: Scenario, problem: PlanProblem, job: SimulateJob) -> Scenario:
    """Returns the scenario with the problem's sequences as requests, if it has any."""
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
    """Returns lengths drawn by their shares, or only the mean if shares are unknown."""
    if lengths.shares is None:
        return np.full(1, max(1, round(lengths.mean)))
    kinds, shares = zip(*lengths.shares, strict=True)
    return rng.choice(kinds, number, p=np.array(shares) / sum(shares)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Everything that a simulation needs, read and checked."""

    job: SimulateJob
    scenario: Scenario
    played: PlayedPlan
    predicted: Evaluation
    """The cost model's prediction, with the problem's survival."""
    inputs: Inputs
    notes: tuple[str, ...]


def prepare(job: SimulateJob) -> Simulation | NoPlanAnswer:
    """Reads and plans what a job names, and draws arrivals; raises InputError for a job that is wrong."""
    thresholds = None if job.thresholds is None else thresholds_option(job.thresholds)
    order = order_option(job.order)
    given = None if job.lengths is None else given_lengths(job.lengths, job.seed)
    read = read_problem(job.problem)
    check_sequences(job, read.problem)
    file = with_lengths(read, given)
    arrivals = parse_arrivals(job.arrivals)
    played = planner_plan(file, job.strategy or "best") if job.plan is None else plan_of_file(job.plan, file.problem)
    if isinstance(played, NoPlanAnswer):
        return played
    if job.overlap_below is not None:
        played = replace(played, plan=played.plan.with_splits(overlap_below=job.overlap_below))
    if order is not None:
        played = replace(played, plan=replace(played.plan, order=order))
    drawn = exit_inputs(file, played, job.records, thresholds, np.random.default_rng([job.seed, 1]))
    inputs = lengthened(drawn, file, given, job.seed)
    try:  # a plan that does not fit is refused before arrivals are drawn
        predicted = evaluate(file.problem, played.plan.stages)
        scenario = Scenario(
            problem=file.problem,
            plan=played.plan,
            decisions=inputs.decisions,
            rows_N=inputs.rows_N,
            lengths_R=inputs.lengths_R,
            arrivals_s=np.empty(0),
            duration_s=job.duration_s,
            warm_up_s=job.warm_up_s,
            inputs_per_request=job.inputs_per_request,
            slo_s=file.problem.slo.latency_s,
            admission=job.admission,
            num_ingresses=job.num_ingresses,
        )
        scenario = in_sequences(scenario, file.problem, job)
    except PlanError as error:
        raise PlanError(f"{played.words}: {error}") from error
    arrivals_s = arrivals.process.draw(job.duration_s, np.random.default_rng(job.seed))  # as `offramp bench` draws them
    _check_arrivals(job, arrivals_s)
    return Simulation(
        job=job,
        scenario=replace(scenario, arrivals_s=arrivals_s),
        played=played,
        predicted=predicted,
        inputs=inputs,
        notes=(f"inputs: {inputs.words}", *arrivals.notes, *_plan_notes(file.problem, played, predicted)),
    )


def _check_arrivals(job: SimulateJob, arrivals_s: FloatArray) -> None:
    if not len(arrivals_s):
        raise InputError(f"--arrivals {job.arrivals}: no request arrives in {job.duration_s:g} s")
    if arrivals_s[-1] < job.warm_up_s:
        raise InputError(f"--arrivals {job.arrivals}: no request arrives after the {job.warm_up_s:g} s of --warm-up")
    num_inputs = len(arrivals_s) * job.inputs_per_request
    if num_inputs > MOST_INPUTS:
        raise InputError(
            f"{num_inputs:,} inputs, {len(arrivals_s):,} requests of {job.inputs_per_request:,}; at most "
            f"{MOST_INPUTS:,} are simulated: lower the rate or the duration"
        )


def _plan_notes(problem: PlanProblem, played: PlayedPlan, predicted: Evaluation) -> tuple[str, ...]:
    """Returns notes on a plan that was made for other figures than the problem's."""
    broken = violations(problem, played.plan.stages, predicted)
    notes = (f"by the problem's figures the plan {'; '.join(broken)}",) if broken else ()
    own_per_s = played.plan.predicted.get("rate_per_s")
    if isinstance(own_per_s, float | int) and abs(own_per_s / predicted.rate_per_s - 1) > SAME_RATE:
        said = (
            f"the plan file predicts {own_per_s:.1f}/s; by the problem's figures it does {predicted.rate_per_s:.1f}/s"
        )
        return (*notes, said)
    return notes
