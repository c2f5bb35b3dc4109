"""Planning problems as YAML or JSON. Errors name the file and the line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.data.source_file import Source, read_source
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import PlanError
from optimizer.generation.demand import Generation, KvMemory
from optimizer.plans.plan import PolicySpec, policy_of_score
from optimizer.plans.plan_file import order_of
from optimizer.problems.latency_file import latency_table
from optimizer.problems.lengths_file import lengths_document, lengths_of, stayers_length_N
from optimizer.problems.models_file import (
    as_chain,
    networks_document,
    survival_of_networks,
    with_networks_of,
    with_pruning,
)
from optimizer.problems.problem import (
    Link,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    Objective,
    PlanProblem,
    Slo,
    Supply,
)
from optimizer.problems.problem_shape import GenerationDocument, ObjectiveDocument, ProblemDocument, read_at
from optimizer.problems.survival_file import (
    Recorded,
    batches_of,
    by_calibration,
    check_survival,
    recorded_document,
    recorded_survival,
    with_recorded_batches,
    with_thresholds_of,
)
from optimizer.problems.tokens import in_tokens
from profiles.lengths import Lengths, Pairs, grouped, read_sequences
from profiles.networks import decay_of, prune_of, weights_of
from profiles.table import LatencyTable

OF_GENERATION = ("ttft_s", "fill", "copy_share", "chunk", "regroup_s", "late_head", "most_running")
"""Fields that the file's `generation` and `Generation` have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFile:
    """A planning problem, and the other contents of its file."""

    problem: PlanProblem
    recorded: Recorded | None = None
    """The exit records behind the survival, on which plans are scored again. None if survival is written out."""
    order: OrderSpec = DEFAULT
    """The order of waiting inputs. The planner does not choose it."""

    @property
    def prune(self) -> dict[int, float]:
        """By end ramp, the alpha with which words were pruned in the recorded texts."""
        return {} if self.recorded is None else prune_of(self.recorded.records)

    def policy(self, ramps: tuple[int, ...]) -> PolicySpec | None:
        """Returns the exit policy of the records for these ramps, or None without records."""
        if self.recorded is None:
            return None
        records, thresholds = self.recorded.records, {ramp: self.recorded.thresholds[ramp] for ramp in ramps}
        return policy_of_score(records.score, thresholds, records.confidences, weights_of(records), decay_of(records))


def read_problem(path: Path) -> ProblemFile:
    """Reads a problem file. Paths inside it are relative to its folder.

    Raises PlanError with the file, the line, the error and the allowed values, also for several calibrations.
    """
    source = read_source(path, PlanError)
    first, *others = by_calibration(source, path.parent)
    with source.errors_at(("survival",)):
        if others:
            raise PlanError("survival.folder has several calibrations; name one of them: {records, calibration}")
    return _build(first, path.parent)


def read_problems(path: Path) -> tuple[ProblemFile, ...]:
    """Reads a problem file once for each calibration of the model folder that `survival` names, its own first."""
    return tuple(_build(each, path.parent) for each in by_calibration(read_source(path, PlanError), path.parent))


def parse_problem(document: object, *, where: str = "problem", folder: Path = Path()) -> ProblemFile:
    """Returns the problem from plain data (parsed YAML or JSON); raises PlanError."""
    return _build(Source(document=document, where=where, raises=PlanError), folder)


