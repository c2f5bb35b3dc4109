"""What all calibrations have in common: what is asked, thresholds found by exit records, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.errors import DataError, ModelFolderError
from earlyexit.network.chain_card import weights_file_sha256
from earlyexit.network.store import ModelCard, read_card
from offramp.commands.jobs import CalibrateJob
from offramp.commands.recording import Outputs, join_records, records_of_chosen_shares, task_figures
from offramp.commands.worth import constant_accuracy, work_share
from optimizer.calibration_file import (
    AMONG,
    BESIDE,
    CALIBRATION_FILE,
    RECORDS_FILE,
    CalibrationCard,
    members_in,
    read_calibration_file,
)
from optimizer.risk import Guarantee, Metric
from optimizer.thresholds import Calibration, design_rows, divide, learn_then_test
from profiles.networks import ALONE_FILE
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import Score

if TYPE_CHECKING:
    from earlyexit.tasks.base import IntArray, Task, ValueArray


def members_of(folder: Path, card: ModelCard) -> list[dict[str, str]]:
    """A chain's models by name and by their weights, temperatures among them; empty for a single model."""
    if card.chain.is_one:
        return []
    members = zip(card.chain.names, card.members(folder), strict=True)
    return [{"name": name, "sha256": weights_file_sha256(member)} for name, member in members]


def check_members(provenance: Mapping[str, Any] | None, folder: Path, path: Path) -> None:
    """Raise ModelFolderError where a file is of other models than a folder has now.

    Files that do not say, such as those of single models, pass.
    """
    made = members_in(provenance)
    if not made:
        return
    card = read_card(folder)
    names = [each["name"] for each in made]
    if names != list(card.chain.names):
        of, has = (" before ".join(each) for each in (names, card.chain.names))
        raise ModelFolderError(f"{path} is of {of}, {folder} of {has}: calibrate again")
    changed = [now["name"] for now, then in zip(members_of(folder, card), made, strict=True) if now != then]
    if changed:
        raise ModelFolderError(
            f"{path}: {' and '.join(changed)} of {folder} is not what it was then, trained or calibrated since: "
            "calibrate the chain again"
        )


def parts_of(data: Sized, job: CalibrateJob) -> tuple[IntArray, IntArray]:
    """The rows that lay the path, and those that test it."""
    return divide(len(data), design_rows(len(data), job.guarantee, job.design_share), job.seed)


def facts_of(job: CalibrateJob) -> dict[str, Any]:
    """How it was found, for its provenance."""
    from offramp.commands.progress import provenance

    computed_in = {} if job.dtype == "float32" else {"dtype": job.dtype}
    priced_by = {} if job.latency is None else {"latency": str(job.latency)}
    return provenance(data=job.source, seed=job.seed, design_share=job.design_share, **computed_in, **priced_by)


def recorded(
    outputs: Iterable[Outputs],
    policy: Score,
    task: Task,
    labels: ValueArray,
    *,
    design: IntArray,
    job: CalibrateJob,
    facts: dict[str, Any],
) -> ExitRecords:
    """Exit records of outputs with their temperatures; of shares, of confidences that the rows of `design` choose."""
    if policy == "share":
        return records_of_chosen_shares(
            outputs, task, labels, design=design, budget=job.guarantee.budget, provenance=facts
        )
    return join_records(outputs, policy, task, labels, provenance=facts)


def save_calibration(card: CalibrationCard, records: ExitRecords | None, folder: Path) -> None:
    """Write both into a folder, which is made where its parent is there; None: the records of the folder it is in."""
    folder.mkdir(exist_ok=True)
    if records is not None:
        records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card.to_json(), encoding="utf-8")


def card_of(
    records: ExitRecords,
    parts: tuple[IntArray, IntArray],
    job: CalibrateJob,
    facts: dict[str, Any],
    *,
    task: Task | None = None,
    block_costs: Sequence[float] | None = None,
    others: Sequence[ExitRecords] = (),
    prune: Mapping[int, float] | None = None,
    labels: ValueArray | None = None,
    first: int = 0,
    entry: int = 0,
) -> CalibrationCard:
    """Returns thresholds by records of rows, one part of which lays the path and the other tests it.

    `others` are the same rows as other plans see them. `labels` are the truth of all rows as the task has it. `first`
    is the first block of the full model, which is the last of a chain; inputs enter at block `entry`.
    """
    promised, *views = (promised_of(each, job) for each in (records, *others))
    design, tested = (promised.subset(rows) for rows in parts)
    seen = [each.subset(parts[1]) for each in views]
    found = learn_then_test(design, tested, job.guarantee, block_costs, others=seen)
    return CalibrationCard(
        policy=records.score,
        thresholds=found.thresholds,
        confidences=None if records.confidences is None else dict(records.confidences),
        metric=job.metric,
        prune=None if prune is None else dict(prune),
        budget=job.guarantee.budget,
        confidence=job.guarantee.confidence,
        tested=_tested_figures(records.subset(parts[1]), found, job.metric, task)
        | _worth(found, parts[1], task, labels, block_costs, first, entry),
        provenance=facts if job.guarantee.among == 1 else facts | {AMONG: job.guarantee.among},
    )


def _worth(
    found: Calibration,
    tested: IntArray,
    task: Task | None,
    labels: ValueArray | None,
    block_costs: Sequence[float] | None,
    first: int,
    entry: int,
) -> dict[str, Any]:
    """What tells whether exits are worth it: blocks and work from the block where inputs enter, and a dull answer's."""
    outcome = found.tested
    dull = None if task is None or labels is None else constant_accuracy(task, labels[tested])
    return {
        "mean_blocks": outcome.mean_blocks - entry,
        "num_blocks": outcome.num_blocks - entry,
        "work_share": work_share(outcome.survival, block_costs, first=first, entry=entry),
        **({} if dull is None else {"constant_accuracy": dull}),
    }


