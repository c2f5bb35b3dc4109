"""The networks of a chain in a problem file: as `models`, each with its own blocks and latencies, or as `networks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from earlyexit.data.source_file import Source, StrictDocument
from earlyexit.errors import DataError, ModelFolderError, PlanError
from earlyexit.network.chain import Chain
from earlyexit.network.store import read_card
from optimizer.problems.latency_file import latency_table
from optimizer.problems.networks import with_slower_networks
from optimizer.problems.problem import MOST_NETWORKS, PlanProblem, check_seconds
from optimizer.problems.problem_shape import MAX_BLOCKS, BytesDocument, LatencyDocument, ProblemDocument
from optimizer.problems.survival_file import Recorded
from profiles.networks import kept_of, measuring_of, survival_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable

OF_MODELS = ("blocks", "ramps", "latency", "bytes_per_sample", "networks", "network_tokens", "crossing_tokens")
"""Fields that a file with `models` must not have."""


class ModelDocument(StrictDocument):
    """One network of a chain."""

    name: str | None = None
    """By default the name of the folder's model."""
    folder: str | None = None
    """A model folder, relative to the file's folder. It defines blocks and ramps."""
    blocks: int | None = Field(default=None, ge=1, le=MAX_BLOCKS)
    ramps: list[int] = Field(default_factory=list)
    """Ramps inside the network, in its own block numbers. The network's end is one more ramp; the last block's latency
    contains its seconds."""
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    """Like a problem's `latency`, for this network's own blocks and ramps."""
    bytes_per_sample: BytesDocument = 0.0
    """Size of the hidden state: one number, or one per block but the last."""
    crossing_bytes: float = Field(default=0.0, ge=0, le=1e18)
    """Bytes that one survivor of the network's end carries to the next network."""
    tokens: float = Field(default=1.0, gt=0, le=1e6)
    """Tokens of an input in this network, relative to `lengths`."""
    kept: float = Field(default=1.0, gt=0, le=1)
    """Share of tokens that pruning leaves of an input that crosses into this network."""


class ModelsDocument(StrictDocument):
    """All networks of a chain, smallest first."""

    models: list[ModelDocument] = Field(min_length=1, max_length=MOST_NETWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    document: ModelDocument
    name: str
    num_blocks: int
    ramps: tuple[int, ...]


def as_chain(source: Source, folder: Path) -> Source:
    """Returns the source with `models` replaced by a chain's fields; unchanged if it has no `models`.

    Raises PlanError at the line of a contradiction.
    """
    document = source.document
    if not isinstance(document, Mapping) or "models" not in document:
        return source
    for name in OF_MODELS:
        if name in document:
            with source.errors_at((name,)):
                raise PlanError(f"{name}: each of the models has its own; leave out either {name} or models")
    parsed = replace(source, document={"models": document["models"]}).parse(ModelsDocument, called="the problem")
    models = [_model(source, index, each, folder) for index, each in enumerate(parsed.models)]
    with source.errors_at(("models",)):
        names = [each.name for each in models]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"models: {name!r} is there twice")
    with source.errors_at(("models", 0, "kept")):
        if models[0].document.kept != 1:
            raise PlanError("models.0.kept: no input crosses into the first model; `kept` belongs to a later model")
    rest = {name: value for name, value in document.items() if name != "models"}
    return replace(source, document={**rest, **_chain(source, models, folder)})


def _model(source: Source, index: int, document: ModelDocument, folder: Path) -> _Model:
    with source.errors_at(("models", index)):
        if (document.folder is None) == (document.blocks is None):
            found = "neither" if document.folder is None else "both"
            raise PlanError(f"models.{index}: {found} of folder and blocks are given; one of them is needed")
        if document.folder is None:
            assert document.blocks is not None
            name, num_blocks, ramps = document.name or f"model {index}", document.blocks, tuple(document.ramps)
        else:
            if document.ramps:
                raise PlanError(f"models.{index}: the folder defines the ramps; leave out either folder or ramps")
            name, num_blocks, ramps = _of_folder(folder / document.folder)
        if list(ramps) != sorted(set(ramps)) or any(not 0 <= ramp < num_blocks - 1 for ramp in ramps):
            raise PlanError(f"models.{index}.ramps must ascend, each after one of blocks 0 to {num_blocks - 2}")
    return _Model(document=document, name=document.name or name, num_blocks=num_blocks, ramps=ramps)


def _of_folder(folder: Path) -> tuple[str, int, tuple[int, ...]]:
    try:
        card = read_card(folder)
    except ModelFolderError as error:
        raise PlanError(str(error)) from error
    if not card.chain.is_one:
        raise PlanError(f"{folder} is a chain itself; list its models instead")
    return card.name, card.num_blocks, tuple(card.ramps)


def _chain(source: Source, models: Sequence[_Model], folder: Path) -> dict[str, Any]:
    ends = list(accumulate(each.num_blocks for each in models))
    starts = [0, *ends[:-1]]
    end_ramps = [end - 1 for end in ends[:-1]]
    inner = [start + ramp for start, each in zip(starts, models, strict=True) for ramp in each.ramps]
    chain: dict[str, Any] = {
        "blocks": ends[-1],
        "ramps": sorted(inner + end_ramps),
        "latency": _latencies(source, models, folder),
        "bytes_per_sample": [size for index, each in enumerate(models) for size in _bytes(source, index, each)],
    }
    if len(models) > 1:
        chain["networks"] = ends
    shares = {
        "network_tokens": [each.document.tokens for each in models],
        "crossing_tokens": [1.0, *(each.document.kept for each in models[1:])],
    }
    chain |= {name: values for name, values in shares.items() if set(values) != {1.0}}
    return chain