def problem_document(problem: PlanProblem) -> dict[str, Any]:
    """Returns plain data that `parse_problem` reads, with all numbers written out."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "blocks": problem.num_blocks,
        "ramps": list(problem.ramps),
        "survival": list(problem.survival_N),
        "latency": {device: _table_document(table) for device, table in problem.latency.items()},
        "devices": {device: asdict(supply) for device, supply in problem.devices.items()},
        "link": asdict(problem.link),
        "bytes_per_sample": list(problem.bytes_per_sample_N),
        "slo": asdict(problem.slo),
        "objective": _objective_document(problem.objective),
    }
    if problem.budget_usd_per_hour is not None:
        document["budget"] = {"usd_per_hour": problem.budget_usd_per_hour}
    if problem.most_chains > 1:
        document["most_chains"] = problem.most_chains
    if problem.batches is not None:
        document["batches"] = recorded_document(problem.batches)
    if problem.lengths is not None:
        document["lengths"] = lengths_document(problem.lengths)
        for device, table in problem.latency.items():
            document["latency"][device] |= {"length": table.length}
    if problem.stayers_length_N is not None:
        document["stayers_length"] = list(problem.stayers_length_N)
    if problem.generation is not None:
        document["generation"] = _generation_document(problem.generation, problem.slo)
        del document["slo"]
        document["latency"] = {device: _table_of_length(table) for device, table in problem.latency.items()}
    return document | networks_document(problem)


def _generation_document(generation: Generation, slo: Slo) -> dict[str, Any]:
    kv, prefill = generation.kv, generation.prefill or {}
    return {
        "prompt_tokens": lengths_document(generation.prompt),
        "output_tokens": lengths_document(generation.output),
        "tpot_s": slo.latency_s,
        "slack": slo.slack,
        **{name: getattr(generation, name) for name in OF_GENERATION},
        **({"prefill": {device: _table_of_length(table) for device, table in prefill.items()}} if prefill else {}),
        **({} if kv is None else {"kv": asdict(kv)}),
    }


def _table_of_length(table: LatencyTable) -> dict[str, Any]:
    """Returns a table as plain data in the form of `latency`, with the length and context of its measurement."""
    context = {} if table.context is None else {"context": table.context, "context_s": table.context_s}
    return _table_document(table) | {"length": table.length} | context


def _objective_document(objective: Objective) -> dict[str, Any]:
    match objective:
        case MaximizeRate():
            return {"maximize": "rate"}
        case MinimizeCost(rate_per_s=rate_per_s, in_time=in_time):
            return {"minimize": "cost", "rate_per_s": rate_per_s, "in_time": in_time}
        case MinimizeLatency(rate_per_s=rate_per_s, ramp_budget=None):
            return {"minimize": "latency", "rate_per_s": rate_per_s}
        case MinimizeLatency(rate_per_s=rate_per_s, ramp_budget=ramp_budget):
            return {"minimize": "latency", "rate_per_s": rate_per_s, "ramp_budget": ramp_budget}


def _table_document(table: LatencyTable) -> dict[str, Any]:
    return {"batch": list(table.batches), "block_s": table.block_s_NB.tolist(), "ramp_s": table.ramp_s_EB.tolist()}


def _build(source: Source, folder: Path) -> ProblemFile:
    """Builds the problem field by field. Its checks run after each field, so that errors name the field's line."""
    source = as_chain(source, folder)
    document = source.parse(ProblemDocument, called="the problem")
    with source.errors_at(("ramps",)):
        problem = _blank(document)
    problem = with_networks_of(problem, document, source)
    recorded = recorded_survival(document.survival, problem, source, folder)
    with source.errors_at(("survival",)):
        problem = replace(problem, survival_N=_survival(document, recorded))
    with source.errors_at(("survival_of",) if document.survival_of else ("survival",)):
        problem = replace(problem, survival_of=survival_of_networks(problem, document, recorded))
    with source.errors_at(("bytes_per_sample",)):
        problem = replace(problem, bytes_per_sample_N=_bytes_per_sample(document))
    with source.errors_at(("objective",)):
        objective = objective_of(document.objective)
    problem = replace(
        problem,
        link=Link(**document.link.model_dump()),
        slo=_slo(document, source),
        objective=objective,
        budget_usd_per_hour=None if document.budget is None else document.budget.usd_per_hour,
    )
    problem = _with_devices(problem, document, source, folder)
    if recorded is not None:
        problem = with_pruning(with_thresholds_of(problem, recorded.thresholds), recorded.records)
    if document.batches is not None:
        with read_at(source, ("batches",)):
            if recorded is not None:
                raise PlanError("batches follow from survival's exit records; leave out one of the two")
            batches = batches_of(document.batches, problem.num_blocks, problem.ramps)
            check_survival(batches, problem.survival_N)
            problem = replace(problem, batches=batches)
    with source.errors_at(("order",)):
        order = order_of(document.order)
    problem = _with_lengths(problem, document, recorded, source, folder)
    if document.generation is not None:
        problem = _with_generation(problem, document.generation, source, folder)
    with source.errors_at(("most_chains",)):
        problem = _with_most_chains(problem, document.most_chains)
    if recorded is not None and problem.batches is None and problem.lengths is None and problem.generation is None:
        problem = with_recorded_batches(problem, recorded.records, recorded.thresholds)
    return ProblemFile(problem=problem, recorded=recorded, order=order)