def _promised(job: CalibrateJob) -> str:
    budget = job.guarantee.budget
    return f"harm of {budget:.4g} at most" if job.metric == "harm" else f"agreement of {1 - budget:.4g}"


def promised_of(view: ExitRecords, job: CalibrateJob) -> ExitRecords:
    """Of a view of `records` the losses and ramps that the promise is of; raises DataError for what is not there."""
    try:
        promised = view if job.metric == "agreement" else view.of_harm()
    except DataError as error:
        raise DataError(f"{job.source or 'the data'}: {error}") from error
    return promised.of_ramps(job.taken(view.ramps))


def forget_calibration(folder: Path) -> None:
    """Remove thresholds and records, before the model changes: they promise nothing about another one."""
    for name in (CALIBRATION_FILE, RECORDS_FILE, ALONE_FILE):
        for each in (folder, *(folder / beside for beside in BESIDE)):
            (each / name).unlink(missing_ok=True)


def check_ramps(job: CalibrateJob, ramps: Sequence[int]) -> None:
    """Before anything runs; raises DataError for ramps that are asked for and are not there."""
    if job.ramps == "ends":
        raise DataError("the ends are those of a chain's networks, and this is a single model: name ramps by blocks")
    unknown = sorted(set(job.ramps) - set(ramps)) if isinstance(job.ramps, tuple) else []
    if unknown:
        raise DataError(f"there are no ramps {unknown} to find thresholds for, but {list(ramps)}")


def check_rows(data: Sized, job: CalibrateJob) -> None:
    """Raise DataError for too few to promise anything."""
    if len(data) < job.least_rows:
        promise = job.guarantee
        raise DataError(
            f"{job.source or 'the data'}: {len(data)} rows; at least {job.least_rows} are needed to promise "
            f"{_promised(job)} with confidence {promise.confidence:.4g}: {job.design_share:.0%} of the rows "
            f"lay the path of thresholds, {promise.least_inputs} rows test it{_of_several(promise)}"
        )


def _of_several(promise: Guarantee) -> str:
    return "" if promise.among == 1 else f", of {promise.among} calibrations; ramps that are named, or `all`, have one"


def _tested_figures(tested: ExitRecords, found: Calibration, metric: Metric, task: Task | None) -> dict[str, Any]:
    """What a calibration's thresholds did where they were tested, with all ramps active and with the worst subset."""
    figures = outcome_figures(tested.outcome(found.thresholds), task, metric)
    if metric == "harm":
        return {**figures, "worst_harm": found.worst_loss}
    return {**figures, "worst_agreement": 1 - found.worst_loss}


def outcome_figures(outcome: ExitOutcome, task: Task | None = None, metric: Metric = "agreement") -> dict[str, Any]:
    """An outcome's figures as plain data; `task` has figures of its own, where there are tallies for them."""
    return {
        "inputs": len(outcome.exits_N),
        "agreement": outcome.agreement,
        **({"harm": outcome.harm} if metric == "harm" else {}),
        "accuracy": outcome.accuracy,
        "full_accuracy": outcome.full_accuracy,
        "mean_blocks": outcome.mean_blocks,
        "num_blocks": outcome.num_blocks,
        "survival": list(outcome.survival),
        "exits": outcome.exit_counts,
        **({} if task is None else task_figures(outcome, task)),
    }


def read_calibration(folder: Path, beside: Path | None = None) -> CalibrationCard:
    """A model's calibration, its own or the one in the folder `beside` it.

    Raises ModelFolderError where it has none, one of another schema, or of other models.
    """
    path = (beside or folder) / CALIBRATION_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not calibrated; run: offramp calibrate {folder} --data VALIDATION_FILE")
    try:
        card = read_calibration_file(path)
    except DataError as error:
        raise ModelFolderError(str(error)) from error
    check_members(card.provenance, folder, path)
    _check_temperatures(folder)
    return card


def fitted_exits(exits: Iterable[int], provenance: Mapping[str, Any]) -> tuple[int, ...]:
    """The exits whose temperatures are fitted, ascending: all, and of an injected model all but the last."""
    *ramps, last = sorted(exits)
    return tuple(ramps) if "cuts" in provenance else (*ramps, last)


def _check_temperatures(folder: Path) -> None:
    """Raise ModelFolderError where earlier versions fitted the last exit's temperature to the model's own answers."""
    from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, read_card
    from earlyexit.tasks.label import LabelTask, is_at_bound

    if not (folder / CARD_FILE).is_file():
        return
    card = read_card(folder)
    for model in [folder] if card.chain.is_one else card.members(folder):
        own, temperature = read_card(model), _last_temperature(model / WEIGHTS_FILE)
        if own.task["name"] != LabelTask.name or temperature is None:
            continue
        last = own.chain.num_blocks - 1
        if is_at_bound(temperature) or (last not in fitted_exits([last], own.provenance) and temperature != 1):
            raise ModelFolderError(
                f"{model}: an earlier version calibrated it with temperature {temperature:.3g} for the last exit, "
                f"which makes its scores wrong; calibrate again: offramp calibrate {model} --data VALIDATION_FILE"
            )


def _last_temperature(weights: Path) -> float | None:
    """None of a file that holds none; a file that is broken is refused where the model is loaded."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as tensors:
            return float(tensors.get_tensor("temperatures_E")[-1])
    except (FileNotFoundError, SafetensorError):
        return None
