"""When a service's inputs may leave, and what its latencies are: a service file's model, read and held together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.devices import EMULATED
from cluster.inventory import Inventory
from earlyexit.boundary import FLOAT_BYTES, hop_float_bytes
from earlyexit.errors import DataError, InputError
from earlyexit.source_file import Source
from earlyexit.store import WEIGHTS_FILE, read_card
from offramp.jobs.calibration import read_calibration
from offramp.jobs.chain_members import check_members
from offramp.service.shape import AccuracyDocument, ModelDocument
from optimizer.calibration_file import CalibrationCard, records_of
from optimizer.plan import PolicySpec, policy_of_score
from optimizer.problem_shape import PublishedDocument, TableDocument
from profiles.decay import check_decay_of, decay_of
from profiles.networks import alone_of, check_weights, kept_of, weights_of
from profiles.table import LatencyTable

if TYPE_CHECKING:
    from earlyexit.store import ModelCard
    from profiles.latency import LatencyProfile
    from profiles.records import ExitRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """The exit policy, and the records that say what it does."""

    policy: PolicySpec
    """With a threshold for every ramp that may be active."""
    thresholds: Mapping[int, float]
    records: ExitRecords
    alone: ExitRecords | None
    """Of an ensemble the same inputs with nothing mixed, of pruned texts the whole ones."""
    budget: float | None
    """Of what is seen live, which is what ramps lose: less what the end loses by the records; None: there is none."""
    confidence: float | None
    """That the calibration's thresholds keep its budget of agreement; None where none was tested."""
    prune: Mapping[int, float] = field(default_factory=dict)
    """As of a plan: whose words are pruned, by end ramp."""
    kept: tuple[float, ...] = ()
    """Of every network, the share of an input's tokens that is left there; (): all."""


def read_exits(
    document: AccuracyDocument,
    model: Path,
    card: ModelCard,
    source: Source,
    base: Path,
    *,
    recorded: bool,
    beside: Path | None = None,
) -> Exits:
    """Policy, thresholds and records of a service; `recorded`: emulated accelerators answer from the records.

    What the file leaves out is the calibration's: the model's own, or the one in the folder `beside` it. Raises
    InputError at the line of what does not fit the model.
    """
    with source.said_at(("accuracy",)):
        calibration = None if _complete(document) else read_calibration(model, beside)
        score = document.policy or (calibration.policy if calibration else "recorded")
    name = "recorded" if recorded else score
    path = (base / document.records).resolve() if document.records is not None else records_of(model, beside)
    with source.said_at(("accuracy", "records") if document.records is not None else ("accuracy",)):
        records = _records(path, card)
        check_members(records.provenance, model, path)
        if score != "recorded" and score != records.score:
            raise InputError(f"the policy is {score}, {path} holds scores of {records.score}")
        if name == "recorded":
            _check_answers(records, path, asked=document.policy == "recorded")
        if calibration is not None:
            _check_of_calibration(path, records, calibration)
        alone = alone_of(path, records)
    with source.said_at(("accuracy", "thresholds") if document.thresholds is not None else ("accuracy",)):
        thresholds = _thresholds(document, calibration, card, records)
    with source.said_at(("accuracy",)):
        policy = (
            PolicySpec(name=name, thresholds=thresholds, records=str(path))
            if name == "recorded"
            else policy_of_score(name, thresholds, records.confidences, weights_of(records), decay_of(records))
        )
    # Probes know the full model's answers and no labels: nothing that is live can be held against a budget of harm.
    promised = calibration if calibration is not None and calibration.metric == "agreement" else None
    budget = promised.budget if promised is not None and document.budget is None else document.budget
    pruned = (calibration.prune if calibration is not None else None) or {}
    return Exits(
        policy=policy,
        thresholds=thresholds,
        records=records,
        alone=alone,
        budget=budget if pruned else of_ramps(budget, records, thresholds),
        confidence=promised.confidence if promised is not None and promised.confidence > 0 else None,
        prune=pruned,
        kept=kept_of(records) if pruned else (),
    )


def of_ramps(budget: float | None, records: ExitRecords, thresholds: Mapping[int, float]) -> float | None:
    """Of a budget what is left to ramps, where the end of an ensemble loses some of it, which no probe sees."""
    if budget is None or records.end_losses_N is None:
        return budget
    outcome = records.outcome(thresholds)
    at_end_N = outcome.exits_N == outcome.num_blocks - 1
    return max(0.0, budget - float(outcome.losses_N[at_end_N].sum()) / len(records))


