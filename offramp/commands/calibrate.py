"""Calibrates models: runs a single model, a chain or a decoder on rows, and finds thresholds with a guarantee.

In each case exit records are made of the rows, from which `Recorded.card` finds and tests thresholds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError
from earlyexit.network.chain import Chain
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import ModelCard, check_prunable, load_model, read_card, save_model
from earlyexit.policies import make_policy
from earlyexit.sequences.offline import Generated, GenerationOptions, generate
from earlyexit.tasks import find_task
from earlyexit.tasks.base import IntArray, ValueArray
from earlyexit.tasks.token import TokenTask, first_token
from earlyexit.training.ramps import Progress, no_progress
from offramp.commands.calibrated import (
    fitted_exits,
    forget_calibration,
    keeps_answers,
    members_of,
    read_calibration,
    save_calibration,
)
from offramp.commands.jobs import CalibrateJob
from offramp.commands.profile import measured_costs, parameters_by_block
from offramp.commands.recording import (
    Ensemble,
    Outputs,
    find_ensemble,
    join_records,
    outputs_of,
    records_of_ensemble,
    run_pruned,
    score_of,
)
from offramp.commands.thresholds import (
    Recorded,
    card_of_sequences,
    check_ramps,
    check_rows,
    facts_of,
    likely_thresholds,
    parts_of,
    promised_of,
)
from offramp.commands.train import prompts_of
from optimizer.calibration_file import MEMBERS, PRUNED, REFERENCE, CalibrationCard
from optimizer.plan import policy_of_score
from profiles.networks import ALONE_FILE, DECAY, PRUNE, subsets
from profiles.records import ExitRecords
from profiles.scores import SCORES, Score

OWN = ""
"""Name of the chain's own calibration, which has no folder of its own."""
ANSWER = 64
"""Default number of tokens of an answer, if the ramps were not trained on answers either."""


def calibrate(
    folder: Path,
    data: LabelledRows,
    job: CalibrateJob,
    *,
    outputs: Iterable[Outputs] | None = None,
    progress: Progress = no_progress,
) -> tuple[CalibrationCard, ExitRecords]:
    """Find thresholds, and write them, with the exit records, into the model's folder.

    `outputs` are known outputs of these rows, of a single model without temperatures; None: the model runs. Rows of a
    model that keeps its answers need no labels, since its answers stand for them. Raises DataError if the inputs are
    too few for the guarantee, and for options that are not of such a model.
    """
    check_rows(data, job)
    card = read_card(folder)
    if card.task["name"] == TokenTask.name:
        return _calibrate_decoder(folder, data, job, progress)
    job = _checked(job, folder, card)
    check_rows(data, job)
    task, parts, facts = find_task(card.task), parts_of(data, job), facts_of(job)
    policy, is_one = score_of(task, job.policy), card.chain.is_one
    labels = None if _lack_labels(card, data, job) else data.targets(task, find_codec(card.codec, folder))
    tokens_N = None
    if outputs is None:
        outputs, tokens_N = outputs_of(folder, card, data, job.dtype, progress, fitted=not is_one)
    outputs = outputs if task.large else list(outputs)
    if labels is None:
        [(_, raw)] = outputs
        labels = raw[card.num_blocks - 1].argmax(1).numpy()
    model = load_model(folder) if is_one else None
    if model is None:
        facts |= {MEMBERS: members_of(folder, card)}
    else:
        outputs = _scaled(model, outputs, labels, parts[0])
    choice = (parts[0], job.budget)
    records = replace(join_records(outputs, policy, task, labels, choice=choice, provenance=facts), tokens_N=tokens_N)
    costs = measured_costs(job.latency, records)
    rows = Recorded(
        job=job,
        views=[records],
        parts=parts,
        facts=facts,
        task=task,
        labels=labels,
        costs=costs if costs or is_one else parameters_by_block(folder, card),
        first=card.chain.starts[-1],
    )
    if model is None:
        return _calibrate_chain(rows, folder, card, data, next(iter(outputs)), progress)
    found = rows.card()
    forget_calibration(folder)
    save_model(model, folder)
    found = found.model_copy(update={"provenance": found.provenance | {MEMBERS: members_of(folder, card)}})
    save_calibration(found, records, folder)
    return found, records


