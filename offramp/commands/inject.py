"""`offramp inject`: makes a model folder with ramps from a foreign model and some of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.backends import open_segments
from earlyexit.clock import MonotonicClock
from earlyexit.codecs.base import Codec
from earlyexit.data.rows import IMAGE, LabelledRows, check_folder_names, has_labels, write_labelled
from earlyexit.data.text_tables import read_texts
from earlyexit.errors import DataError, GraphError, InputError
from earlyexit.families.base import Pretrained
from earlyexit.foreign import read_foreign
from earlyexit.foreign.dataflow import Site
from earlyexit.foreign.model import ForeignModel, ForeignOptions
from earlyexit.foreign.onnx_file import OPEN_SIZE
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Encoded
from earlyexit.network.checkpoint import add_ramps
from earlyexit.network.model import EarlyExitModel, check_inputs
from earlyexit.network.store import load_model, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import Progress, TrainOptions, exit_features, exit_outputs, no_progress, train_ramps
from offramp.commands.jobs import MOST_BLOCKS, CalibrateJob, InjectJob, InjectOptions
from offramp.commands.kinds import codec_for, load_codec
from offramp.commands.output import command, warn
from offramp.commands.progress import progress_bars, provenance
from offramp.commands.train import HELD_OUT, in_place_of, outputs_of_features, unlabelled, warnings_on
from optimizer.injection import balanced_cuts, worth_their_time
from profiles.measure import LiveSplits, latency_tables, profile_splits, time_splits
from profiles.table import FloatArray

LENGTH = 16
"""Tokens of the timed inputs: a short text, for which ramps cost most in relation."""
REPEATS = 15


NO_TABLE = 2
"""Bound of random numbers for an ONNX graph that does not tell the size of its table."""
Say = Callable[[str], None]
Cuts = tuple[tuple[str, ...], ...]
"""Names of the tensors between every two blocks."""
Times = Callable[[EarlyExitModel, Path], tuple[FloatArray, FloatArray]]


def ramps_worth_their_time(
    ramps: Sequence[int], block_s: FloatArray, ramp_s: FloatArray, *, asked: bool, say: Say
) -> tuple[int, ...]:
    """Returns the ramps without those that take longer than the blocks up to the next exit.

    `asked`: the caller named them; then one that takes longer is refused. Raises InputError for that, and where none is
    left.
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
    if asked or not kept:
        raise InputError(f"{why}; {'--ramps without it' if kept else '--blocks fewer'}, or a lighter --ramp-style")
    say(f"no ramps after blocks {', '.join(map(str, slow))}: {why}")
    return kept


