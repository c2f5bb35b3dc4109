"""`offramp simulate`: draws inputs and arrivals, simulates a plan under load, and prints the result."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import typer
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from rich.table import Table

from deployments.settings import ServeSettings
from earlyexit.data.source_file import read_source
from earlyexit.errors import DataError, InputError, PlanError, raising
from offramp.commands.options import SimulateJob
from offramp.commands.output import make_table, milliseconds, milliseconds_text, print_result, progress_bars, provenance
from offramp.commands.plan import NO_PLAN, answer
from offramp.load.arrivals import MAX_ARRIVALS, parse_arrivals
from offramp.load.sustained import percentile
from optimizer.calibration.calibration_file import check_policy, policy_of_records, read_calibration_file
from optimizer.cost.evaluate import Evaluation, evaluate, violations
from optimizer.cost.explain import no_plan_text
from optimizer.plans.plan import Plan, PolicySpec
from optimizer.plans.plan_file import ModelShape, PlanDocument, build_plan, plan_document, policy_document
from optimizer.problems.entries import tokens_of
from optimizer.problems.networks import survival_with
from optimizer.problems.problem import PlanProblem, nested_shares
from optimizer.problems.problem_file import ProblemFile, read_problem
from optimizer.problems.tokens import in_tokens
from optimizer.search.decision import NoPlan
from profiles.lengths import Lengths
from profiles.records import ExitRecords
from profiles.records_table import read_records
from profiles.scores import SCORES, FloatArray
from simulator.inputs import Decisions, IntArray, nested, patient, recorded, truncated_normal
from simulator.outcome import DROPS, Figures, Outcome
from simulator.scenario import Scenario, SequenceLengths
from simulator.simulate import PlayedSequences, Progress, generate, simulate

SAME_RATE = 0.01
"""Relative difference between the rate in a plan file and that by the problem above which a note reports it."""
NO_POLICY = PolicySpec(name="entropy", thresholds=0.0)
"""Policy of plans with active ramps and no policy. The simulator does not read it: inputs leave by their decisions."""


def plan_of_file(path: Path, problem: PlanProblem) -> Plan:
    """Reads a plan file, or the output of `offramp plan --json`; raises PlanError if it does not fit the problem."""
    source = read_source(path, PlanError)
    shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=problem.networks)
    found = source.document if isinstance(source.document, Mapping) else {}
    if "no_plan" in found:
        raise PlanError(f"{path}: contains the answer that there is no plan")
    if "stage_figures" not in found:  # which is in the output of `offramp plan --json` alone
        return build_plan(source, shape)
    predicted = {key: found[key] for key in ("rate_per_s", "latency_s", "usd_per_hour") if key in found}
    fields = {key: found[key] for key in PlanDocument.model_fields if key in found}
    fields |= {"predicted": predicted, "policy": policy_document(NO_POLICY)}
    return replace(build_plan(replace(source, document=fields), shape), policy=NO_POLICY)


Thresholds = float | Mapping[int, float] | PolicySpec
"""One for all ramps, one per ramp, or the thresholds of a calibration."""


def parse_thresholds(text: str) -> Thresholds:
    """Parses `--thresholds`: one number, one per ramp such as 0=0.4,3=0.2, or a calibration file; raises InputError."""
    if text.endswith(".json"):
        return read_calibration_file(Path(text)).policy_spec()
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


def draw_inputs(
    job: SimulateJob, file: ProblemFile, plan: Plan, thresholds: Thresholds | None
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Returns inputs as fields of the scenario, with a description of them as text and as JSON data.

    They are drawn from exit records (those of the job, the plan or the problem), or by survival. Raises DataError for
    records of another model, and InputError if there are no thresholds, or unknown ones.
    """
    rng, named_records = np.random.default_rng([job.seed, 1]), _find_records(job.records, file, plan)
    if named_records is None:
        if thresholds is not None:
            raise InputError("--thresholds goes with exit records: add --records FILE")
        if file.problem.survival_of is not None and not _is_alike(plan):
            raise InputError("the chains use different networks, whose survival differs: add --records FILE")
        survival_N = survival_with(file.problem, plan.used)
        decisions: Decisions = nested(survival_N, file.problem.ramps, rng, num_rows=NUM_ROWS)
        rows_N, tokens_R = np.arange(NUM_ROWS), None
        description = "random, they leave according to the problem's survival; --records FILE uses recorded ones"
        document: dict[str, Any] = {"from": "survival"}
    else:
        name, records = named_records
        decisions, rule = _exit_decisions(name, records, file, plan, thresholds)
        rows_N, tokens_R = rng.integers(len(records), size=NUM_ROWS), records.tokens_N
        description = f"{len(records)} recorded ones of {name}, drawn at random; {rule}"
        document = {"from": "records", "records": name, "recorded": len(records), "policy": rule}
    fields: dict[str, Any] = {"decisions": decisions, "rows_N": rows_N}
    if file.problem.lengths is not None:
        fields["lengths_R"], text = _row_lengths(job, file.problem.lengths, decisions.num_rows, tokens_R)
        description, document = f"{description}; lengths: {text}", document | {"lengths": text}
    return fields, description, document


