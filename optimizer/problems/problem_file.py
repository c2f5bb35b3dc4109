"""Planning problems as YAML or JSON. Errors name the file and the line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python

from earlyexit.data.source_file import Source, StrictDocument, read_source
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import InputError, PlanError, within
from earlyexit.named import Fill
from optimizer.calibration.calibration_file import policy_of_records
from optimizer.generation.demand import Generation, KvSpec
from optimizer.plans.plan import PolicySpec
from optimizer.plans.plan_file import MOST_CHAINS, Order
from optimizer.problems.entries import (
    BatchesDocument,
    FileBytes,
    FileLengths,
    FileSurvival,
    Latencies,
    Recorded,
    RecordsDocument,
    latency_tables,
    lengths_document,
    with_rows,
)
from optimizer.problems.models_file import Kept, Tokens, as_chain, chain_of, with_pruning
from optimizer.problems.problem import (
    MAX_BLOCKS,
    FileObjective,
    Ingresses,
    Latency,
    Link,
    MinimizeCost,
    MinimizeLatency,
    PlanProblem,
    Slack,
    Slo,
    Supply,
    UsdPerHour,
)
from optimizer.problems.tokens import in_tokens
from profiles.lengths import MOST_TOKENS, grouped, read_sequences
from profiles.networks import prune_of, survival_of
from profiles.table import LatencyTable, Seconds

OF_GENERATION = ("ttft_s", "fill", "copy_share", "chunk", "regroup_s", "late_head", "most_running", "kv")
"""Fields that the file's `generation` and `Generation` have in common."""
IN_BOTH = (
    *("devices", "link", "ingress", "objective", "lengths", "most_chains", "probe_share"),
    *("networks", "crossing_s", "network_tokens", "crossing_tokens"),
)
"""Fields that a file and a problem have in common."""


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
        return policy_of_records(self.recorded.records, {ramp: self.recorded.thresholds[ramp] for ramp in ramps})


def read_problem(path: Path) -> ProblemFile:
    """Reads a problem file, with the model's own calibration if `survival` names a folder with several.

    Paths inside the file are relative to its folder. Raises PlanError with the file, the line, the error and the
    allowed values.
    """
    return read_problems(path)[0]


def read_problems(path: Path, objective: Mapping[str, Any] | None = None) -> tuple[ProblemFile, ...]:
    """Reads a problem file for each calibration of its model folder, its own first. `objective` replaces the file's."""
    source = read_source(path, PlanError)
    if objective is not None and isinstance(source.document, Mapping):
        document = {**source.document, "objective": objective}
        source = replace(source, document=document, where=f"--objective for {path}")
    return _build(source, path.parent)


def parse_problem(document: object, *, where: str = "problem", folder: Path = Path()) -> ProblemFile:
    """Returns the problem from plain data (parsed YAML or JSON); raises PlanError."""
    return _build(Source(document=document, where=where, raises=PlanError), folder)[0]


def _build(source: Source, folder: Path) -> tuple[ProblemFile, ...]:
    source = as_chain(source, folder)
    document = source.parse(ProblemDocument, called="the problem", folder=folder)
    with source.errors_at():
        if document.budget is not None or isinstance(document.objective, MinimizeCost):
            check_prices(source)
        with within("survival"):
            survival = document.survival
            every: Sequence[list[float] | RecordsDocument] = (
                [survival] if isinstance(survival, list) else survival.by_calibration(folder)
            )
        return tuple(document.problem(each, folder) for each in every)


def check_prices(source: Source) -> None:
    """Raises PlanError, at the device, if a device of a problem or a fleet has no price."""
    supplies: Any = source.document["devices"] if isinstance(source.document, Mapping) else {}
    for device, supply in supplies.items():
        if "usd_per_hour" not in supply:
            raise PlanError(f"plans are made by cost, and {device} has no usd_per_hour", at=("devices", device))


