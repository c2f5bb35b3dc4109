"""How long simulated inputs are: as a file says, as exit records know, or drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from earlyexit.errors import DataError, InputError, PlanError
from offramp.jobs.simulated_inputs import NUM_ROWS, Inputs
from optimizer.lengths_file import tokens_of
from optimizer.tokens import in_tokens
from profiles.lengths import Lengths
from simulator.decisions import IntArray
from simulator.lengths import truncated_normal

if TYPE_CHECKING:
    from optimizer.problem_file import ProblemFile

STREAM = 2
"""Of the seed: what is drawn here leaves arrivals and exits as they are."""
FORM = "mean,variance,low,high"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenLengths:
    """What `--lengths` says."""

    tokens_N: IntArray
    words: str


def given_lengths(text: str, seed: int) -> GivenLengths:
    """A file's lengths, or drawn ones; raises InputError naming the option."""
    try:
        if "," not in text:
            tokens_N = tokens_of(Path(text))
            return GivenLengths(tokens_N=tokens_N, words=f"{len(tokens_N)} lengths of {text}, drawn at random")
        mean, variance, low, high = _numbers(text)
        drawn_N = truncated_normal(NUM_ROWS, mean=mean, variance=variance, low=round(low), high=round(high), seed=seed)
    except DataError as error:
        raise InputError(f"--lengths {text}: {error}") from error
    return GivenLengths(tokens_N=drawn_N, words=f"normal: mean {mean:g}, variance {variance:g}, {low:g} to {high:g}")


def with_lengths(file: ProblemFile, given: GivenLengths | None) -> ProblemFile:
    """The problem of inputs with these lengths; raises InputError where its latencies do not say what such take."""
    if given is None:
        return file
    try:
        problem = replace(file.problem, lengths=Lengths.of(given.tokens_N.tolist()), batches=None)
        in_tokens(problem)
    except (PlanError, DataError) as error:
        raise InputError(f"--lengths: {error}") from error
    return replace(file, problem=problem)


def lengthened(inputs: Inputs, file: ProblemFile, given: GivenLengths | None, seed: int) -> Inputs:
    """The inputs with their lengths: the option's, or where the problem has lengths, the records' own or its own."""
    lengths, rows = file.problem.lengths, inputs.decisions.num_rows
    if lengths is None:
        return inputs
    rng = np.random.default_rng([seed, STREAM])
    if given is not None:
        lengths_R, words = rng.choice(given.tokens_N, rows), given.words
    elif inputs.tokens_R is not None:
        lengths_R, words = inputs.tokens_R, "as recorded"
    elif lengths.shares is None:
        lengths_R, words = np.full(rows, max(1, round(lengths.mean))), "the problem's mean, all alike"
    else:
        kinds, shares = zip(*lengths.shares, strict=True)
        chance = np.array(shares)
        lengths_R, words = rng.choice(kinds, rows, p=chance / chance.sum()), "drawn from the problem's"
    said = f"{words}, {lengths_R.mean():.4g} tokens on average"
    return replace(
        inputs,
        lengths_R=lengths_R.astype(np.int64),
        words=f"{inputs.words}; lengths: {said}",
        document={**inputs.document, "lengths": said},
    )


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--lengths {text!r}; a file, or {FORM} is needed") from error
    if len(numbers) != len(FORM.split(",")) or not all(np.isfinite(numbers)):
        raise InputError(f"--lengths {text!r}; a file, or {FORM}, four finite numbers, is needed")
    if any(number != round(number) for number in numbers[2:]):
        raise InputError(f"--lengths {text!r}; low and high are whole numbers of tokens")
    return numbers
