"""`offramp inject`: adds ramps to an ONNX file or a torch module, and writes a model folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from earlyexit.data.rows import IMAGE, PAIR, LabelledRows, check_folder_names, has_labels, write_labelled
from earlyexit.data.text_tables import stream_lines
from earlyexit.errors import DataError, GraphError, InputError
from earlyexit.foreign import open_foreign, read_foreign
from earlyexit.foreign.dataflow import Site
from earlyexit.foreign.model import Divisible, ForeignModel, ForeignOptions
from earlyexit.foreign.onnx_file import OPEN_SIZE
from earlyexit.named import is_own
from earlyexit.network.checkpoint import add_ramps
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import FitOptions, Progress, exit_features, exit_outputs, no_progress, train_ramps
from offramp.commands.folders import replacing_model
from offramp.commands.jobs import HELD_OUT, MAX_BLOCKS, CalibrateJob, InjectJob, InjectOptions, ProfileJob
from offramp.commands.output import command, progress_bars, provenance, warn
from offramp.commands.profile import profile_model
from offramp.commands.train import (
    check_encoded,
    codec_for,
    load_codec,
    outputs_of_features,
    ramp_options,
    training_options,
    unlabelled,
    warnings_on,
)
from optimizer.search.injection import balanced_cuts, worth_their_time
from profiles.measure import latency_tables
from profiles.table import FloatArray

LENGTH = 16
"""Length of the timed inputs in tokens: short, because ramps cost most relative to short inputs."""
REPEATS = 15
Times = Callable[[EarlyExitModel, Path], tuple[FloatArray, FloatArray]]


def ramps_worth_their_time(
    job: InjectJob, ramps: Sequence[int], block_s: FloatArray, ramp_s: FloatArray
) -> tuple[int, ...]:
    """Returns the ramps without those that take longer than the blocks up to the next exit, which it prints.

    Raises InputError if no ramp remains, or if `job.ramps` names a ramp that takes longer.
    """
    kept = worth_their_time(ramp_s.tolist(), block_s.tolist(), ramps)
    slow = [ramp for ramp in ramps if ramp not in kept]
    if not slow:
        return kept
    first = slow[0]
    following = next(ramp for ramp in (*kept, len(block_s) - 1) if ramp > first)
    why = (
        f"the ramp after block {first} takes {ramp_s[ramps.index(first)] * 1e3:.3g} ms, the blocks up to the next exit "
        f"{block_s[first + 1 : following + 1].sum() * 1e3:.3g} ms"
    )
    if job.ramps is not None or not kept:
        fewer = "lower --blocks" if len(block_s) > 2 else "serve the model without ramps"
        lighter = "" if job.ramp_style == "light" else ", or choose a lighter --ramp-style"
        raise InputError(f"{why}; {'leave it out of --ramps' if kept else fewer}{lighter}")
    print(f"no ramps after blocks {', '.join(map(str, slow))}: {why}")
    return kept


def time_exits(model: EarlyExitModel, folder: Path) -> tuple[FloatArray, FloatArray]:
    """Returns the time of each block and of each ramp in seconds, for one input on one thread.

    The model is saved in the folder, and measured there.
    """
    save_model(model, folder)
    length = min(LENGTH, model.max_length)
    _, points = profile_model(folder, ProfileJob(batches=(1,), lengths=(length,), repeats=REPEATS))
    # The fastest round of each, because other work on the machine slows down calls as short as a ramp.
    quickest = [replace(point, seconds=(min(point.seconds),)) for point in points]
    table = latency_tables(quickest, model.num_blocks, model.ramp_indices)[length]
    return table.block_s_NB[:, 0], table.ramp_s_EB[:, 0]


class InjectionResult(NamedTuple):
    """The result of an injection."""

    model: EarlyExitModel
    right: float | None
    """Share of the rows for which the model's answer is the label; None without labels."""
    held_out: Path | None
    warnings: Sequence[str]
    """Reasons against serving the model or its exits, with advice."""