def _bytes(source: Source, index: int, model: _Model) -> list[float]:
    """Returns the bytes per input after each block of a model."""
    sizes = model.document.bytes_per_sample
    if not isinstance(sizes, list):
        sizes = [sizes] * (model.num_blocks - 1)
    if len(sizes) != model.num_blocks - 1:
        with source.errors_at(("models", index, "bytes_per_sample")):
            raise PlanError(
                f"models.{index}.bytes_per_sample has {len(sizes)} values; allowed are one number or "
                f"{model.num_blocks - 1}, one per block but the last"
            )
    return [*sizes, model.document.crossing_bytes]


def _latencies(source: Source, models: Sequence[_Model], folder: Path) -> dict[str, Any]:
    """Returns the latency tables of the chain, by device, at the batch sizes that all models have in common."""
    tables: dict[str, list[LatencyTable]] = {}
    for index, model in enumerate(models):
        for device, entry in model.document.latency.items():
            at = ("models", index, "latency", device)
            table = latency_table(at, entry, model.num_blocks, model.ramps, source, folder)
            with source.errors_at(at):
                check_seconds(device, table)
            tables.setdefault(device, []).append(table)
    entries: dict[str, Any] = {}
    for device, of_models in tables.items():
        with source.errors_at(("models",)):
            if len(of_models) < len(models):
                raise PlanError(f"models: some have no latency on {device}")
            common = sorted(set.intersection(*(set(table.batches) for table in of_models)))
            if not common:
                raise PlanError(f"models: no batch size was measured on {device} with all of them")
            lengths = {table.length for table in of_models}
            known = sorted(length for length in lengths if length is not None)
            if len(known) > 1:
                raise PlanError(
                    f"models: latencies on {device} were measured at {' and '.join(map(str, known))} tokens; use one "
                    "length, and state with each model's `tokens` how many more tokens it makes of a text"
                )
        entries[device] = {
            "batch": common,
            "block_s": [row for table in of_models for row in table.blocks_at(np.array(common, dtype=float)).tolist()],
            "ramp_s": _ramp_rows(of_models, common),
            **({"length": known[0]} if len(lengths) == len(known) == 1 else {}),
        }
    return entries


def _ramp_rows(tables: Sequence[LatencyTable], batches: Sequence[int]) -> list[list[float]]:
    """Returns the rows of all ramps. The end of a network has zeros: its last block's latency contains the seconds."""
    rows: list[list[float]] = []
    for table in tables:
        rows += table.ramps_at(np.array(batches, dtype=float)).tolist()
        rows.append([0.0] * len(batches))
    return rows[:-1]


def with_networks_of(problem: PlanProblem, document: ProblemDocument, source: Source) -> PlanProblem:
    """Returns the problem with the document's networks and crossings; raises PlanError at the line of an error."""
    for name in ("networks", "crossing_s", "crossing_tokens", "network_tokens"):
        value = getattr(document, name)
        with source.errors_at((name,)):
            if value and name.startswith("crossing") and not document.networks:
                raise PlanError(f"{name} belongs to chains; this problem has one network")
            changed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
            problem = replace(problem, **changed)
    return problem


def survival_of_networks(
    problem: PlanProblem, document: ProblemDocument, recorded: Recorded | None
) -> Mapping[tuple[int, ...], tuple[float, ...]] | None:
    """Returns the survival by used networks, from the document or from exit records; None if neither has it."""
    by_networks = {tuple(each.networks): tuple(each.survival) for each in document.survival_of}
    if by_networks and not problem.networks:
        raise PlanError("survival_of belongs to chains; this problem has one network")
    if len(by_networks) < len(document.survival_of):
        raise PlanError("survival_of has the same networks twice")
    if recorded is None or not problem.networks:
        return by_networks or None
    if by_networks:
        raise PlanError("survival_of follows from survival's exit records; leave out one of the two")
    try:
        return survival_of(recorded.records, recorded.thresholds, _chain_of(problem), recorded.alone)
    except (DataError, ModelFolderError) as error:
        raise PlanError(f"survival.records: {error}") from error


def with_pruning(problem: PlanProblem, records: ExitRecords) -> PlanProblem:
    """Returns the problem with the pruning of its records: shares of kept tokens, and seconds to compute attention."""
    if not problem.networks or not kept_of(records):
        return problem
    networks, factors = problem.networks, measuring_of(records)
    latency = {device: with_slower_networks(table, networks, factors) for device, table in problem.latency.items()}
    return replace(problem, latency=latency, crossing_tokens=problem.crossing_tokens or kept_of(records))


def networks_document(problem: PlanProblem) -> dict[str, Any]:
    """Returns the chain's fields as plain data; none for a single network."""
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


def _chain_of(problem: PlanProblem) -> Chain:
    """Returns the chain as exit records describe it, with the ends of networks among its ramps."""
    starts = (0, *problem.networks[:-1])
    lengths = tuple(end - start for start, end in zip(starts, problem.networks, strict=True))
    ramps = {*problem.ramps, *(end - 1 for end in problem.networks[:-1])}
    return Chain(names=tuple(map(str, range(len(lengths)))), lengths=lengths, ramps=tuple(sorted(ramps)))