def _find_records(path: Path | None, file: ProblemFile, plan: Plan) -> tuple[str, ExitRecords] | None:
    """Returns the name of the exit records, and the records; None if there are none."""
    named = path or (None if plan.policy is None else plan.policy.records)
    if named is None:
        return None if file.recorded is None else ("the problem's exit records", file.recorded.records)
    path, num_blocks, ramps = Path(named), file.problem.num_blocks, plan.ramps
    records = read_records(path)
    if records.num_blocks != num_blocks:
        raise DataError(f"{path}: records of a model with {records.num_blocks} blocks; the problem has {num_blocks}")
    if missing := sorted(set(ramps) - set(records.ramps)):
        raise DataError(f"{path}: no records of the plan's ramps {missing}; recorded are {list(records.ramps)}")
    return str(path), records


def _exit_decisions(
    name: str, records: ExitRecords, file: ProblemFile, plan: Plan, thresholds: Thresholds | None
) -> tuple[Decisions, str]:
    """Returns the exits of recorded inputs, by `thresholds`, else the plan's policy, else the problem's; and a text.

    Raises InputError for missing or unknown thresholds, and for a policy that needs more than records.
    """
    ramps, policy = plan.ramps, None if plan.policy is NO_POLICY else plan.policy
    if thresholds is not None:
        known, given = file.problem.ramps, _per_ramp(thresholds, ramps)
        if unknown := sorted(set(given) - set(known)):
            raise InputError(f"--thresholds: the problem has no ramps {unknown}; its ramps are {list(known)}")
        if missing := sorted(set(ramps) - set(given)):
            raise InputError(f"--thresholds: none for the plan's ramps {missing}")
        if isinstance(thresholds, PolicySpec):
            check_policy(thresholds, "the calibration", records, name, ramps)
        policy = policy_of_records(records, given)
    policy = policy or file.policy(ramps)
    if not ramps:
        return recorded(records, {}), "no ramp is active"
    if policy is None:
        raise InputError(f"ramps {list(ramps)} are active and have no thresholds; give --thresholds")
    if policy.name in ("voting", "own"):
        raise InputError(f"the plan's policy {policy.name} cannot be simulated with exit records; give --thresholds")
    if policy.patience is not None:
        rule = f"they leave after {policy.patience} answers in a row that repeat the one before"
        return patient(records, policy.patience), rule
    check_policy(policy, "the plan", records, name, ramps)
    limits = {ramp: limit for ramp, limit in _per_ramp(policy, ramps).items() if ramp in ramps}
    side = "at least" if SCORES[records.score].larger_is_surer else "at most"
    low, high = min(limits.values()), max(limits.values())
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}, by ramp"
    an = "an" if records.score == "entropy" else "a"
    return recorded(records, limits), f"they leave at {an} {records.score} of {side} {text}"


def _per_ramp(thresholds: Thresholds, ramps: tuple[int, ...]) -> Mapping[int, float]:
    if isinstance(thresholds, PolicySpec):
        assert thresholds.thresholds is not None, "policies without thresholds do not get here"
        thresholds = thresholds.thresholds
    return thresholds if isinstance(thresholds, Mapping) else dict.fromkeys(ramps, thresholds)