def inject(
    job: InjectJob, data: LabelledRows, out: Path, *, progress: Progress = no_progress, times: Times = time_exits
) -> InjectionResult:
    """Cuts a model into blocks, trains ramps on the frozen model, and saves it in place of the folder's model.

    Prints messages about the model. `times` measures blocks and ramps. Raises DataError, GraphError, ModelFolderError
    or InputError before anything is trained, and then leaves the folder unchanged.
    """
    learned, held = _divided(job, data)
    foreign = read_model(job, data)
    spec = codec_for(job, foreign.inputs, data, longest=foreign.longest)
    with replacing_model(out) as folder:
        codec = load_codec(spec, job, folder)
        encoded = learned.encode(codec)
        cuts = _choose_cuts(job, opened := open_foreign(foreign, spec, folder))
        pretrained = opened.build(cuts, encoded)
        assert pretrained.head is not None
        numbers = tuple(map(str, range(pretrained.head.num_outputs)))
        make = partial(add_ramps, pretrained, name=job.name, family=foreign.family, codec=spec, task=LabelTask(numbers))
        check_names(job, learned, numbers)
        model = make(ramps=ramp_options(job))
        check_encoded(job, model, encoded)
        block_s, ramp_s = times(model, folder)
        at = ramps_worth_their_time(job, model.ramp_indices, block_s, ramp_s)
        model = make(ramps=replace(ramp_options(job), at=at))
        features = exit_features(model, encoded, progress=progress)
        answers = _answers(model, features, job)
        names = answer_names(job, learned, answers, numbers)
        if unknown := {*learned.label_names, *(() if held is None else held.label_names)} - {*names, ""}:
            print(f"labels are ignored: {min(unknown)!r} is none of the model's {len(names)} answers")
            learned, held = unlabelled(learned), None if held is None else unlabelled(held)
        facts = provenance(
            backbone=job.backbone,
            backbone_sha256=model.backbone.sha256(),
            cuts=cuts,
            data=job.source,
            rows=len(learned),
            seed=job.seed,
        )
        model.info = replace(model.info, task=LabelTask(names), provenance=facts | dict(model.info.provenance))
        own_labels = [names[k] for k in answers.tolist()]
        truth_N = model.task.targets(learned.labels if learned.are_labelled else own_labels)
        options = training_options(job, FitOptions(), progress=progress)
        train_ramps(model, encoded, truth_N, options, features=features)
        save_model(model, folder)
        outputs = outputs_of_features(model, features)
        warnings = warnings_on(outputs, model.task, truth_N, facts, block_costs=block_s.tolist())
        if held is not None and not held.are_labelled:
            outputs_NC = exit_outputs(model, held.encode(codec), progress=progress)[model.num_blocks - 1]
            held = held.with_labels(names[k] for k in outputs_NC.argmax(1).tolist())
        held_out = None if held is None else out / write_labelled(held, folder, HELD_OUT).name
    right = float(np.mean(np.array(own_labels) == learned.labels)) if learned.are_labelled else None
    return InjectionResult(load_model(out), right, held_out, warnings)


def read_model(job: InjectJob, data: LabelledRows) -> ForeignModel:
    """Returns the foreign model.

    Raises InputError for a file or function that is not a model, and for options of images that it does not take.
    """
    given = job.pixels or job.image_size is not None
    if given and (is_own(job.backbone) or data.kind != (IMAGE,)):
        raise InputError(
            "--image-size, --mean, --std and --bgr say how an ONNX file takes images: leave them out for torch "
            "modules, and for rows that are not images"
        )
    arrays = not data.kind and job.codec is None
    options = ForeignOptions(
        output=job.output, columns=data.kind, arrays=arrays, image_size=job.image_size, pixels=job.pixels
    )
    # Inputs for timing must not be longer than the model allows.
    return read_foreign(job.backbone, options, open_size=min(OPEN_SIZE, job.max_length or OPEN_SIZE))


