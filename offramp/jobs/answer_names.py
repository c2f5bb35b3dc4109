"""Names of a foreign model's answers, in the order of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from earlyexit.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.dataset import LabelledRows
    from earlyexit.tasks.base import ValueArray
    from offramp.jobs.inject_job import InjectJob


def check_names(job: InjectJob, data: LabelledRows, num_outputs: int) -> None:
    """Raise DataError where labels do not fit a model of so many answers, and ramps are to learn from them."""
    where = job.source or "the data"
    if job.labels is not None:
        _check_named(job, job.labels, data, num_outputs)
    elif not (job.from_answers or _are_numbers(data, num_outputs)) and len(data.label_names) != num_outputs:
        raise DataError(
            f"{where}: {len(data.label_names)} different labels, and the model has {num_outputs} answers; --labels "
            "FILE names all of them in the model's order, a line each"
        )


def answer_names(job: InjectJob, data: LabelledRows, answers: Tensor, num_outputs: int) -> tuple[str, ...]:
    """As asked for; else the data's labels, in the order in which the model answers most rows as they are labelled.

    The numbers 0 to C - 1 where rows have no labels, or none but these; and where `check_names` lets other labels pass.
    """
    if job.labels is not None:
        return job.labels
    labels = data.label_names
    if _are_numbers(data, num_outputs) or len(labels) != num_outputs:
        return tuple(map(str, range(num_outputs)))
    return _in_the_models_order(labels, np.array([labels.index(label) for label in data.labels]), answers.numpy())


def _are_numbers(data: LabelledRows, num_outputs: int) -> bool:
    return set(data.label_names) <= {*map(str, range(num_outputs)), ""}


def _check_named(job: InjectJob, names: tuple[str, ...], data: LabelledRows, num_outputs: int) -> None:
    if len(names) != num_outputs or len(set(names)) < num_outputs:
        raise DataError(f"--labels: {len(set(names))} different names; the model has {num_outputs} answers")
    unknown = sorted(set(data.label_names) - {*names, ""})
    if unknown and not job.from_answers:
        raise DataError(f"{job.source or 'the data'}: {unknown[0]!r} is none of the names in --labels")


def _in_the_models_order(labels: tuple[str, ...], label_N: ValueArray, answer_N: ValueArray) -> tuple[str, ...]:
    """The assignment of labels to outputs under which most rows are answered right; among equals the alphabet's."""
    from scipy.optimize import linear_sum_assignment

    counts_CC = np.eye(len(labels)) / 2
    np.add.at(counts_CC, (answer_N, label_N), 1)
    _, label_of_C = linear_sum_assignment(counts_CC, maximize=True)
    return tuple(labels[k] for k in label_of_C)