def _with_most_chains(problem: PlanProblem, most_chains: int) -> PlanProblem:
    """Returns the problem with a number of parallel chains; raises PlanError if it allows only one."""
    single_only = problem.networks or problem.generation or isinstance(problem.objective, MinimizeLatency)
    if single_only and most_chains > 1:
        raise PlanError(
            f"most_chains must be 1 for cascades, for generation and for the least latency, not {most_chains}; "
            "several parallel chains are planned for a rate or a cost of one network"
        )
    return replace(problem, most_chains=most_chains)


def _with_lengths(
    problem: PlanProblem, document: ProblemDocument, recorded: Recorded | None, source: Source, folder: Path
) -> PlanProblem:
    """Returns the problem with the lengths of its inputs, if the file has any."""
    if document.lengths is None:
        with source.errors_at(("stayers_length",)):
            if document.stayers_length is not None:
                raise PlanError("stayers_length needs lengths: without them all inputs are equally long")
        return problem
    lengths, stayers = lengths_of(document.lengths, source, folder), document.stayers_length
    with source.errors_at(("lengths",) if stayers is None else ("stayers_length",)):
        length_N: tuple[float, ...] | None = None
        if stayers is not None:
            length_N = tuple(stayers)
        elif recorded is not None:
            length_N = stayers_length_N(recorded.records, recorded.thresholds)
        problem = replace(problem, lengths=lengths, stayers_length_N=length_N)
        in_tokens(problem)  # raises PlanError if no measured batch holds such inputs
        return problem


def _with_generation(problem: PlanProblem, document: GenerationDocument, source: Source, folder: Path) -> PlanProblem:
    """Returns the problem with the document's sequences; raises PlanError at the line of an error."""
    prompt, output, recorded = _sequence_lengths(document, source, folder)
    tables = {
        device: latency_table(
            ("generation", "prefill", device), entry, problem.num_blocks, problem.ramps, source, folder
        )
        for device, entry in (document.prefill or {}).items()
    }
    with source.errors_at(("generation", "kv")):
        kv = None if document.kv is None else KvMemory(**document.kv.model_dump())
    with source.errors_at(("generation",)):
        generation = Generation(
            prompt=prompt,
            output=output,
            recorded=recorded,
            prefill=None if document.prefill is None else tables,
            kv=kv,
            **document.model_dump(include={*OF_GENERATION}),
        )
        return replace(problem, generation=generation)


def _sequence_lengths(
    document: GenerationDocument, source: Source, folder: Path
) -> tuple[Lengths, Lengths, Pairs | None]:
    """Returns the lengths of prompts and of answers, and the recorded sequences if the file names any."""
    prompt, output = document.prompt_tokens, document.output_tokens
    if document.lengths is not None:
        with read_at(source, ("generation", "lengths")):
            if prompt is not None or output is not None:
                raise PlanError("generation.lengths replaces prompt_tokens and output_tokens; leave out one of the two")
            recorded = read_sequences(folder / document.lengths)
            prompts, answers = zip(*recorded, strict=True)
            return grouped(prompts), grouped(answers), recorded
    with source.errors_at(("generation",)):
        if prompt is None or output is None:
            raise PlanError("generation needs prompt_tokens and output_tokens, or lengths of recorded sequences")
    return (
        lengths_of(prompt, source, folder, at=("generation", "prompt_tokens")),
        lengths_of(output, source, folder, at=("generation", "output_tokens")),
        None,
    )


