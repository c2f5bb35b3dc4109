"""`offramp ramp`: adds calibrated ramps to a fine-tuned classifier of `transformers`, with texts of a log."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows, has_labels
from earlyexit.data.text_tables import TABLES, stream_table
from earlyexit.errors import DataError
from earlyexit.network.store import read_card
from offramp.commands.calibrate import calibrate
from offramp.commands.folders import checkpoint_labels, model_name_for
from offramp.commands.jobs import CalibrateJob, ProfileJob, RampJob, TrainJob, few_rows_advice
from offramp.commands.output import command, percent, print_result, progress_bars, warn
from offramp.commands.profile import KEPT_FILE, kept_profile
from offramp.commands.thresholds import calibration_warnings
from offramp.commands.train import train, unlabelled
from optimizer.calibration.calibration_file import CalibrationCard
from profiles.latency import LatencyProfile


def run(job: RampJob) -> None:
    """Trains and calibrates ramps, and prints the time that they save, with the command of the faster service."""
    labels = checkpoint_labels(job.folder)
    out, source = job.out or Path("runs") / model_name_for(job.folder), str(job.data)
    promise = CalibrateJob(
        budget=job.budget, confidence=job.confidence, seed=job.seed, source=source, latency=out / KEPT_FILE
    )
    rows = read_log(job, labels)
    learned, held = _divided(rows, promise)
    training = TrainJob(backbone=str(job.folder), name=model_name_for(out), seed=job.seed, source=source)
    with progress_bars() as progress:
        train(training, unlabelled(learned), out, progress=progress)
        lengths = [each.length for each in learned.encode(find_codec(read_card(out).codec, out))]
        measured = ProfileJob(backend="auto", lengths=(max(1, round(np.mean(lengths))),))
        profile = kept_profile(out, measured, lambda message: print(message, file=sys.stderr))
        card, _ = calibrate(out, held, promise, progress=progress)
    saved, tested = saved_share(card, profile), card.tested
    change = f"{percent(round(abs(saved), 2))} {'less' if saved > 0 else 'more'}" if abs(saved) >= 0.005 else "no less"
    lines = [
        f"{change} processor time than the model; at least {percent(1 - card.budget)} of the answers stay the same, "
        f"with {percent(card.confidence)} confidence",
        f"tested on {tested['inputs']:,} of {len(rows):,} rows: {percent(tested['agreement'])} of the answers were "
        f"the same, after {tested['mean_blocks']:.2f} of {tested['num_blocks']} blocks",
    ]
    if held.are_labelled:
        full = percent(tested["full_accuracy"])
        lines.append(f"{percent(tested['accuracy'])} of the answers equal the label; of the checkpoint's, {full}")
    best = [out] if saved > 0 else [job.folder] if job.pair_column is None else [out, "--plan", "stock"]
    document = {"saved": saved, "rows": len(rows), "thresholds": card.thresholds, "tested": tested}
    warn(*calibration_warnings(card, {}, read_card(out).provenance, None))
    print_result(document, lines=[*lines, f"next: {command('serve', *best)}"], as_json=job.as_json)


def read_log(job: RampJob, labels: tuple[str, ...]) -> LabelledRows:
    """Returns the rows of the log, with labels if each row has one of the checkpoint's labels."""
    column = "label" if job.label_column is None and has_labels(job.data, part=job.part) else job.label_column
    may_lack_some = job.data.suffix.lower() in TABLES and column is not None  # other formats label all rows or none
    rows = job.read(job.data, label_column=None if may_lack_some else column)
    if may_lack_some:
        rows = rows.with_labels(label for _, _, label in stream_table(job.data, (job.text_column,), column))
    missing = sum(not label.strip() for label in rows.labels)
    unknown = sorted({*rows.labels} - {*labels})
    if not rows.are_labelled or not (missing or unknown):
        return rows
    reason = f"{missing} of {len(rows)} rows have none" if missing else f"{unknown[0]!r} is none of the checkpoint's"
    warn(f"{job.data}: labels are ignored: {reason}")
    return unlabelled(rows)


def _divided(rows: LabelledRows, promise: CalibrateJob) -> tuple[LabelledRows, LabelledRows]:
    """Returns the rows to train on and the rows to calibrate on, which are half of all, or more if necessary.

    Raises DataError for too few rows.
    """
    num_calibration, num_training = promise.min_rows, promise.guarantee.least_inputs
    if len(rows) < num_calibration + num_training:
        advice = few_rows_advice(promise, len(rows), lambda each: each.min_rows + each.guarantee.least_inputs)
        raise DataError(
            f"{promise.source}: {len(rows)} rows; {num_calibration} rows are needed for {promise.guarantee_text}, and "
            f"{num_training} others to train ramps; {advice}"
        )
    order = np.random.default_rng(promise.seed).permutation(len(rows))
    split = min(len(rows) // 2, len(rows) - num_calibration)
    return rows.select(sorted(order[:split].tolist())), rows.select(sorted(order[split:].tolist()))


def saved_share(card: CalibrationCard, profile: LatencyProfile) -> float:
    """Returns the share of the full model's time that exits save at the largest measured batch, ramps included."""
    table = profile.tables[profile.lengths[0]]
    block_s, ramp_s = table.block_s_NB[:, -1], dict(zip(profile.ramps, table.ramp_s_EB[:, -1], strict=True))
    survival = card.tested["survival"]
    spent_s = np.dot(survival, block_s) + sum(survival[ramp] * ramp_s[ramp] for ramp in card.thresholds)
    return float(1 - spent_s / block_s.sum())