STREAM, SEQUENCE_STREAM = 2, 3
"""Random streams of lengths, which are independent of those of arrivals and exits."""
NUM_SEQUENCES = 20_000
"""Number of sequences with drawn lengths, which are then repeated in the same order."""
CHUNK: int = ServeSettings.model_fields["prompt_chunk"].default
TIMEOUT_S: float = ServeSettings.model_fields["max_timeout_s"].default
NORMAL = TypeAdapter(tuple[FiniteFloat, FiniteFloat, int, int])
"""Mean, variance, lowest and highest value of `--lengths`."""


def with_lengths(file: ProblemFile, job: SimulateJob) -> ProblemFile:
    """Returns the problem with the lengths of `--lengths`, which are read from a file or drawn.

    Raises InputError for invalid lengths, and if the problem's latencies do not cover them.
    """
    text = job.lengths
    if text is None:
        return file
    try:
        with raising(InputError, f"--lengths {text}", PlanError, DataError):
            if "," in text:
                mean, variance, low, high = NORMAL.validate_python(text.split(","))
                tokens_N = truncated_normal(NUM_ROWS, mean=mean, variance=variance, low=low, high=high, seed=job.seed)
            else:
                tokens_N = tokens_of(Path(text))
            problem = replace(file.problem, lengths=Lengths.of(tokens_N.tolist()), batches=None)
            in_tokens(problem)
    except ValidationError as error:
        raise InputError(
            f"--lengths {text!r}: it must be a file, or mean,variance,low,high, four finite numbers, of which low and "
            "high are whole"
        ) from error
    return replace(file, problem=problem)


def _row_lengths(job: SimulateJob, lengths: Lengths, num_rows: int, tokens_R: IntArray | None) -> tuple[IntArray, str]:
    """Returns the lengths of all rows, the recorded ones or else those of the job or the problem, and a description."""
    if tokens_R is None or job.lengths is not None:
        tokens_R = np.resize(_drawn(lengths, num_rows, np.random.default_rng([job.seed, STREAM])), num_rows)
        origin = "the problem's" if job.lengths is None else f"--lengths {job.lengths}"
    else:
        origin = "as recorded"
    return tokens_R.astype(np.int64), f"{origin}, {tokens_R.mean():.4g} tokens on average"


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


def requests_of(problem: PlanProblem, job: SimulateJob) -> dict[str, Any]:
    """Returns the requests as fields of the scenario: inputs with an SLO, or the sequences of a decoder."""
    generation = problem.generation
    if generation is None:
        return {"problem": problem, "slo_s": problem.slo.latency_s}
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
    return {"problem": replace(problem, latency=latency), "sequences": lengths}


def _drawn(lengths: Lengths, number: int, rng: np.random.Generator) -> IntArray:
    """Returns lengths drawn by their shares, or the mean (1 value) if shares are unknown."""
    if lengths.shares is None:
        return np.full(1, max(1, round(lengths.mean)))
    values, shares = zip(*lengths.shares, strict=True)
    return rng.choice(values, number, p=np.array(shares) / sum(shares)).astype(np.int64)


