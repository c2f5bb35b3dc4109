"""The networks of a chain in a problem file: `models:`, each with blocks and latencies of its own, or one chain's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from optimizer.latency_file import latency_table
from optimizer.networks import measuring
from optimizer.problem import MOST_NETWORKS, PlanProblem, check_seconds
from optimizer.problem_shape import MAX_BLOCKS, BytesDocument, LatencyDocument, ProblemDocument
from optimizer.survival_file import Recorded
from profiles.networks import kept_of, measuring_of, survival_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable

OF_MODELS = ("blocks", "ramps", "latency", "bytes_per_sample", "networks", "network_tokens", "crossing_tokens")
"""What a file with `models` does not say beside them."""


class ModelDocument(StrictDocument):
    """One network of a chain: its shape, or the folder that knows it, and what is its own."""

    name: str | None = None
    """By default the folder's."""
    folder: str | None = None
    """A model folder, relative to the file's: blocks and ramps are its card's."""
    blocks: int | None = Field(default=None, ge=1, le=MAX_BLOCKS)
    ramps: list[int] = Field(default_factory=list)
    """Inside the network, in its own numbers. Its end is one more, of no seconds: they are in the last block's."""
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    """As of a problem, of this network's own blocks and ramps."""
    bytes_per_sample: BytesDocument = 0.0
    """Of the hidden state; one number, or one per block but the last."""
    crossing_bytes: float = Field(default=0.0, ge=0, le=1e18)
    """What the survivors of its end carry to the next network, of one input."""
    tokens: float = Field(default=1.0, gt=0, le=1e6)
    """Of an input in this network, over those that `lengths` count."""
    kept: float = Field(default=1.0, gt=0, le=1)
    """Of the tokens of an input that crosses into this network, what pruning leaves."""


class ModelsDocument(StrictDocument):
    """All of them, smallest first."""

    models: list[ModelDocument] = Field(min_length=1, max_length=MOST_NETWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    document: ModelDocument
    name: str
    num_blocks: int
    ramps: tuple[int, ...]


def as_chain(source: Source, folder: Path) -> Source:
    """The source with the fields of a chain in the place of `models`; as it is where it has none.

    Raises PlanError at the line of what does not fit together.
    """
    document = source.document
    if not isinstance(document, Mapping) or "models" not in document:
        return source
    for name in OF_MODELS:
        if name in document:
            with source.said_at((name,)):
                raise PlanError(f"{name}: the models say it, each its own; leave one of the two out")
    given = replace(source, document={"models": document["models"]}).parse(ModelsDocument, called="the problem")
    models = [_model(source, index, each, folder) for index, each in enumerate(given.models)]
    with source.said_at(("models",)):
        _check_names(models)
    with source.said_at(("models", 0, "kept")):
        if models[0].document.kept != 1:
            raise PlanError("models.0.kept: nothing crosses into the first model; the one behind a crossing says it")
    rest = {name: value for name, value in document.items() if name != "models"}
    return replace(source, document={**rest, **_chain(source, models, folder)})


def _model(source: Source, index: int, document: ModelDocument, folder: Path) -> _Model:
    with source.said_at(("models", index)):
        if (document.folder is None) == (document.blocks is None):
            found = "neither" if document.folder is None else "both"
            raise PlanError(f"models.{index}: {found} of folder and blocks are given; one of them is needed")
        if document.folder is None:
            assert document.blocks is not None
            name, num_blocks, ramps = document.name or f"model {index}", document.blocks, tuple(document.ramps)
        else:
            if document.ramps:
                raise PlanError(f"models.{index}: the folder says its ramps; leave one of the two out")
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
        raise PlanError(f"{folder} is a chain itself; name its models")
    return card.name, card.num_blocks, tuple(card.ramps)


def _check_names(models: Sequence[_Model]) -> None:
    names = [each.name for each in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"models: {twice!r} is there twice")


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
    given = model.document.bytes_per_sample
    if isinstance(given, list) and len(given) != model.num_blocks - 1:
        with source.said_at(("models", index, "bytes_per_sample")):
            raise PlanError(
                f"models.{index}.bytes_per_sample has {len(given)} values; allowed are one number or "
                f"{model.num_blocks - 1}, one per block but the last"
            )
    inside = given if isinstance(given, list) else [given] * (model.num_blocks - 1)
    return [*inside, model.document.crossing_bytes]


def _latencies(source: Source, models: Sequence[_Model], folder: Path) -> dict[str, Any]:
    """Written out, at the batch sizes that all models were measured with."""
    tables: dict[str, list[LatencyTable]] = {}
    for index, model in enumerate(models):
        for device, entry in model.document.latency.items():
            at = ("models", index, "latency", device)
            table = latency_table(at, entry, model.num_blocks, model.ramps, source, folder)
            with source.said_at(at):
                check_seconds(device, table)
            tables.setdefault(device, []).append(table)
    found: dict[str, Any] = {}
    for device, of_models in tables.items():
        with source.said_at(("models",)):
            if len(of_models) < len(models):
                raise PlanError(f"models: some have no latency on {device}")
            common = sorted(set.intersection(*(set(table.batches) for table in of_models)))
            if not common:
                raise PlanError(f"models: no batch size was measured on {device} with all of them")
            lengths = {table.length for table in of_models}
            if len(lengths - {None}) > 1:
                raise PlanError(
                    f"models: latencies on {device} are of inputs of {_listed(lengths)} tokens; take one length, and "
                    "say by each model's `tokens` how many more it makes of a text"
                )
        found[device] = {
            "batch": common,
            "block_s": [row for table in of_models for row in table.blocks_at(np.array(common, dtype=float)).tolist()],
            "ramp_s": _ramp_rows(of_models, common),
            **({"length": lengths.pop()} if len(lengths) == 1 and None not in lengths else {}),
        }
    return found


def _listed(lengths: Collection[int | None]) -> str:
    return " and ".join(map(str, sorted(length for length in lengths if length is not None)))


def _ramp_rows(tables: Sequence[LatencyTable], batches: Sequence[int]) -> list[list[float]]:
    """Inner ramps, and behind all but the last network's its end, which is in the seconds of its last block."""
    rows: list[list[float]] = []
    for table in tables:
        rows += table.ramps_at(np.array(batches, dtype=float)).tolist()
        rows.append([0.0] * len(batches))
    return rows[:-1]


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
        return survival_of(recorded.records, recorded.thresholds, _chain_of(problem), recorded.alone)
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


def _chain_of(problem: PlanProblem) -> Chain:
    """For the records, which know the ends of its networks as ramps."""
    starts = (0, *problem.networks[:-1])
    lengths = tuple(end - start for start, end in zip(starts, problem.networks, strict=True))
    ramps = {*problem.ramps, *(end - 1 for end in problem.networks[:-1])}
    return Chain(names=tuple(map(str, range(len(lengths)))), lengths=lengths, ramps=tuple(sorted(ramps)))