def time_exits(model: EarlyExitModel, folder: Path) -> tuple[FloatArray, FloatArray]:
    """Returns the seconds of every block and of every ramp, for one input on one thread."""
    length = min(LENGTH, model.max_length)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rng = np.random.default_rng(0)
        runner = LiveSplits(model, rng, open_segments("torch", model, folder, 1))
        splits = profile_splits(model.num_blocks, model.ramp_indices, (1,), (length,))
        points = time_splits(splits, runner.prepare, clock=MonotonicClock(), rng=rng, repeats=REPEATS)
    finally:
        torch.set_num_threads(threads)
    # The quickest round of each: what else the machine does only ever adds, and much to calls as short as a ramp.
    quickest = [replace(point, seconds=(min(point.seconds),)) for point in points]
    table = latency_tables(quickest, model.num_blocks, model.ramp_indices)[length]
    return table.block_s_NB[:, 0], table.ramp_s_EB[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """The result of an injection."""

    model: EarlyExitModel
    rows: int
    """Number of rows that ramps were trained on."""
    right: float | None
    """Share of these rows that the model answers as labelled; None without labels."""
    held_out: Path | None
    warnings: tuple[str, ...] = ()
    """Reasons against serving the model or its exits, with what to do."""


def inject(
    job: InjectJob,
    data: LabelledRows,
    out: Path,
    *,
    progress: Progress = no_progress,
    say: Say = lambda _: None,
    times: Times = time_exits,
) -> Injected:
    """Cuts a model, trains ramps on it while it stays as it is, and saves it in place of the folder's model.

    What is refused leaves the folder as it was. Rows without labels have empty ones. Raises DataError, GraphError,
    ModelFolderError or InputError for what cannot be used, before anything is trained; `say` hears what was found,
    `times` says how long blocks and ramps take.
    """
    parts = _divided(job, data)
    foreign = read_model(job, data)
    codec = codec_for(job, foreign.inputs, data, longest=foreign.longest)
    with in_place_of(out) as folder:
        done = _injected(job, foreign, codec, parts, folder, progress=progress, say=say, times=times)
    held_out = None if done.held_out is None else out / done.held_out.name
    return replace(done, model=load_model(out), held_out=held_out)


def read_model(job: InjectJob, data: LabelledRows) -> ForeignModel:
    """Returns the foreign model; raises InputError if it is none."""
    asked = ForeignOptions(output=job.output, columns=data.kind, image_size=job.image_size, pixels=job.pixels)
    # Longer texts than it takes could not be timed.
    return read_foreign(job.backbone, asked, open_size=min(OPEN_SIZE, job.max_length or OPEN_SIZE))


def _injected(
    job: InjectJob,
    foreign: ForeignModel,
    codec: NamedSpec,
    parts: tuple[LabelledRows, LabelledRows | None],
    folder: Path,
    *,
    progress: Progress,
    say: Say,
    times: Times,
) -> Injected:
    """Injects into an empty folder."""
    learned, held = parts
    encoder = load_codec(codec, job, folder)
    encoded = learned.encode(encoder)
    pretrained, cuts = _cut(job, foreign, codec, encoded, folder, say)
    assert pretrained.head is not None
    numbers = tuple(map(str, range(pretrained.head.num_outputs)))
    with_ramps = partial(_with_ramps, job, foreign, codec, pretrained)
    check_inputs(with_ramps((), numbers), encoded[0])
    _check_looked_up(job, pretrained.backbone.inputs, encoded)
    check_names(job, learned, numbers)
    untrained = with_ramps(job.ramps, numbers)
    asked = job.ramps is not None
    block_s, ramp_s = times(untrained, folder)
    ramps = ramps_worth_their_time(untrained.ramp_indices, block_s, ramp_s, asked=asked, say=say)
    unnamed = with_ramps(ramps, numbers)
    features = exit_features(unnamed, encoded, progress=progress)
    answers = _answers(unnamed, features, job)
    names = answer_names(job, learned, answers, numbers)
    labels = {*learned.label_names, *(() if held is None else held.label_names)}
    if unknown := labels - {*names, ""}:
        say(f"labels are not looked at: {min(unknown)!r} is none of the model's {len(names)} answers")
        learned, held = unlabelled(learned), None if held is None else unlabelled(held)
    model = with_ramps(ramps, names, _facts(job, pretrained, cuts, learned))
    targets = learned.labels if learned.are_labelled else [names[k] for k in answers.tolist()]
    before = model.backbone.sha256()
    truth_N = model.task.targets(targets)
    imitate = job.from_answers or not learned.are_labelled
    options = job.training(TrainOptions(), imitate=imitate, progress=progress)
    train_ramps(model, encoded, truth_N, options, features=features)
    assert model.backbone.sha256() == before
    save_model(model, folder)
    outputs = outputs_of_features(model, features)
    right = [names[k] == label for k, label in zip(answers.tolist(), learned.labels, strict=True)]
    return Injected(
        model=model,
        rows=len(learned),
        right=sum(right) / len(right) if learned.are_labelled else None,
        held_out=None if held is None else _written(model, held, encoder, folder, progress),
        warnings=tuple(warnings_on(outputs, model.task, truth_N, model.info.provenance, block_costs=block_s.tolist())),
    )


def _cut(
    job: InjectJob, foreign: ForeignModel, codec: NamedSpec, rows: Sequence[Encoded], folder: Path, say: Say
) -> tuple[Pretrained, Cuts]:
    """Returns the network in blocks and where it is cut, and writes its files; raises GraphError for too few sites."""
    sites = crossing_sites(job, foreign, codec, say)
    wanted = job.blocks or min(MOST_BLOCKS, len(sites) + 1)
    if wanted > len(sites) + 1:
        raise GraphError(
            f"--blocks {wanted}: {job.backbone} has {len(sites)} sites, for at most {len(sites) + 1} blocks"
            f"{'' if job.sets else '; --sets looks for sets of tensors too'}"
        )
    chosen = balanced_cuts([site.seconds_share or 0.0 for site in sites], wanted)
    cuts = tuple(sites[k].tensors for k in chosen)
    say(f"{job.backbone}: {len(foreign.flow.operators)} operators, {len(sites)} sites, {len(cuts) + 1} blocks")
    if len(sites) < 2 and not job.sets:
        say("--sets looks for more, where two or three tensors carry everything together")
    return foreign.build(cuts, codec, folder, rows), cuts


def _with_ramps(
    job: InjectJob,
    foreign: ForeignModel,
    codec: NamedSpec,
    pretrained: Pretrained,
    at: tuple[int, ...] | None,
    names: Sequence[str],
    provenance: dict[str, Any] | None = None,
) -> EarlyExitModel:
    return add_ramps(
        pretrained,
        name=job.name,
        family=foreign.family,
        codec=codec,
        task=LabelTask(names),
        ramps=replace(job.ramp_options, at=at),
        provenance=provenance,
    )


def _divided(job: InjectJob, data: LabelledRows) -> tuple[LabelledRows, LabelledRows | None]:
    """Returns the rows to train on and those for calibration; raises DataError for too few rows."""
    where, promise = job.source or "the data", CalibrateJob()
    least = promise.guarantee.least_inputs
    if len(data) < least:
        raise DataError(
            f"{where}: {len(data)} rows; at least {least} are needed: fewer show nothing of how often ramps agree with "
            f"the model; give more rows, and {promise.least_rows} others to calibrate by, which are needed for "
            f"{promise.in_words}"
        )
    if data.are_labelled and len(data.label_names) < 2 and not job.from_answers:
        raise DataError(f"{where}: only one class, {data.labels[0]!r}; a classifier's inputs are of at least two")
    if job.hold_out is None:
        return data, None
    if data.are_objects and IMAGE in data.columns:
        check_folder_names({*(job.names or ()), *data.label_names} - {""})
    learned, held = data.divide(job.hold_out, job.seed)
    if len(held) < promise.least_rows:
        raise DataError(
            f"{where}: --hold-out {job.hold_out:g} keeps {len(held)} rows; {promise.least_rows} are needed to "
            f"calibrate by, for {promise.in_words}: give more rows or a larger share"
        )
    return learned, held


def crossing_sites(job: InjectJob, foreign: ForeignModel, codec: NamedSpec, say: Say) -> tuple[Site, ...]:
    """Returns the sites where the model can be cut; raises GraphError if there is none."""
    sites = foreign.with_answer(codec).sites(sets=job.sets)
    if not sites:
        hint = "nor do sets of three" if job.sets else "--sets cuts where two or three do together"
        raise GraphError(
            f"{job.backbone}: no site: nowhere between its operators one tensor carries everything; {hint}"
        )
    refused = foreign.refused([site.tensors for site in sites], codec)
    if not refused:
        return sites
    lost, why = ", ".join(" and ".join(map(repr, tensors)) for tensors in refused), next(iter(refused.values()))
    found = tuple(site for site in sites if site.tensors not in refused)
    if not found:
        raise GraphError(f"{job.backbone}: no site that can be cut at; not at {lost}: {why}")
    say(f"no cut at {lost}: {why}")
    return found


def _check_looked_up(job: InjectJob, inputs: Boundary, encoded: Sequence[Encoded]) -> None:
    """Raises InputError for integers beyond the network's lookup table."""
    for index, spec in enumerate(inputs):
        rows = spec.below or NO_TABLE
        largest = max(int(each.tensors[index].max(initial=0)) for each in encoded)
        if spec.dtype != "float" and rows > NO_TABLE and largest >= rows:
            whose = f"; --tokenizer {job.tokenizer} is another model's" if job.tokenizer is not None else ""
            raise InputError(
                f"{job.source or 'the data'}: {spec.name!r} goes up to {largest}, and {job.backbone} looks it up in a "
                f"table of {rows} rows{whose}"
            )


def _answers(model: EarlyExitModel, features: dict[int, Tensor], job: InjectJob) -> Tensor:
    """Returns the model's own answers (N,); raises DataError for NaN or infinity, or if all answers are equal."""
    where = job.source or "the data"
    for block in sorted(features, reverse=True):
        finite_N = features[block].flatten(1).isfinite().all(1)
        if not finite_N.all():
            row = int((~finite_N).int().argmax())
            raise DataError(f"{where}: of row {row + 1} block {block} gives NaN or infinite numbers")
    with torch.inference_mode():
        outputs_NC = model.head.classify(features[model.num_blocks - 1])
    answers_N: Tensor = outputs_NC.argmax(1)
    if len(set(answers_N.tolist())) < 2:
        raise DataError(f"{where}: the model answers every row alike; ramps learn from rows of at least two answers")
    return answers_N


def _facts(job: InjectJob, pretrained: Pretrained, cuts: Cuts, data: LabelledRows) -> dict[str, Any]:
    return provenance(
        backbone=job.backbone,
        backbone_sha256=pretrained.backbone.sha256(),
        cuts=[list(each) for each in cuts],
        data=job.source,
        rows=len(data),
        imitate=job.from_answers or not data.are_labelled,
        seed=job.seed,
    )


def _written(model: EarlyExitModel, held: LabelledRows, encoder: Codec[Any], out: Path, progress: Progress) -> Path:
    """Writes the rows held out, labelled with the model's answers if they have no labels; returns the file."""
    if not held.are_labelled:
        outputs_NC = exit_outputs(model, held.encode(encoder), progress=progress)[model.num_blocks - 1]
        assert isinstance(model.task, LabelTask)
        names = model.task.label_names
        held = held.with_labels(names[k] for k in outputs_NC.argmax(1).tolist())
    return write_labelled(held, out, HELD_OUT)


KNOWN_MEANS = ((0.485, 0.456, 0.406), (0.4815, 0.4578, 0.4082))
"""Means of red, green, blue in ImageNet (torchvision) and in CLIP's training data (openai/CLIP, clip.py)."""


def run(job: InjectOptions) -> None:
    """Injects, and prints the result and what to do next."""
    warn_of_reversed_means(job)
    if job.labels is not None:
        job = job.model_copy(update={"names": read_texts(job.labels)})
    rows = read_rows(job)
    with progress_bars() as progress:
        done = inject(job, rows, job.out, progress=progress, say=print)
    source = "the model's own answers" if done.model.info.provenance["imitate"] else "labels"
    print(f"{done.rows} rows, ramps after blocks {list(done.model.ramp_indices)} trained from {source}: {job.out}")
    if done.right is not None:
        print(f"the model answers {done.right:.1%} of the rows as they are labelled")
    for each in done.warnings:
        warn(each)
    kept = "FILE" if done.held_out is None else done.held_out
    print(f"next: {command('calibrate', job.out, '--data', kept)}, then {command('serve', job.out)}")


def read_rows(job: InjectOptions) -> LabelledRows:
    """Returns rows, with labels if there are any: they also name the model's answers."""
    without = job.label_column is None and has_labels(job.data, part=job.part)
    return job.read(job.data, label_column="label" if without else job.label_column)


def warn_of_reversed_means(job: InjectJob) -> None:
    """Prints a warning if the means of the channels are well-known ones in reverse order."""
    if job.mean is None:
        return
    in_bgr = job.mean if job.bgr else job.mean[::-1]
    if any(all(abs(a - b) < 1e-3 for a, b in zip(in_bgr, known, strict=True)) for known in KNOWN_MEANS):
        order = "with --bgr the order is blue,green,red" if job.bgr else "without --bgr the order is red,green,blue"
        given = ",".join(map(str, job.mean))
        warn(f"--mean {given}: these are well-known means, but reversed; {order}")


def check_names(job: InjectJob, data: LabelledRows, numbers: tuple[str, ...]) -> None:
    """Raises DataError if ramps are to learn labels that do not fit the model's number of answers."""
    where, num_outputs, labels = job.source or "the data", len(numbers), data.label_names
    if job.names is not None:
        if len(job.names) != num_outputs or len(set(job.names)) < num_outputs:
            raise DataError(f"--labels: {len(set(job.names))} different names; the model has {num_outputs} answers")
        unknown = sorted(set(labels) - {*job.names, ""})
        if unknown and not job.from_answers:
            raise DataError(f"{where}: {unknown[0]!r} is none of the names in --labels")
    elif not job.from_answers and not set(labels) <= {*numbers, ""} and len(labels) != num_outputs:
        raise DataError(
            f"{where}: {len(labels)} different labels, and the model has {num_outputs} answers; --labels "
            "FILE names all of them in the model's order, a line each"
        )


def answer_names(job: InjectJob, data: LabelledRows, answers: Tensor, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """Returns names of the answers: as asked for, else the data's labels in the order that fits most answers.

    `numbers`, 0 to C - 1, where rows have no labels or none but these, and where `check_names` lets other labels pass.
    Of orders that fit as many, it is the one nearest the alphabet.
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