def prepare(job: SimulateJob) -> tuple[Scenario, Evaluation, dict[str, Any]]:
    """Reads the files of a job, plans if necessary, and draws inputs and arrivals; raises InputError.

    Returns the scenario, the cost model's prediction with the problem's survival, and both as JSON data with notes.
    Without a plan, prints the reason and raises typer.Exit.
    """
    thresholds = None if job.thresholds is None else parse_thresholds(job.thresholds)
    read = read_problem(job.problem)
    check_sequences(job, read.problem)
    file = with_lengths(read, job)
    process, arrival_notes = parse_arrivals(job.arrivals)
    strategy = job.strategy or "best"
    if job.plan is not None:
        plan = plan_of_file(job.plan, file.problem)
    else:  # exit records may prefer the plan of another strategy as the best
        result = answer(file, strategy, compared=None if strategy == "best" and file.recorded else ())
        if isinstance(result.decision, NoPlan):
            print(no_plan_text(file.problem, result.decision), file=sys.stderr)
            raise typer.Exit(NO_PLAN)
        plan = result.plan(NO_POLICY)
        plan = replace(plan, policy=file.policy(plan.ramps) or NO_POLICY)
    if job.overlap_below is not None:
        plan = plan.with_splits(overlap_below=job.overlap_below)
    plan = replace(plan, order=job.order or plan.order)
    source = f"the planner's, {strategy}" if job.plan is None else str(job.plan)
    fields, description, inputs = draw_inputs(job, file, plan, thresholds)
    with raising(PlanError, source, PlanError):  # a plan that does not fit is refused before arrivals are drawn
        predicted = evaluate(file.problem, plan.stages, shares=plan.shares)
        scenario = Scenario(
            plan=plan,
            **requests_of(file.problem, job),
            **fields,
            **job.model_dump(include={"duration_s", "warm_up_s", "inputs_per_request", "admission", "num_ingresses"}),
            arrivals_s=np.empty(0),
        )
    arrivals_s = process.draw(job.duration_s, np.random.default_rng(job.seed))  # as `offramp bench` draws them
    _check_arrivals(job, arrivals_s)
    scenario = replace(scenario, arrivals_s=arrivals_s)
    notes = [f"inputs: {description}", *arrival_notes, *_plan_notes(file.problem, plan, predicted)]
    return scenario, predicted, _document(job, scenario, predicted, source, inputs) | {"notes": notes}


def _check_arrivals(job: SimulateJob, arrivals_s: FloatArray) -> None:
    if not len(arrivals_s):
        raise InputError(f"--arrivals {job.arrivals}: no request arrives in {job.duration_s:g} s")
    if arrivals_s[-1] < job.warm_up_s:
        raise InputError(f"--arrivals {job.arrivals}: no request arrives after the {job.warm_up_s:g} s of --warm-up")
    num_inputs = len(arrivals_s) * job.inputs_per_request
    if num_inputs > MAX_ARRIVALS:  # a simulation of that many takes hours and several GB
        raise InputError(
            f"{num_inputs:,} inputs, {len(arrivals_s):,} requests of {job.inputs_per_request:,}; at most "
            f"{MAX_ARRIVALS:,} are allowed: lower the rate or the duration"
        )


def _plan_notes(problem: PlanProblem, plan: Plan, predicted: Evaluation) -> list[str]:
    """Returns notes on differences between the plan and the problem's figures."""
    broken = violations(problem, plan.stages, predicted)
    notes = [f"by the problem's figures, the plan breaks a promise: {'; '.join(broken)}"] if broken else []
    if problem.ingress is not None:
        notes.append(f"simulated ingresses take no time; by the problem's figures, {problem.ingress.words}")
    planned_per_s, per_s = plan.predicted.get("rate_per_s"), predicted.rate_per_s
    if planned_per_s is not None and abs(planned_per_s / per_s - 1) > SAME_RATE:
        notes.append(f"the plan file predicts {planned_per_s:.1f}/s; by the problem's figures it is {per_s:.1f}/s")
    return notes


def _simulated(scenario: Scenario, progress: Progress) -> dict[str, Any] | None:
    """Simulates, and returns the result as JSON data.

    After an interrupt (Ctrl-C), returns the result so far, or None during the warm-up.
    """
    outcome = simulate(scenario, progress=progress)
    figures = partial_figures(outcome) if outcome.interrupted else outcome.figures()
    if figures is None:
        return None
    simulated = figures.document()
    if scenario.plan.networks and _is_alike(scenario.plan):
        simulated["networks"] = list(_network_figures(scenario.plan, figures.exits))
    return {"interrupted": figures.interrupted, "simulated": simulated}


def _is_alike(plan: Plan) -> bool:
    """Whether all chains use the same networks. Otherwise an answer does not show which networks its input reached."""
    return all(chain.used == plan.used for chain in plan.chains)