def _complete(document: AccuracyDocument) -> bool:
    """Whether nothing is left for a calibration to say."""
    return document.policy is not None and document.thresholds is not None


def _records(path: Path, card: ModelCard) -> ExitRecords:
    from profiles.records import ExitRecords

    records = ExitRecords.load(path)
    if records.num_blocks != card.num_blocks or not set(records.ramps) <= set(card.ramps):
        raise InputError(
            f"{path} holds {records.num_blocks} blocks and ramps {list(records.ramps)}; "
            f"the model has {card.num_blocks} blocks and ramps {list(card.ramps)}"
        )
    return records


def _check_answers(records: ExitRecords, path: Path, *, asked: bool) -> None:
    """Raise InputError where records cannot answer; `asked`: the file itself says policy recorded."""
    if records.answers_NE is None:
        instead = f"policy {records.score}, and on emulated accelerators" if asked else "on emulated accelerators"
        raise InputError(
            f"{path} holds losses and no answers, as of all dense models, so policy recorded cannot answer from it: "
            f"give {instead} model.decisions: computed"
        )


def _check_of_calibration(path: Path, records: ExitRecords, calibration: CalibrationCard) -> None:
    """Refuse records whose scores are not those that the calibration's thresholds are for."""
    if records.score != calibration.policy:
        raise InputError(f"the calibration's thresholds are of {calibration.policy}, {path} holds {records.score}")
    check_weights(records, calibration.weights, str(path))
    check_decay_of(records, calibration.decay, str(path))
    if records.confidences != calibration.confidences:
        raise InputError(
            f"the calibration's shares are of values above {_listed(calibration.confidences)}, "
            f"those of {path} above {_listed(records.confidences)}"
        )


def _listed(confidences: Mapping[int, float] | None) -> str:
    return ", ".join(f"{ramp}: {value:g}" for ramp, value in sorted((confidences or {}).items())) or "none"


def _thresholds(
    document: AccuracyDocument, calibration: CalibrationCard | None, card: ModelCard, records: ExitRecords
) -> dict[int, float]:
    given = document.thresholds
    if given is None:
        assert calibration is not None, "one of the two has thresholds"
        thresholds = dict(calibration.thresholds)
    else:
        thresholds = dict(given) if isinstance(given, Mapping) else dict.fromkeys(records.ramps, given)
    for ramps, what in ((card.ramps, "the model's ramps are"), (records.ramps, "the exit records hold ramps")):
        unknown = sorted(set(thresholds) - set(ramps))
        if unknown:
            raise InputError(f"thresholds for ramps {unknown}; {what} {list(ramps)}")
    return dict(sorted(thresholds.items()))


def latency_tables(
    document: ModelDocument, card: ModelCard, devices: tuple[str, ...], source: Source, base: Path
) -> dict[str, LatencyTable]:
    """Seconds of every block and every ramp of the model, per device; raises InputError at the line of the device."""
    missing = [device for device in devices if device not in document.latency]
    with source.said_at(("model", "latency")):
        if missing:
            raise InputError(f"no latency for {', '.join(missing)}; it is given for {', '.join(document.latency)}")
    real = [device for device in devices if not device.startswith(EMULATED)]
    with source.said_at(("model", "slower")):
        if document.slower != 1 and real:
            raise InputError(f"slower {document.slower:g} is of emulated accelerators; {', '.join(real)} is as it is")
    tables = {}
    for device in devices:
        with source.said_at(("model", "latency", device)):
            tables[device] = slowed(_table(device, document, card, base), document.slower)
    return tables


def _table(device: str, document: ModelDocument, card: ModelCard, base: Path) -> LatencyTable:
    from profiles.catalogue import published_profile
    from profiles.latency import LatencyProfile

    entry = document.latency[device]
    if isinstance(entry, TableDocument):
        return _written_out(entry, card)
    if isinstance(entry, PublishedDocument):
        profile = published_profile(entry.published, device.removeprefix(EMULATED))
    else:
        profile = LatencyProfile.load(base / entry.profile)
    return with_rows(profile.at(entry.length), _checked(profile, card).ramps, card.ramps)


def _checked(profile: LatencyProfile, card: ModelCard) -> LatencyProfile:
    if profile.num_blocks != card.num_blocks or not set(card.ramps) <= set(profile.ramps):
        raise InputError(
            f"the latency profile of {profile.model!r} has {profile.num_blocks} blocks and ramps "
            f"{list(profile.ramps)}; the model has {card.num_blocks} blocks and ramps {list(card.ramps)}"
        )
    return profile