def _blank(document: ProblemDocument) -> PlanProblem:
    """Returns a minimal problem with these blocks and ramps. All other fields are replaced later."""
    num_ramps = len(document.ramps)
    table = LatencyTable(batches=(1,), block_s_NB=np.ones((document.blocks, 1)), ramp_s_EB=np.ones((num_ramps, 1)))
    return PlanProblem(
        num_blocks=document.blocks,
        ramps=tuple(document.ramps),
        survival_N=(1.0,) * document.blocks,
        latency={"": table},
        devices={"": Supply(count=0)},
        link=Link(bandwidth_bytes_per_s=1.0),
        bytes_per_sample_N=(0.0,) * document.blocks,
        slo=Slo(latency_s=1.0),
        objective=MaximizeRate(),
    )


def _slo(document: ProblemDocument, source: Source) -> Slo:
    """Returns the SLO of an input. For generation, it is the time per output token."""
    generation, slo = document.generation, document.slo
    with source.errors_at(("slo",)):
        if generation is None:
            if slo is None:
                raise PlanError("slo: Field required")
            return Slo(**slo.model_dump())
        if slo is not None:
            raise PlanError("slo: generation defines it by tpot_s and slack; leave out one of the two")
        return Slo(latency_s=generation.tpot_s, slack=generation.slack)


def _bytes_per_sample(document: ProblemDocument) -> tuple[float, ...]:
    sizes = document.bytes_per_sample
    if isinstance(sizes, float):
        return (sizes,) * document.blocks
    if len(sizes) not in (document.blocks, document.blocks - 1):
        raise PlanError(
            f"bytes_per_sample has {len(sizes)} values; allowed are one number, {document.blocks} (one per block) "
            f"or {document.blocks - 1} (nothing hops after the last)"
        )
    return (*sizes, *(0.0,) * (document.blocks - len(sizes)))


def objective_of(document: ObjectiveDocument, where: str = "objective") -> Objective:
    """Returns the objective; raises PlanError for contradictory fields."""
    allowed = (
        "allowed are {maximize: rate}, {minimize: cost, rate_per_s: ..., in_time: ...} and "
        "{minimize: latency, rate_per_s: ..., ramp_budget: ...}"
    )
    if (document.maximize is None) == (document.minimize is None):
        found = "neither maximize nor minimize" if document.maximize is None else "both maximize and minimize"
        raise PlanError(f"{where} has {found}; {allowed}")
    if document.ramp_budget is not None and document.minimize != "latency":
        raise PlanError(f"{where} has a ramp_budget, and does not minimize latency; {allowed}")
    if "in_time" in document.model_fields_set and document.minimize != "cost":
        raise PlanError(f"{where} has an in_time, and does not minimize cost; {allowed}")
    if document.minimize is None:
        if document.rate_per_s is not None:
            raise PlanError(f"{where} maximizes the rate and names a rate_per_s as well; {allowed}")
        return MaximizeRate()
    if document.rate_per_s is None:
        raise PlanError(f"{where} minimizes the {document.minimize} without a rate_per_s; {allowed}")
    if document.minimize == "cost":
        return MinimizeCost(rate_per_s=document.rate_per_s, in_time=document.in_time)
    return MinimizeLatency(rate_per_s=document.rate_per_s, ramp_budget=document.ramp_budget)


def _with_devices(problem: PlanProblem, document: ProblemDocument, source: Source, folder: Path) -> PlanProblem:
    """Returns the problem with its latencies and devices. Errors name the line of the entry."""
    for device, entry in document.latency.items():
        table = latency_table(("latency", device), entry, problem.num_blocks, problem.ramps, source, folder)
        with source.errors_at(("latency", device)):
            problem = replace(problem, latency={**problem.latency, device: table})
    latency = {device: problem.latency[device] for device in document.latency}
    by_cost = document.budget is not None or document.objective.minimize == "cost"
    devices: dict[str, Supply] = {}
    for device, supply in document.devices.items():
        with source.errors_at(("devices", device)):
            if by_cost and "usd_per_hour" not in supply.model_fields_set:
                raise PlanError(f"plans are made by cost, and {device} has no usd_per_hour")
            devices[device] = Supply(**supply.model_dump())
            problem = replace(problem, latency=latency, devices=dict(devices))
    return problem


def _survival(document: ProblemDocument, recorded: Recorded | None) -> tuple[float, ...]:
    if recorded is None:
        assert isinstance(document.survival, list)
        return tuple(document.survival)
    return recorded.records.outcome(recorded.thresholds).survival