def _network_figures(plan: Plan, exits: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each network of a cascade. `exits`: answers, by the block after which inputs left."""
    for number, (first, end) in enumerate(pairwise((0, *plan.networks))):
        is_used = number in plan.used
        # Inputs that were answered in this network or a later one reached it.
        reached = sum(count for block, count in exits.items() if block >= first) if is_used else 0
        answers = sum(count for block, count in exits.items() if first <= block < end)
        yield {"first": first, "end": end, "used": is_used, "reached": reached, "answers": answers}


def simulated_sequences(scenario: Scenario, progress: Progress) -> dict[str, Any] | None:
    """Simulates sequences as `_simulated` simulates inputs. Without any token, returns None after an interrupt."""
    played = generate(scenario, progress=progress)
    if not played.tokens_K.any() or (played.interrupted and played.ended_s <= scenario.warm_up_s):
        return None
    simulated = _sequence_figures(scenario, played) | {"exits": dict(played.exits)}
    return {"interrupted": played.interrupted, "simulated": simulated}


def _sequence_figures(scenario: Scenario, played: PlayedSequences) -> dict[str, Any]:
    """Returns figures of the sequences that arrived after the warm-up. Unknown times are None."""
    lengths, generation = scenario.sequences, scenario.problem.generation
    assert lengths is not None
    assert generation is not None
    counted_K = scenario.arrivals_s >= scenario.warm_up_s
    whole_K = counted_K & (played.tokens_K == np.resize(lengths.answer_K, len(counted_K)))
    ttft_slo_s = math.inf if generation.ttft_s is None else generation.ttft_s
    # The time per token of a sequence with a single token is NaN.
    in_slo_K = whole_K & (played.ttft_s_K <= ttft_slo_s) & ~(played.tpot_s_K > scenario.problem.slo.latency_s)
    seconds = played.ended_s - scenario.warm_up_s  # until the last token of all sequences
    times_K = {"ttft": played.ttft_s_K[counted_K], "tpot": played.tpot_s_K[counted_K]}
    return {
        "sequences": int(counted_K.sum()),
        "whole": int(whole_K.sum()),
        "in_slo": int(in_slo_K.sum()),
        "refused": int((counted_K & (played.tokens_K == 0)).sum()),
        "seconds": seconds,
        "tokens_per_s": float(played.tokens_K[counted_K].sum()) / seconds,
        "goodput_per_s": float(in_slo_K.sum()) / seconds,
        **{f"{name}_p{share}_s": percentile(of_K, share) for name, of_K in times_K.items() for share in (50, 99)},
    }


def partial_figures(outcome: Outcome) -> Figures | None:
    """Returns figures of an interrupted simulation, until the last request with a known outcome; None without any.

    Earlier requests without an outcome count as unanswered, and later ones are left out.
    """
    known_N = np.flatnonzero((outcome.exit_N >= 0) | (outcome.drop_N != DROPS.index("unanswered")))
    if not len(known_N):
        return None
    until_s = float(outcome.arrived_s_R[known_N[-1] // outcome.inputs_per_request])
    return None if until_s <= outcome.warm_up_s else outcome.figures_between(outcome.warm_up_s, until_s)


def _document(
    job: SimulateJob, scenario: Scenario, predicted: Evaluation, source: str, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what is simulated as JSON data. Equal jobs give equal bytes on the same machine and commit.

    `source`: where the plan comes from. `inputs`: a description of the inputs.
    """
    problem, plan = scenario.problem, scenario.plan
    without_policy = {"policy": None} if plan.policy is NO_POLICY else {}
    sequences = predicted.sequences and asdict(predicted.sequences)
    exits = dict.fromkeys((*plan.ramps, problem.num_blocks - 1), 0.0)
    for share, chain in zip(plan.shares, plan.chains, strict=True):
        reach_N = [*nested_shares(survival_with(problem, chain.used), chain.ramps), 0.0]
        for block in (*chain.ramps, problem.num_blocks - 1):
            exits[block] += share * (reach_N[block] - reach_N[block + 1])
    return {
        "schema_version": 1,
        "interrupted": False,
        "problem": str(job.problem),
        "plan": {"from": source, **plan_document(plan), **without_policy},
        "arrivals": {
            "spec": job.arrivals,
            "requests": len(scenario.arrivals_s),
            "inputs_per_request": job.inputs_per_request,
            "duration_s": job.duration_s,
            "warm_up_s": job.warm_up_s,
        },
        "inputs": dict(inputs),
        "slo_s": problem.slo.latency_s,
        "admission": job.admission,
        "ingresses": job.num_ingresses,
        "seed": job.seed,
        "predicted": {
            "rate_per_s": predicted.rate_per_s,
            "latency_s": predicted.latency_s if math.isfinite(predicted.latency_s) else None,
            "usd_per_hour": predicted.usd_per_hour,
            "exits": exits,
            "splits": [
                {"first": each.split.first, "end": each.split.end, "seconds": each.seconds.mean_s}
                for each in predicted.splits
            ],
        },
        **({"predicted_sequences": sequences} if sequences else {}),
    }


INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the signal's number, as in shells."""


def run(job: SimulateJob) -> None:
    """Simulates, and prints the result, or after an interrupt the result so far."""
    results = None
    try:
        scenario, predicted, document = prepare(job)
        play = _simulated if scenario.sequences is None else simulated_sequences
        total_s = math.ceil(job.duration_s)
        with progress_bars(transient=True) as progress:
            results = play(scenario, lambda share: progress("simulated s", int(share * total_s), total_s))
    except KeyboardInterrupt:
        pass  # interrupted before the simulation
    if results is None:
        print("interrupted before there was a result", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    notes, offered_per_s = document.pop("notes"), results["simulated"].get("offered_per_s", 0.0)
    if offered_per_s > predicted.rate_per_s:
        load = f"the load of {offered_per_s:.1f} inputs/s exceeds the plan's {predicted.rate_per_s:.1f}/s"
        notes.append(f"{load}: some inputs are dropped or late")
    document |= results | {"notes": notes}
    document["provenance"] = {name: value for name, value in provenance().items() if name != "created_at"}
    make_tables = partial(_tables, scenario, predicted) if scenario.sequences is None else _sequence_tables
    print_result(document, partial(make_tables, document), notes, as_json=job.as_json)
    if document["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _tables(scenario: Scenario, predicted: Evaluation, document: Mapping[str, Any]) -> Iterator[Table]:
    """Yields tables of stages, batches of inputs of different lengths, figures, networks of a chain, and exits."""
    simulated, planned = document["simulated"], document["predicted"]["exits"]
    yield make_table(
        *("stage", "busy", "blocks", "batch", "batches", "fill", "T ms", "planned T ms"),
        title=f"Plan ({document['plan']['from']})",
        narrow=True,
        rows=_stage_rows(scenario.plan, predicted, simulated),
    )
    if varied := [use for use in simulated["splits"] if "lengths" in use]:
        names = ("blocks", "inputs a batch", "tokens a batch", "T p50 ms", "T p99 ms", "p99/p50")
        yield make_table(*names, title="Batches", rows=map(_batch_row, varied))
    end = ", INTERRUPTED" if document["interrupted"] else ""
    title = f"Simulated, {simulated['seconds']:g} s, {simulated['inputs']} inputs{end}"
    yield make_table("", "planned", "simulated", title=title, rows=_rows(scenario.problem, predicted, document))
    if "networks" in simulated:
        table = make_table("network", "blocks", "reached by", "answers", "returned", title="Answers by network")
        for number, each in enumerate(simulated["networks"]):
            blocks = f"{each['first']}-{each['end'] - 1}{'' if each['used'] else ', left out'}"
            reached, answers = each["reached"], each["answers"]
            table.add_row(str(number), blocks, str(reached), str(answers), _share(answers, reached))
        yield table
    counts = dict.fromkeys(planned, 0) | simulated["exits"]
    exits = (
        (str(block), f"{planned.get(block, 0.0):.2%}", _share(count, simulated["answered"]), str(count))
        for block, count in sorted(counts.items())
    )
    yield make_table("after block", "planned", "simulated", "answers", title="Answers by exit", rows=exits)


def _batch_row(use: Mapping[str, Any]) -> tuple[str, ...]:
    lengths, budget = use["lengths"], use["lengths"]["budget"]
    return (
        f"{use['first']}-{use['end'] - 1}",
        f"{use['inputs'] / use['batches']:.1f}",
        f"{lengths['tokens'] / use['batches']:.0f}" + ("" if budget is None else f" of {budget}"),
        milliseconds(lengths["p50_s"]),
        milliseconds(lengths["p99_s"]),
        f"{lengths['spread']:.2f}",
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def _stage_rows(plan: Plan, predicted: Evaluation, simulated: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each split; the first of a stage also shows the stage."""
    ran = {(use["device"], use["first"], use["end"], use["batch"], use["ramps"]): use for use in simulated["splits"]}
    for each in predicted.splits:
        index, split, batch_cells = each.stage_index, each.split, ("0", "-", "-")
        stage, stage_cells = plan.stages[index], ("", "")
        if split == stage.splits[0]:
            busy = f"{simulated['slots'][index]['utilisation']:.0%}"
            stage_cells = (f"{index}: {stage.replicas} x {stage.device}", busy)
        if (use := ran.get((stage.device, split.first, split.end, split.batch, split.ramps))) is not None:
            by_tokens = use.get("lengths", {}).get("fill")  # None unless batches have a token budget
            fill = use["fill"] if by_tokens is None else by_tokens
            batch_cells = (f"{use['batches']}", f"{fill:.0%}", milliseconds(use["busy_s"] / use["batches"]))
        batch = str(split.batch) if split.tokens is None else f"{split.tokens} tokens"
        yield *stage_cells, f"{split.first}-{split.end - 1}", batch, *batch_cells, milliseconds(each.seconds.mean_s)


def _sequence_tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """Yields a table of figures of sequences, planned and simulated, and a table of tokens by exit."""
    expected, simulated = document["predicted_sequences"], document["simulated"]
    sequences, exits = simulated["sequences"], simulated["exits"]
    first, mean, most = (milliseconds_text(expected[name]) for name in ("ttft_s", "token_s", "most_token_s"))
    times = {name: milliseconds_text(value) for name, value in simulated.items() if name.startswith(("ttft", "tpot"))}
    rows = (
        ("tokens", f"{expected['tokens_per_s']:.1f}/s at most", f"{simulated['tokens_per_s']:.1f}/s"),
        ("within both SLOs", "", f"{simulated['in_slo']} sequences, {simulated['goodput_per_s']:.2f}/s"),
        ("first token p50", "", times["ttft_p50_s"]),
        ("first token p99", f"{first} at worst", times["ttft_p99_s"]),
        ("per token p50", f"{mean} on average", times["tpot_p50_s"]),
        ("per token p99", f"{most} at worst", times["tpot_p99_s"]),
        ("refused", "", f"{simulated['refused']} of {sequences}"),
    )
    end = ", INTERRUPTED" if document["interrupted"] else ""
    title = f"Simulated, {simulated['seconds']:.4g} s, {sequences} sequences{end}"
    yield make_table("", "planned", "simulated", title=title, rows=rows)
    by_exit = ((str(block), str(tokens), _share(tokens, sum(exits.values()))) for block, tokens in exits.items())
    yield make_table("after block", "tokens", "share", title="Tokens by exit", rows=by_exit)


def _rows(problem: PlanProblem, predicted: Evaluation, document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    simulated = document["simulated"]
    yield "offered", "", f"{simulated['offered_per_s']:.1f} inputs/s"
    within = f"within {milliseconds(document['slo_s'])} ms"
    yield "goodput", f"{predicted.rate_per_s:.1f}/s at most", f"{simulated['goodput_per_s']:.1f}/s {within}"
    if document["arrivals"]["inputs_per_request"] > 1:
        yield "goodput, whole requests", "", f"{simulated['request_goodput_per_s']:.1f} inputs/s {within}"
    yield "in time", "", f"{simulated['in_slo_share']:.2%} of inputs"
    worst = f"{milliseconds(predicted.latency_s)} ms at {predicted.served_per_s:.1f}/s"
    for name in ("p50", "p95", "p99"):
        yield f"latency {name}", worst if name == "p99" else "", milliseconds_text(simulated[f"{name}_s"])
    if not simulated["drops"]:
        yield "dropped", "", "none"
    for reason, number in simulated["drops"].items():
        yield f"dropped: {reason}", "", f"{number} ({_share(number, simulated['inputs'])})"
    yield "utilisation", "", f"{simulated['utilisation']:.1%}"
    if problem.max_usd_per_hour:
        yield "cost", f"{predicted.usd_per_hour:.2f} USD/h", f"{simulated['usd_per_hour']:.2f} USD/h"