def _choose_cuts(job: InjectJob, opened: Divisible) -> list[list[str]]:
    """Returns the names of the tensors between each two blocks; raises GraphError for too few sites."""
    sites = crossing_sites(job, opened)
    num_blocks = job.blocks or min(MAX_BLOCKS, len(sites) + 1)
    if num_blocks > len(sites) + 1:
        raise GraphError(
            f"--blocks {num_blocks}: {job.backbone} has {len(sites)} sites, for at most {len(sites) + 1} blocks"
            f"{'' if job.sets else '; --sets looks for sets of tensors too'}"
        )
    chosen = balanced_cuts([site.seconds_share or 0.0 for site in sites], num_blocks)
    print(f"{job.backbone}: {len(opened.flow.operators)} operators, {len(sites)} sites, {num_blocks} blocks")
    if len(sites) < 2 and not job.sets:
        print("--sets finds more sites, at which two or three tensors together carry all information")
    return [list(sites[k].tensors) for k in chosen]


def _divided(job: InjectJob, data: LabelledRows) -> tuple[LabelledRows, LabelledRows | None]:
    """Returns the rows to train on, and the rows for calibration; raises DataError for too few rows."""
    where, promise = job.source, CalibrateJob()
    least = promise.guarantee.least_inputs
    if len(data) < least:
        raise DataError(
            f"{where}: {len(data)} rows; at least {least} are needed to train ramps, and {promise.min_rows} other rows "
            f"to calibrate for {promise.guarantee_text}: give more rows"
        )
    if data.are_labelled and len(data.label_names) < 2 and not job.from_answers:
        raise DataError(f"{where}: only one class, {data.labels[0]!r}; a classifier needs at least two")
    if job.hold_out is None:
        return data, None
    if data.are_objects and IMAGE in data.columns:
        check_folder_names({*(job.names or ()), *data.label_names} - {""})
    learned, held = data.divide(job.hold_out, job.seed)
    if len(held) < promise.min_rows or len(learned) < least:
        raise DataError(
            f"{where}: --hold-out {job.hold_out:g} keeps {len(held)} of {len(data)} rows; {promise.min_rows} are "
            f"needed to calibrate for {promise.guarantee_text}, and {least} others to train ramps"
        )
    return learned, held


def crossing_sites(job: InjectJob, foreign: Divisible) -> tuple[Site, ...]:
    """Returns the sites where the model can be cut, and prints the others; raises GraphError if it can at none."""
    try:
        sites = foreign.sites(sets=job.sets)
    except GraphError as error:
        advice = "; if the model takes fewer tokens, set --max-length" if foreign.inputs[0].per_token else ""
        raise GraphError(f"{error}{advice}") from error
    if not sites:
        tensors = "one to three tensors carry" if job.sets else "one tensor carries"
        hint = "" if job.sets else "; --sets also cuts where two or three tensors do"
        raise GraphError(f"{job.backbone}: no site: nowhere between its operators {tensors} all information{hint}")
    refused = foreign.refused([site.tensors for site in sites])
    if not refused:
        return sites
    names = ", ".join(" and ".join(map(repr, tensors)) for tensors in refused)
    reason = next(iter(refused.values()))
    usable = tuple(site for site in sites if site.tensors not in refused)
    if not usable:
        raise GraphError(f"{job.backbone}: cannot be cut at any site; not at {names}: {reason}")
    print(f"no cut at {names}: {reason}")
    return usable


def _answers(model: EarlyExitModel, features: dict[int, Tensor], job: InjectJob) -> Tensor:
    """Returns the model's own answers (N,); raises DataError for NaN or infinity, or if all answers are equal."""
    for block in sorted(features, reverse=True):
        finite_N = features[block].flatten(1).isfinite().all(1)
        if not finite_N.all():
            row = int((~finite_N).int().argmax())
            raise DataError(f"{job.source}: row {row + 1} makes NaN or infinite numbers at block {block}")
    with torch.inference_mode():
        outputs_NC = model.head.classify(features[model.num_blocks - 1])
    answers_N: Tensor = outputs_NC.argmax(1)
    if len(set(answers_N.tolist())) < 2:
        raise DataError(f"{job.source}: the model gives all rows the same answer; ramps need different answers")
    return answers_N


KNOWN_MEANS = ((0.485, 0.456, 0.406), (0.4815, 0.4578, 0.4082))
"""Channel means (red, green, blue) of ImageNet (torchvision) and of CLIP's training data (openai/CLIP, clip.py)."""


