"""`offramp calibrate` of a decoder: exit records of its generations, and thresholds with a promise for sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import DataError
from earlyexit.network.store import load_model
from earlyexit.policies import make_policy
from earlyexit.sequences.offline import Asked, Generated, generate
from earlyexit.tasks.token import TokenTask, first_token
from offramp.commands.calibrated import (
    check_ramps,
    facts_of,
    forget_calibration,
    outcome_figures,
    parts_of,
    save_calibration,
)
from offramp.commands.jobs import CalibrateJob
from offramp.commands.train import prompts_of
from offramp.commands.worth import work_share
from optimizer.calibration_file import CalibrationCard
from optimizer.plan import policy_of_score
from optimizer.sequences import bounded_losses, learn_then_test_sequences, of_sequences, sequences_of
from profiles.networks import DECAY, decay_of
from profiles.records import ExitRecords
from profiles.scores import SCORES, Score

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.training.ramps import Progress
    from optimizer.sequences import SequenceCalibration

ANSWER = 64
"""Tokens of an answer, where neither is said how many nor did ramps learn of answers."""


def calibrate_tokens(
    folder: Path, data: LabelledRows, job: CalibrateJob, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Record the full model's answers to prompts, every ramp looking, and find thresholds; raises as `calibrate`.

    Prompts are texts or what a user says in a chat, as those were that ramps learned of.
    """
    if job.metric == "harm" or job.ensemble or job.prune is not None:
        raise DataError("what is promised of a decoder is how far its answers are from the full model's")
    model = load_model(folder)
    check_ramps(job, model.ramp_indices)
    codec = find_codec(model.info.codec, folder)
    assert isinstance(codec, PromptCodec)
    assert isinstance(model.task, TokenTask)
    learned = model.info.provenance
    chat, answers = bool(learned.get("chat")), job.answers or learned.get("answers") or ANSWER
    facts = facts_of(job) | {"answers": answers, "chat": chat} | ({} if job.decay is None else {DECAY: job.decay})
    prompts = prompts_of(codec, data, model.task, chat=chat)
    score = job.policy or "foreseen"
    records = record_generations(
        model, prompts, score, decay=job.decay, max_tokens=answers, provenance=facts, progress=progress
    )
    card = card_of_sequences(records, job, facts)
    forget_calibration(folder)
    save_calibration(card, records, folder)
    return card, records


def record_generations(
    model: EarlyExitModel,
    prompts: Sequence[Sequence[int]],
    score: Score,
    *,
    max_tokens: int,
    decay: float | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Progress,
) -> ExitRecords:
    """A row for every token that the full model says, greedily: what every ramp that can look says in its place.

    With a `decay` scores are those that thresholds of such a policy are for.
    """
    task = model.task
    assert isinstance(task, TokenTask)
    policy = make_policy(score, **policy_of_score(score, SCORES[score].never, None, decay=decay).settings)
    asked = Asked(max_tokens=max_tokens, ends=frozenset(task.ends), policy=policy, look=True)
    return records_of(generate(model, prompts, asked, progress), score, model, provenance)


def records_of(
    generations: Sequence[Generated], score: Score, model: EarlyExitModel, provenance: dict[str, Any] | None = None
) -> ExitRecords:
    """Of generations in which every ramp looked."""
    looks = [look for each in generations for look in each.looks]
    ramps = tuple(block for block in model.ramp_indices if all(block in look for look in looks))
    exits = (*ramps, model.num_blocks - 1)
    return ExitRecords.of_answers(
        np.array([[first_token(look[block].value) for block in exits] for look in looks], dtype=np.int64),
        score=score,
        num_blocks=model.num_blocks,
        ramps=ramps,
        sample_ids=tuple(f"{k}-{place}" for k, each in enumerate(generations) for place in range(len(each.answer))),
        scores_NR=np.array([[look[block].score for block in ramps] for look in looks], dtype=np.float32),
        tokens_N=np.array(
            [length for each in generations for length in [len(each.prompt)] + [1] * (len(each.answer) - 1)]
        ),
        sequences_N=np.array([k for k, each in enumerate(generations) for _ in each.answer]),
        provenance=provenance,
    )


def card_of_sequences(records: ExitRecords, job: CalibrateJob, facts: dict[str, Any]) -> CalibrationCard:
    """Thresholds by records of generations; some sequences lay the path, the others test it."""
    kept = records.of_ramps(job.taken(records.ramps))
    design, tested = (of_sequences(kept, part) for part in parts_of(sequences_of(kept), job))
    found = learn_then_test_sequences(design, tested, job.guarantee)
    return CalibrationCard(
        policy=records.score,
        thresholds=found.thresholds,
        decay=decay_of(records),
        metric="sequences",
        budget=job.guarantee.budget,
        confidence=job.guarantee.confidence,
        tested=tested_figures(tested, found),
        provenance=facts,
    )


def tested_figures(tested: ExitRecords, found: SequenceCalibration) -> dict[str, Any]:
    """Of tokens what the ramps did, with all of them active, and of sequences what was held against the budget."""
    figures = outcome_figures(replace(tested, true_losses_NE=None).outcome(found.thresholds))
    whole = float((bounded_losses(tested, found.thresholds) == 0).mean())
    sequences = {"sequences": found.num_sequences, "sequence_loss": found.mean_loss, "same_sequences": whole}
    figures["work_share"] = work_share(figures["survival"], None)
    return figures | sequences
