"""The networks of a cascade in a problem file, as `models`, each with its own blocks and latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, ValidationInfo, model_validator

from earlyexit.data.source_file import Source, StrictDocument
from earlyexit.errors import InputError, PlanError, within
from earlyexit.network.chain import ModelChain
from earlyexit.network.store import read_card
from optimizer.problems.entries import FileBytes, Latencies, latency_tables
from optimizer.problems.networks import with_slower_networks
from optimizer.problems.problem import MAX_BLOCKS, MOST_NETWORKS, PlanProblem, check_seconds
from profiles.networks import kept_of, measuring_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable, check_ramps

OF_MODELS = ("blocks", "ramps", "latency", "bytes_per_sample", "networks", "network_tokens", "crossing_tokens")
"""Fields that a file with `models` must not have."""

Tokens = Annotated[float, Field(gt=0, le=1e6)]
Kept = Annotated[float, Field(gt=0, le=1)]


class ModelDocument(StrictDocument):
    """One network of a cascade. The context of its validation is the file's folder."""

    name: str | None = None
    """The network's name; by default the name of the folder's model."""
    folder: str | None = None
    """A model folder, relative to the file's folder. It defines blocks and ramps."""
    blocks: int | None = Field(default=None, ge=1, le=MAX_BLOCKS)
    ramps: tuple[int, ...] = Field((), strict=False)
    """Ramps inside the network, in its own block numbers. Its end is one more ramp, timed with the last block."""
    latency: Latencies
    """Like a problem's `latency`, for this network's own blocks and ramps."""
    bytes_per_sample: FileBytes = 0.0
    """Size of the hidden state: one number, or one per block but the last."""
    crossing_bytes: float = Field(default=0.0, ge=0, le=1e18)
    """Bytes that one survivor of the network's end carries to the next network."""
    tokens: Tokens = 1.0
    """Tokens of an input in this network, relative to `lengths`."""
    kept: Kept = 1.0
    """Share of tokens that pruning leaves of an input that crosses into this network."""

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        """Adds what the folder defines, and checks that latencies and sizes fit the blocks."""
        base = Path(info.context or "")
        if (self.folder is None) == (self.blocks is None):
            found = "neither" if self.folder is None else "both"
            raise InputError(f"{found} of folder and blocks are given; one of them is needed")
        if self.folder is not None:
            if self.ramps:
                raise InputError("the folder defines the ramps; leave out either folder or ramps")
            card = read_card(base / self.folder)
            if not card.chain.is_one:
                raise InputError(f"{base / self.folder} is a chain itself; list its models instead")
            self.name, self.blocks, self.ramps = self.name or card.name, card.num_blocks, card.ramps
        with within("ramps"):
            check_ramps(self.ramps, self.num_blocks)
        with within("bytes_per_sample"):
            given, needed = self.bytes_per_sample, self.num_blocks - 1
            self.bytes_per_sample = sizes = given if isinstance(given, list) else [given] * needed
            if len(sizes) != needed:
                allowed = f"allowed are one number or {needed}, one per block but the last"
                raise InputError(f"{len(sizes)} values; {allowed}")
        with within("latency"):
            tables = latency_tables(self.latency, self.num_blocks, self.ramps, base)
            for device, table in tables.items():
                with within(device):
                    check_seconds(device, table)
            self.latency = dict(tables)
        return self

    @property
    def num_blocks(self) -> int:
        assert self.blocks is not None
        return self.blocks


class ModelsDocument(StrictDocument):
    """All networks of a cascade, smallest first."""

    models: list[ModelDocument] = Field(min_length=1, max_length=MOST_NETWORKS)

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = [each.name or f"model {index}" for index, each in enumerate(self.models)]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{name!r} is there twice", at=("models",))
        if self.models[0].kept != 1:
            message = "no input crosses into the first model; `kept` belongs to a later model"
            raise InputError(message, at=("models", 0, "kept"))
        return self

    def chain(self) -> dict[str, Any]:
        """Returns the fields of a problem file that describe the chain; raises InputError."""
        models, starts = self.models, [0, *accumulate(each.num_blocks for each in self.models)]
        ramps = [start + ramp for start, each in zip(starts, models, strict=False) for ramp in each.ramps]
        sizes: list[float] = []
        for each in models:
            assert isinstance(each.bytes_per_sample, list)
            sizes += [*each.bytes_per_sample, each.crossing_bytes]
        shares = {
            "network_tokens": [each.tokens for each in models],
            "crossing_tokens": [each.kept for each in models],
        }
        with within("models"):
            latency = {device: self._table(device) for each in models for device in each.latency}
        return {
            "blocks": starts[-1],
            "ramps": sorted(ramps + [end - 1 for end in starts[1:-1]]),
            "latency": latency,
            "bytes_per_sample": sizes,
            **({"networks": starts[1:]} if len(models) > 1 else {}),
            **{name: values for name, values in shares.items() if set(values) != {1.0}},
        }

    def _table(self, device: str) -> LatencyTable:
        """Returns the latencies of the chain on a device, at the batch sizes that all models have in common."""
        entries = [each.latency.get(device) for each in self.models]
        tables = [entry for entry in entries if isinstance(entry, LatencyTable)]
        if len(tables) < len(self.models):
            raise InputError(f"some have no latency on {device}")
        common = sorted(set.intersection(*(set(table.batches) for table in tables)))
        if not common:
            raise InputError(f"no batch size was measured on {device} with all of them")
        lengths = {table.length for table in tables}
        known = sorted(length for length in lengths if length is not None)
        if len(known) > 1:
            raise InputError(
                f"latencies on {device} were measured at {' and '.join(map(str, known))} tokens; use one length, and "
                "state with each model's `tokens` how many more tokens it makes of a text"
            )
        batch_X, end_ramp = np.array(common, dtype=float), np.zeros((1, len(common)))
        ramps = [rows for table in tables for rows in (table.ramps_at(batch_X), end_ramp)]
        return LatencyTable(
            batches=tuple(common),
            block_s_NB=np.concatenate([table.blocks_at(batch_X) for table in tables]),
            ramp_s_EB=np.concatenate(ramps[:-1]),  # the last block of a network contains the seconds of its end
            length=known[0] if len(lengths) == len(known) == 1 else None,
        )


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
    only_models = replace(source, document={"models": document["models"]})
    models = only_models.parse(ModelsDocument, called="the problem", folder=folder)
    rest = {name: value for name, value in document.items() if name != "models"}
    with source.errors_at():
        return replace(source, document={**rest, **models.chain()})


def with_pruning(problem: PlanProblem, records: ExitRecords) -> PlanProblem:
    """Returns the problem with the pruning of its records: shares of kept tokens, and seconds to compute attention."""
    if not problem.networks or not kept_of(records):
        return problem
    networks, factors = problem.networks, measuring_of(records)
    latency = {device: with_slower_networks(table, networks, factors) for device, table in problem.latency.items()}
    return replace(problem, latency=latency, crossing_tokens=problem.crossing_tokens or kept_of(records))


def chain_of(networks: Sequence[int], ramps: Sequence[int]) -> ModelChain:
    """Returns the chain as exit records describe it, with the ends of networks among its ramps."""
    lengths, every = np.diff(networks, prepend=0).tolist(), {*ramps, *(end - 1 for end in networks[:-1])}
    return ModelChain(names=tuple(map(str, range(len(lengths)))), lengths=tuple(lengths), ramps=tuple(sorted(every)))