def _lack_labels(card: ModelCard, data: LabelledRows, job: CalibrateJob) -> bool:
    """Returns whether the model's answers are used as labels; raises DataError if real labels are needed."""
    if not keeps_answers(card.provenance) or data.are_labelled:
        return False
    if job.metric == "harm":
        where = job.source or "the data"
        raise DataError(f"{where}: rows without labels; harm is measured by labels, agreement is not")
    return True


def _scaled(model: EarlyExitModel, parts: Iterable[Outputs], labels: ValueArray, design: IntArray) -> Iterable[Outputs]:
    """Scales outputs of temperature 1 by temperatures that are fitted on the design rows; large outputs keep 1.

    The last exit of a model that keeps its answers keeps temperature 1, so that its scores do not change.
    """
    model.temperatures_E.fill_(1.0)
    if model.task.large:
        return parts
    ((rows, raw),) = parts
    design_B = torch.from_numpy(design)
    for block in fitted_exits(raw, model.info.provenance):
        raw_NC = raw[block]
        model.temperatures_E[block] = model.task.fit_temperature(raw_NC[design_B], labels[design])
    return [(rows, {block: raw_NC / float(model.temperatures_E[block]) for block, raw_NC in raw.items()})]


def _calibrate_chain(
    whole: Recorded, folder: Path, card: ModelCard, data: LabelledRows, outputs: Outputs, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Finds thresholds of a chain's ends and ramps together; the models do not change.

    If the job names no ramps, the ends and the few ramps that are worth it get thresholds (`few_ramps`). A second
    calibration of the same outputs has a few ramps of the last network only. Plans choose one of the calibrations, so
    all of them together keep the confidence. If words are to be pruned, a further calibration of the pruned chain is
    made, and returned.
    """
    job, network, [records] = whole.job, card.chain, whole.views
    mixed, ensemble = (whole, None) if not job.ensemble else _mixed_where_it_pays(whole, outputs[1], network)
    cards = {OWN: mixed.card(mixed.few(network.end_ramps) if job.ramps is None else job.ramps)}
    if _has_reference(job, network):
        last = network.starts[-1]
        cards[REFERENCE] = mixed.card(mixed.few((), last), entry=last)
    if ensemble is not None:
        weights = ensemble.weights if ensemble.is_on else None
        cards = {name: each.with_ensemble(weights, ensemble.document()) for name, each in cards.items()}
    forget_calibration(folder)
    if len(mixed.views) > 1:
        records.save(folder / ALONE_FILE)
    for name, each in cards.items():
        save_calibration(each, None if name else mixed.views[0], folder / name)
    if job.prune is None:
        return cards[OWN], mixed.views[0]
    return _calibrate_pruned(whole, folder, card, data, outputs, progress)


def _checked(job: CalibrateJob, folder: Path, card: ModelCard) -> CalibrateJob:
    """Returns the job with ramps as blocks and the number of calibrations; raises DataError for unfit options.

    A chain uses the temperatures of each model's own calibration, so models without one are refused.
    """
    if job.decay is not None:
        raise DataError(f"thresholds fall along answers of tokens, and {card.name} answers none: leave decay out")
    if card.chain.is_one:
        if job.prune is not None:
            raise DataError(f"words are pruned where inputs go on to another network, and {card.name} is a single one")
        if job.ensemble:
            raise DataError(f"{folder} is a single network: an ensemble is of a chain's")
        check_ramps(job, card.ramps)
        return job
    for member in card.members(folder):
        read_calibration(member)
    if job.ramps == "ends":
        job = job.model_copy(update={"ramps": card.chain.end_ramps})
    check_ramps(job, card.ramps)
    if job.prune is not None:
        check_prunable(folder, card.chain.end_ramps)
    among = 1 + _has_reference(job, card.chain) + (job.prune is not None)
    return job.model_copy(update={"among": among})


def _has_reference(job: CalibrateJob, chain: Chain) -> bool:
    """Returns whether the last network alone gets a calibration too; it is counted before anything runs."""
    return job.ramps is None and bool(chain.ramps_of(len(chain.lengths) - 1))


def _mixed_where_it_pays(whole: Recorded, outputs: Mapping[int, Tensor], chain: Chain) -> tuple[Recorded, Ensemble]:
    """Returns an ensemble, and the rows as each choice of networks answers them, or unmixed if the ensemble is off.

    All networks are the first choice. Weights and gain are found on the design rows, so that the test rows chose
    nothing. An input is passed on at an end if no exit up to it is sure by likely thresholds. Raises DataError for
    scores that are shares.
    """
    [alone], design = whole.views, whole.parts[0]
    assert whole.task is not None
    assert whole.labels is not None
    promised = promised_of(alone, whole.job)
    likely = likely_thresholds(promised.subset(design), whole.job.guarantee.budget, whole.costs)
    if alone.score == "share":
        raise DataError("an ensemble's exits leave by entropy or confidence, not by share")
    sure_NR = alone.sure_NR(likely)
    until = [np.array(alone.ramps) <= end for end in chain.end_ramps]
    goes_on_NE = np.stack([~sure_NR[:, columns].any(1) for columns in until], axis=1)
    found = find_ensemble(outputs, chain, whole.labels, goes_on_NE, design)
    if not found.is_on:
        return whole, found
    choices = sorted(subsets(chain), key=len, reverse=True)
    views = [
        records_of_ensemble(outputs, alone, chain, whole.task, whole.labels, found.weights, used) for used in choices
    ]
    return replace(whole, views=views), found


def _calibrate_pruned(
    whole: Recorded, folder: Path, chain: ModelCard, data: LabelledRows, run: Outputs, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Finds thresholds for pruned texts in later networks, which hold for whole texts (with outputs `run`) too.

    Plans may leave out the networks whose words would be pruned.
    """
    job, task, labels, [unpruned], (rows, outputs) = whole.job, whole.task, whole.labels, whole.views, run
    assert job.prune is not None
    assert task is not None
    assert labels is not None
    pruned, found = run_pruned(
        folder, chain, data, outputs, share=job.prune, parts=whole.parts, dtype=job.dtype, progress=progress
    )
    facts, last = whole.facts | found, max(outputs)
    made = [(rows, pruned | {last: outputs[last]})]  # the reference's answers are those to whole texts
    at_end, full = (task.answer(each[last]).numpy() for each in (pruned, outputs))
    records = replace(
        join_records(made, unpruned.score, task, labels, choice=(whole.parts[0], job.budget), provenance=facts),
        tokens_N=unpruned.tokens_N,
        end_losses_N=task.loss(at_end, full),
        end_true_losses_N=task.loss(at_end, labels),
    )
    both = replace(whole, views=[records, unpruned], facts=facts)
    card = both.card(both.few(chain.chain.end_ramps) if job.ramps is None else job.ramps, prune=found[PRUNE])
    save_calibration(card, records, folder / PRUNED)
    return card, records


def _calibrate_decoder(
    folder: Path, data: LabelledRows, job: CalibrateJob, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Records the full model's answers to prompts, with the scores of every ramp, and finds thresholds.

    Prompts are texts, or user messages of a chat, as in the training of the ramps.
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
    policy = make_policy(score, **policy_of_score(score, SCORES[score].never, None, decay=job.decay).settings)
    asked = GenerationOptions(max_tokens=answers, ends=frozenset(model.task.ends), policy=policy, look=True)
    records = _records_of_generations(generate(model, prompts, asked, progress), score, model, facts)
    card = card_of_sequences(records, job, facts)
    forget_calibration(folder)
    save_calibration(card, records, folder)
    return card, records


def _records_of_generations(
    generations: Sequence[Generated], score: Score, model: EarlyExitModel, facts: dict[str, Any]
) -> ExitRecords:
    """Returns a row for each token that the full model generates greedily, with what every ramp would have said."""
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
        provenance=facts,
    )