def problem_document(problem: PlanProblem) -> dict[str, Any]:
    """Returns plain data that `parse_problem` reads, with all numbers written out."""
    slo, generation, usd_per_hour = problem.slo, problem.generation, problem.budget_usd_per_hour
    survival_of, needs_length = (problem.survival_of or {}).items(), bool(problem.lengths or generation)
    same = {name: value for name in IN_BOTH if (value := getattr(problem, name)) not in (None, (), 0.0)}
    document: dict[str, Any] = {
        **to_jsonable_python(same),
        "schema_version": 1,
        "blocks": problem.num_blocks,
        "ramps": list(problem.ramps),
        "survival": list(problem.survival_N),
        "latency": {device: table.document(as_measured=needs_length) for device, table in problem.latency.items()},
        "bytes_per_sample": list(problem.bytes_per_sample_N),
        "slo": asdict(slo) if generation is None else None,
        "devices": {
            device: {name: value for name, value in asdict(supply).items() if (name, value) != ("per_node", 1)}
            for device, supply in problem.devices.items()
        },
        "objective": {name: value for name, value in asdict(problem.objective).items() if value is not None},
        "budget": None if usd_per_hour is None else {"usd_per_hour": usd_per_hour},
        "batches": problem.batches and BatchesDocument.of(problem.batches).model_dump(exclude_none=True),
        "lengths": problem.lengths and lengths_document(problem.lengths),
        "stayers_length": problem.stayers_length_N and list(problem.stayers_length_N),
        "generation": generation and _generation_document(generation, slo),
        "survival_of": [{"networks": [*used], "survival": [*share_N]} for used, share_N in survival_of] or None,
    }
    return {name: value for name, value in document.items() if value is not None}


def _generation_document(generation: Generation, slo: Slo) -> dict[str, Any]:
    prefill = generation.prefill
    return {
        "prompt_tokens": lengths_document(generation.prompt),
        "output_tokens": lengths_document(generation.output),
        "tpot_s": slo.latency_s,
        "slack": slo.slack,
        "prefill": prefill and {device: table.document() for device, table in prefill.items()},
        **to_jsonable_python({name: getattr(generation, name) for name in OF_GENERATION}),
    }


class BudgetDocument(StrictDocument):
    """The largest cost of all replicas together."""

    usd_per_hour: UsdPerHour


class GenerationDocument(StrictDocument):
    """The sequences of a service that generates text."""

    prompt_tokens: FileLengths | None = None
    output_tokens: FileLengths | None = None
    lengths: str | None = None
    """Instead of both: a table of recorded sequences."""
    tpot_s: Latency
    """Promised time per output token after the first: the SLO of a step."""
    ttft_s: Latency | None = None
    """Promised time to the first token."""
    slack: Slack = 0.2
    """Share of both times that is held in reserve."""
    fill: Fill = "compute"
    copy_share: float = Field(default=1.0, ge=0, le=1)
    chunk: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    prefill: Latencies | None = None
    """Latencies of batches of prompts. None: a prompt takes as long as a batch of as many steps."""
    regroup_s: Seconds = 0.0
    late_head: bool = False
    most_running: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    kv: KvSpec | None = None

    def generation(self, prefill: Mapping[str, LatencyTable] | None, folder: Path) -> Generation:
        """Returns the sequences; raises InputError with the path of the wrong value."""
        prompt, output, recorded = self.prompt_tokens, self.output_tokens, None
        if self.lengths is not None:
            with within("lengths"):
                if prompt is not None or output is not None:
                    raise InputError(
                        "a table of lengths replaces prompt_tokens and output_tokens; leave out one of the two"
                    )
                recorded = read_sequences(folder / self.lengths)
                prompt, output = map(grouped, zip(*recorded, strict=True))
        if prompt is None or output is None:
            raise PlanError("generation needs prompt_tokens and output_tokens, or lengths of recorded sequences")
        same = {name: getattr(self, name) for name in OF_GENERATION}
        return Generation(prompt=prompt, output=output, recorded=recorded, prefill=prefill, **same)


