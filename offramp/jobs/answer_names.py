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


def answer_names(job: InjectJob, data: LabelledRows, answers: Tensor, num_outputs: int) -> tuple[str, ...]:
    """As asked for; else the data's labels, in the order in which the model answers most rows as they are labelled.

    The numbers 0 to C - 1 where rows have no labels, or none but these. Raises DataError where labels do not fit;
    where ramps do not learn from them, answers are numbers then.
    """
    where = job.source or "the data"
    numbers = tuple(map(str, range(num_outputs)))
    if job.labels is not None:
        _check_named(job, job.labels, data, num_outputs)
        return job.labels
    labels = data.label_names
    if set(labels) <= {*numbers, ""}:
        return numbers
    if len(labels) != num_outputs:
        if job.from_answers:
            return numbers
        raise DataError(
            f"{where}: {len(labels)} different labels, and the model has {num_outputs} answers; --labels FILE names "
            "all of them in the model's order, a line each"
        )
    return _in_the_models_order(labels, np.array([labels.index(label) for label in data.labels]), answers.numpy())


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