def run(job: InjectOptions) -> None:
    """Adds ramps to a model, and prints the result and the next commands."""
    warn_of_reversed_means(job)
    if job.labels is not None:
        job = job.model_copy(update={"names": tuple(name for _, (name,), _ in stream_lines(job.labels))})
    rows = read_rows(job)
    with progress_bars() as progress:
        done = inject(job, rows, job.out, progress=progress)
    facts, ramps = done.model.info.provenance, list(done.model.ramp_indices)
    print(f"{facts['rows']} rows, ramps after blocks {ramps} trained on the model's outputs: {job.out}")
    if done.right is not None:
        print(f"the model answers {done.right:.1%} of the rows as they are labelled")
    elif job.labels is None:
        last = done.model.task.num_outputs - 1
        warn(f"answers are called 0 to {last}: name them with --labels FILE, one per line in the order of the outputs")
    warn(*done.warnings)
    if job.pooling == "mean" and any(len(done.model.takes(ramp + 1)[0].shape) == 2 for ramp in ramps):
        warn("ramps read one mean per row of the hidden states: if rows are tokens, try --pooling first")
    data, pair = ("FILE", job.pair_column) if done.held_out is None else (done.held_out, job.pair_column and PAIR)
    calibrate = command("calibrate", job.out, "--data", data, *(() if pair is None else ("--pair-column", pair)))
    print(f"next: {calibrate}, then {command('serve', job.out)}")


def read_rows(job: InjectOptions) -> LabelledRows:
    """Returns the rows, with labels if there are any."""
    by_default = job.label_column is None and has_labels(job.data, part=job.part)
    return job.read(job.data, label_column="label" if by_default else job.label_column)


def warn_of_reversed_means(job: InjectJob) -> None:
    """Prints a warning if the channel means are well-known ones in reverse order."""
    if job.mean is None:
        return
    in_bgr = job.mean if job.bgr else job.mean[::-1]
    if any(all(abs(a - b) < 1e-3 for a, b in zip(in_bgr, known, strict=True)) for known in KNOWN_MEANS):
        order = "with --bgr the order is blue,green,red" if job.bgr else "without --bgr the order is red,green,blue"
        mean = ",".join(map(str, job.mean))
        warn(f"--mean {mean}: these are well-known means in reverse order; {order}")


def check_names(job: InjectJob, data: LabelledRows, numbers: tuple[str, ...]) -> None:
    """Raises DataError if the names or labels do not fit the model's number of answers."""
    where, num_outputs, labels = job.source, len(numbers), data.label_names
    if job.names is not None:
        if len(job.names) != num_outputs or len(set(job.names)) < num_outputs:
            raise DataError(f"--labels: {len(set(job.names))} different names; the model has {num_outputs} answers")
        unknown = sorted(set(labels) - {*job.names, ""})
        if unknown and not job.from_answers:
            raise DataError(f"{where}: the label {unknown[0]!r} is not in --labels")
    elif not job.from_answers and not set(labels) <= {*numbers, ""} and len(labels) != num_outputs:
        raise DataError(
            f"{where}: {len(labels)} different labels, and the model has {num_outputs} answers; name all of them in "
            "the order of its outputs with --labels FILE, one per line"
        )


def answer_names(job: InjectJob, data: LabelledRows, answers: Tensor, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """Returns names of the answers: those of the job, else the labels in the order that agrees with most answers.

    If the labels cannot be used, the names are `numbers`, 0 to C - 1. The alphabetical one of equally good orders wins.
    """
    from scipy.optimize import linear_sum_assignment

    if job.names is not None:
        return job.names
    labels = data.label_names
    if set(labels) <= {*numbers, ""} or len(labels) != len(numbers):
        return numbers
    counts_CC = np.eye(len(labels)) / 2
    label_N = np.array([labels.index(label) for label in data.labels])
    np.add.at(counts_CC, (answers.numpy(), label_N), 1)
    _, label_of_C = linear_sum_assignment(counts_CC, maximize=True)
    return tuple(labels[k] for k in label_of_C)