def _written_out(entry: TableDocument, card: ModelCard) -> LatencyTable:
    for name, rows, wanted in (("block_s", entry.block_s, card.num_blocks), ("ramp_s", entry.ramp_s, len(card.ramps))):
        if len(rows) != wanted:
            raise InputError(f"{name} has {len(rows)} rows; {wanted} are needed, one per {name.removesuffix('_s')}")
        wrong = [row for row, seconds in enumerate(rows) if len(seconds) != len(entry.batch)]
        if wrong:
            raise InputError(f"{name}.{wrong[0]} needs {len(entry.batch)} values, one for each batch size")
    width = len(entry.batch)
    return LatencyTable(
        batches=tuple(entry.batch),
        block_s_NB=np.array(entry.block_s, dtype=np.float64).reshape(card.num_blocks, width),
        ramp_s_EB=np.array(entry.ramp_s, dtype=np.float64).reshape(len(card.ramps), width),
        length=entry.length,
    )


def with_rows(table: LatencyTable, ramps: tuple[int, ...], wanted: tuple[int, ...]) -> LatencyTable:
    """The table with only the rows of some ramps; `ramps` are those it has."""
    rows = [ramps.index(ramp) for ramp in wanted]
    return replace(table, ramp_s_EB=table.ramp_s_EB[np.array(rows, dtype=np.int64)])


def slowed(table: LatencyTable, times: float) -> LatencyTable:
    """The table of something that takes so many times as long."""
    return replace(table, block_s_NB=table.block_s_NB * times, ramp_s_EB=table.ramp_s_EB * times)


def bytes_per_sample(document: ModelDocument, card: ModelCard) -> tuple[float, ...]:
    """Per block, what one input carries to the next stage when a stage ends there."""
    if document.bytes_per_sample is not None:
        return (document.bytes_per_sample,) * card.num_blocks
    lengths = [entry.length for entry in document.latency.values() if entry.length is not None]
    length = max(lengths, default=card.max_length)
    float_bytes = hop_float_bytes(document.dtype, document.hop_dtype)
    return tuple(card.bytes_per_input(block, length, float_bytes=float_bytes) for block in range(card.num_blocks))


def check_models(document: ModelDocument, model: Path, card: ModelCard, source: Source, base: Path) -> None:
    """Raise InputError where the models that the file names are not those that the folder's chain consists of."""
    if document.models is None:
        return
    with source.said_at(("model", "models")):
        said = [(base / each).resolve() for each in document.models]
        found = [each.resolve() for each in card.members(model)]
        if said != found:
            consists = f"is a chain of {_told(found)}" if len(found) > 1 else "is one model and no chain"
            raise InputError(f"{model} {consists}, not of {_told(said)}; `offramp chain` makes that")


def _told(folders: list[Path]) -> str:
    return " and ".join(map(str, folders))


def check_memory(document: ModelDocument, model: Path, card: ModelCard, inventory: Inventory, source: Source) -> None:
    """Raise InputError, with figures, where a replica does not fit its accelerator."""
    with source.said_at(("model", "folder")):
        needed_bytes = document.memory_bytes or _parameter_bytes(model, card, document.dtype)
    with source.said_at(("model",)):
        for device, each in inventory.devices.items():
            if each.count and each.memory_bytes is not None and needed_bytes > each.memory_bytes:
                said = "as the file says" if document.memory_bytes else _of_parameters(document, card)
                raise InputError(
                    f"a replica needs {_gigabytes(needed_bytes)}, {said}; {device} has {_gigabytes(each.memory_bytes)}"
                )


def _of_parameters(document: ModelDocument, card: ModelCard) -> str:
    names = card.chain.names
    return f"its parameters in {document.dtype}" + ("" if card.chain.is_one else f", of {' and '.join(names)}")


def _parameter_bytes(model: Path, card: ModelCard, dtype: str) -> int:
    """Of all networks: a replica of a chain holds each of them."""
    return sum(_bytes_of_one(folder, read_card(folder), dtype) for folder in card.members(model))


def _bytes_of_one(model: Path, card: ModelCard, dtype: str) -> int:
    """From the checkpoint's size, which holds float32, and those of the network's own files, which stay as they are."""
    weights, *others = (model / name for name in (WEIGHTS_FILE, *card.network_files))
    missing = [path.name for path in (weights, *others) if not path.is_file()]
    if missing:
        raise DataError(f"{model} has no {missing[0]}")
    in_dtype = weights.stat().st_size * FLOAT_BYTES[dtype] // FLOAT_BYTES["float32"]
    return in_dtype + sum(path.stat().st_size for path in others)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