class SurvivalOfDocument(StrictDocument):
    """Survival of plans that use a subset of a cascade's networks."""

    networks: tuple[int, ...] = Field(strict=False)
    """Indices of the used networks. The last network is always used."""
    survival: tuple[float, ...] = Field(strict=False)
    """One value per block of the chain."""


class ProblemDocument(StrictDocument):
    """A whole problem file."""

    schema_version: Literal[1] = 1
    blocks: int = Field(ge=1, le=MAX_BLOCKS)
    ramps: tuple[int, ...] = Field(strict=False)
    survival: FileSurvival
    latency: Latencies
    devices: dict[str, Supply] = Field(min_length=1)
    link: Link
    ingress: Ingresses | None = None
    """The rate that the ingresses carry. None: any rate."""
    bytes_per_sample: FileBytes
    slo: Slo | None = None
    """The SLO of an input; None if `generation` holds the SLOs."""
    objective: FileObjective
    budget: BudgetDocument | None = None
    most_chains: int = Field(1, ge=1, le=MOST_CHAINS)
    """Largest number of parallel chains of stages."""
    probe_share: float = Field(0.0, ge=0, le=1)
    """Share of inputs that are probes of a controller, which run all blocks."""
    batches: BatchesDocument | None = None
    order: Order = DEFAULT
    """The order of waiting inputs, which is copied into plans."""
    lengths: FileLengths | None = None
    """Lengths of inputs. None: all have the length at which latencies were measured, and batches count inputs."""
    stayers_length: tuple[float, ...] | None = Field(None, strict=False)
    """Mean length of the inputs that reach each block, relative to all inputs. None: from the records, or equal."""
    models: None = None
    """Instead of blocks, ramps, latency, bytes_per_sample: a cascade's networks (`optimizer.problems.models_file`)."""
    generation: GenerationDocument | None = None
    """For decoders: the sequences, whose steps are the inputs."""
    networks: tuple[int, ...] = Field((), strict=False)
    """For a cascade: one past the last block of each network."""
    survival_of: list[SurvivalOfDocument] = Field(default_factory=list)
    crossing_s: Seconds = 0.0
    network_tokens: tuple[Tokens, ...] = Field((), strict=False)
    crossing_tokens: tuple[Kept, ...] = Field((), strict=False)

    def problem(self, survival: list[float] | RecordsDocument, folder: Path) -> ProblemFile:
        """Returns the problem with this survival; raises InputError with the path of the wrong value."""
        if isinstance(survival, list):
            recorded, survival_N, ramps = None, tuple(survival), self.ramps
        else:
            with within("survival"):
                recorded = survival.recorded(self.blocks, self.ramps, folder)
                survival_N = recorded.records.outcome(recorded.thresholds).survival
                ramps = tuple(ramp for ramp in self.ramps if ramp in recorded.thresholds)
        with within("latency"):
            latency = self._tables(self.latency, ramps, folder)
        self._check_combination(recorded)
        problem = PlanProblem(
            num_blocks=self.blocks,
            ramps=ramps,
            survival_N=survival_N,
            latency=latency,
            bytes_per_sample_N=self._bytes_per_sample(),
            slo=self._slo(),
            budget_usd_per_hour=None if self.budget is None else self.budget.usd_per_hour,
            stayers_length_N=self.stayers_length,
            survival_of=self._survival_of(recorded),
            generation=self._generation(ramps, folder),
            **{name: getattr(self, name) for name in IN_BOTH},
        )
        if self.batches is not None:
            with within("batches"):
                problem = replace(problem, batches=self.batches.batches(self.blocks, ramps, survival_N))
        if recorded is not None:
            problem = with_pruning(problem, recorded.records)
        if problem.lengths is not None:
            if recorded is not None and self.stayers_length is None:
                problem = replace(problem, stayers_length_N=recorded.stayers_length_N)
            with within("lengths"):
                in_tokens(problem)  # raises PlanError if no measured batch holds such inputs
        elif recorded is not None and problem.generation is None:
            problem = replace(problem, batches=recorded.batches(problem))
        return ProblemFile(problem=problem, recorded=recorded, order=self.order)

    def _check_combination(self, recorded: Recorded | None) -> None:
        """Raises PlanError, at the field, for fields that exclude each other."""
        if recorded is not None and self.batches is not None:
            message = "batches follow from survival's exit records; leave out one of the two"
            raise PlanError(message, at=("batches",))
        if self.stayers_length is not None and self.lengths is None:
            message = "stayers_length needs lengths: without them all inputs are equally long"
            raise PlanError(message, at=("stayers_length",))
        for name in ("crossing_s", "crossing_tokens", "survival_of"):
            if getattr(self, name) and not self.networks:
                raise PlanError(f"{name} belongs to chains; this problem has one network", at=(name,))
        single_only = self.networks or self.generation or isinstance(self.objective, MinimizeLatency)
        if single_only and self.most_chains > 1:
            raise PlanError(
                f"most_chains must be 1 for cascades, for generation and for the least latency, not "
                f"{self.most_chains}; several parallel chains are planned for a rate or a cost of one network",
                at=("most_chains",),
            )

    def _tables(self, entries: Latencies, ramps: Sequence[int], folder: Path) -> dict[str, LatencyTable]:
        """Returns the latencies of these ramps by accelerator type."""
        tables = latency_tables(entries, self.blocks, self.ramps, folder)
        return {device: with_rows(table, self.ramps, ramps) for device, table in tables.items()}

    def _bytes_per_sample(self) -> tuple[float, ...]:
        sizes, blocks = self.bytes_per_sample, self.blocks
        if not isinstance(sizes, list):
            return (sizes,) * blocks
        if len(sizes) not in (blocks, blocks - 1):
            raise PlanError(
                f"bytes_per_sample has {len(sizes)} values; allowed are one number, {blocks} (one per block) "
                f"or {blocks - 1} (nothing hops after the last)",
                at=("bytes_per_sample",),
            )
        return (*sizes, *(0.0,) * (blocks - len(sizes)))

    def _slo(self) -> Slo:
        """Returns the SLO of an input. For generation, it is the time per output token."""
        slo, generation = self.slo, self.generation
        if slo is not None and generation is None:
            return slo
        if slo is None and generation is not None:
            return Slo(latency_s=generation.tpot_s, slack=generation.slack)
        both = "slo: generation defines it by tpot_s and slack; leave out one of the two"
        raise PlanError("slo: Field required" if slo is None else both, at=("slo",))

    def _survival_of(self, recorded: Recorded | None) -> Mapping[tuple[int, ...], tuple[float, ...]] | None:
        """Returns the survival by used networks, from the file or from exit records; None if neither has it."""
        by_networks = {each.networks: each.survival for each in self.survival_of}
        with within("survival_of"):
            if len(by_networks) < len(self.survival_of):
                raise PlanError("survival_of has the same networks twice")
            if by_networks and recorded is not None:
                raise PlanError("survival_of follows from survival's exit records; leave out one of the two")
        if recorded is None or not self.networks:
            return by_networks or None
        with within("networks"):
            chain = chain_of(self.networks, self.ramps)
        with within("survival", "records"):
            return survival_of(recorded.records, recorded.thresholds, chain, recorded.alone)

    def _generation(self, ramps: Sequence[int], folder: Path) -> Generation | None:
        if self.generation is None:
            return None
        with within("generation"):
            with within("prefill"):
                given = self.generation.prefill
                prefill = None if given is None else self._tables(given, ramps, folder)
            return self.generation.generation(prefill, folder)
