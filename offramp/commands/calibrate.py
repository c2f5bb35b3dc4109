"""Calibrates single models, chains and decoders: makes exit records of rows, and finds thresholds with a guarantee."""

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
from earlyexit.tasks import find_task
from earlyexit.tasks.base import IntArray, ValueArray
from earlyexit.tasks.token import TokenTask, first_token
from earlyexit.training.ramps import Progress, no_progress
from earlyexit.training.tokens import Generated, GenerationOptions, generate
from offramp.commands.calibration_files import (
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
    choose_score,
    compute_outputs,
    ensemble_records,
    find_ensemble,
    join_records,
    run_pruned,
)
from offramp.commands.thresholds import (
    CalibrationData,
    calibration_facts,
    card_of_sequences,
    check_ramps,
    check_rows,
    design_and_test_rows,
    likely_thresholds,
    promised_records,
)
from offramp.commands.train import prompts_of
from optimizer.calibration_file import MEMBERS, PRUNED, REFERENCE, CalibrationCard
from optimizer.plan import policy_of_score
from profiles.networks import ALONE_FILE, DECAY, PRUNE, subsets
from profiles.records import ExitRecords
from profiles.scores import SCORES, Score

OWN = ""
"""Name of the chain's own calibration, which is in the model folder itself."""
ANSWER_TOKENS = 64
"""Maximum number of tokens of an answer, if neither the job nor the training of the ramps sets it."""


def calibrate(
    folder: Path,
    data: LabelledRows,
    job: CalibrateJob,
    *,
    outputs: Iterable[Outputs] | None = None,
    progress: Progress = no_progress,
) -> tuple[CalibrationCard, ExitRecords]:
    """Finds thresholds, and writes them with the exit records into the model folder.

    `outputs`: the outputs of these rows if they are known, of a single model without temperatures; None: the model
    runs. Rows of a model that keeps its answers need no labels. Raises DataError for too few rows, and for options that
    the model does not support.
    """
    check_rows(data, job)
    card = read_card(folder)
    if card.task["name"] == TokenTask.name:
        return _calibrate_decoder(folder, data, job, progress)
    job = _check_job(job, folder, card)
    check_rows(data, job)
    task, parts, facts = find_task(card.task), design_and_test_rows(data, job), calibration_facts(job)
    policy, is_one = choose_score(task, job.policy), card.chain.is_one
    labels = None if _lack_labels(card, data, job) else data.targets(task, find_codec(card.codec, folder))
    tokens_N = None
    if outputs is None:
        outputs, tokens_N = compute_outputs(folder, card, data, job.dtype, progress, fitted=not is_one)
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
    rows = CalibrationData(
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
    calibration = rows.card()
    forget_calibration(folder)
    save_model(model, folder)
    members = {MEMBERS: members_of(folder, card)}
    calibration = calibration.model_copy(update={"provenance": calibration.provenance | members})
    save_calibration(calibration, records, folder)
    return calibration, records


def _lack_labels(card: ModelCard, data: LabelledRows, job: CalibrateJob) -> bool:
    """Returns whether the model's answers replace labels; raises DataError if labels are needed."""
    if not keeps_answers(card.provenance) or data.are_labelled:
        return False
    if job.metric == "harm":
        raise DataError(f"{job.source or 'the data'}: rows without labels; --metric harm needs labels")
    return True


def _scaled(model: EarlyExitModel, parts: Iterable[Outputs], labels: ValueArray, design: IntArray) -> Iterable[Outputs]:
    """Fits temperatures on the design rows, and returns the outputs scaled by them.

    The temperature remains 1 for large outputs, and for the last exit of a model that keeps its answers.
    """
    model.temperatures_E.fill_(1.0)
    if model.task.large:
        return parts
    ((rows, raw),) = parts
    design_B = torch.from_numpy(design)
    for block in sorted(raw)[:-1] if keeps_answers(model.info.provenance) else sorted(raw):
        raw_NC = raw[block]
        model.temperatures_E[block] = model.task.fit_temperature(raw_NC[design_B], labels[design])
    return [(rows, {block: raw_NC / float(model.temperatures_E[block]) for block, raw_NC in raw.items()})]


def _calibrate_chain(
    recorded: CalibrationData, folder: Path, card: ModelCard, data: LabelledRows, outputs: Outputs, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Finds thresholds for the ends and ramps of a chain; its models do not change.

    If the job names no ramps, the ends and a few useful ramps get thresholds (`few_ramps`), and in a second calibration
    a few ramps of the last network. With word pruning, a further calibration of the pruned chain is made, and returned.
    Plans choose one of the calibrations, so the confidence holds for all of them together.
    """
    job, network, [records] = recorded.job, card.chain, recorded.views
    mixed, ensemble = _find_useful_ensemble(recorded, outputs[1], network) if job.ensemble else (recorded, None)
    cards = {OWN: mixed.card(mixed.few(network.end_ramps) if job.ramps is None else None)}
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
    return _calibrate_pruned(recorded, folder, card, data, outputs, progress)


def _check_job(job: CalibrateJob, folder: Path, card: ModelCard) -> CalibrateJob:
    """Returns the job with its ramps as blocks and its number of calibrations.

    Raises DataError for options that the model does not support, and ModelFolderError for a chain with a model that is
    not calibrated, because chains use the models' temperatures.
    """
    if job.decay is not None:
        raise DataError(f"--decay is only for models that generate tokens, and {card.name} is not one")
    if card.chain.is_one:
        if job.prune is not None:
            raise DataError(f"words are pruned before the next network of a chain, and {card.name} is a single one")
        if job.ensemble:
            raise DataError(f"{folder} is a single network: ensembles are for chains")
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
    """Returns whether there will be a second calibration, for the last network alone."""
    return job.ramps is None and bool(chain.ramps_of(len(chain.lengths) - 1))


def _find_useful_ensemble(
    recorded: CalibrationData, outputs: Mapping[int, Tensor], chain: Chain
) -> tuple[CalibrationData, Ensemble]:
    """Returns the data with mixed answers for each set of networks (all first), and the ensemble.

    The data is returned unchanged if the ensemble is not useful. Weights and gain are found on the design rows alone.
    An input counts as passed on at an end if no exit up to there passes the likely thresholds. Raises DataError for the
    policy `share`.
    """
    [alone], design = recorded.views, recorded.parts[0]
    assert recorded.task is not None
    assert recorded.labels is not None
    promised = promised_records(alone, recorded.job)
    likely = likely_thresholds(promised.subset(design), recorded.job.guarantee.budget, recorded.costs)
    if alone.score == "share":
        raise DataError("ensembles need the policy entropy or confidence, not share")
    sure_NR = alone.sure_NR(likely)
    until = [np.array(alone.ramps) <= end for end in chain.end_ramps]
    goes_on_NE = np.stack([~sure_NR[:, columns].any(1) for columns in until], axis=1)
    ensemble = find_ensemble(outputs, chain, recorded.labels, goes_on_NE, design)
    if not ensemble.is_on:
        return recorded, ensemble
    sets = sorted(subsets(chain), key=len, reverse=True)
    views = [
        ensemble_records(outputs, alone, chain, recorded.task, recorded.labels, ensemble.weights, used) for used in sets
    ]
    return replace(recorded, views=views), ensemble


def _calibrate_pruned(
    recorded: CalibrationData, folder: Path, chain: ModelCard, data: LabelledRows, run: Outputs, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Finds thresholds that hold with pruned and with whole texts in later networks.

    They must hold for both, because plans may leave out networks before which words are pruned. `run`: the outputs on
    whole texts.
    """
    job, task, labels, [unpruned], (rows, outputs) = recorded.job, recorded.task, recorded.labels, recorded.views, run
    assert job.prune is not None
    assert task is not None
    assert labels is not None
    pruned, pruning = run_pruned(
        folder, chain, data, outputs, share=job.prune, parts=recorded.parts, dtype=job.dtype, progress=progress
    )
    facts, last = recorded.facts | pruning, max(outputs)
    made = [(rows, pruned | {last: outputs[last]})]  # answers are compared with the reference's on whole texts
    at_end, full = (task.answer(each[last]).numpy() for each in (pruned, outputs))
    records = replace(
        join_records(made, unpruned.score, task, labels, choice=(recorded.parts[0], job.budget), provenance=facts),
        tokens_N=unpruned.tokens_N,
        end_losses_N=task.loss(at_end, full),
        end_true_losses_N=task.loss(at_end, labels),
    )
    both = replace(recorded, views=[records, unpruned], facts=facts)
    card = both.card(both.few(chain.chain.end_ramps) if job.ramps is None else None, prune=pruning[PRUNE])
    save_calibration(card, records, folder / PRUNED)
    return card, records


def _calibrate_decoder(
    folder: Path, data: LabelledRows, job: CalibrateJob, progress: Progress
) -> tuple[CalibrationCard, ExitRecords]:
    """Records the full model's answers to prompts with the scores of every ramp, and finds thresholds.

    As in the training of the ramps, prompts are texts or user messages of a chat.
    """
    if job.metric == "harm" or job.ensemble or job.prune is not None:
        raise DataError("--metric harm, --ensemble and --prune are not for decoders")
    model = load_model(folder)
    check_ramps(job, model.ramp_indices)
    codec = find_codec(model.info.codec, folder)
    assert isinstance(codec, PromptCodec)
    assert isinstance(model.task, TokenTask)
    learned = model.info.provenance
    chat, answers = bool(learned.get("chat")), job.answers or learned.get("answers") or ANSWER_TOKENS
    decay = {} if job.decay is None else {DECAY: job.decay}
    facts = calibration_facts(job) | {"answers": answers, "chat": chat} | decay
    prompts = prompts_of(codec, data, model.task, chat=chat)
    score = job.policy or "foreseen"
    policy = make_policy(score, **policy_of_score(score, SCORES[score].never, None, decay=job.decay).settings)
    options = GenerationOptions(max_tokens=answers, ends=frozenset(model.task.ends), policy=policy, look=True)
    records = _records_of_generations(generate(model, prompts, options, progress), score, model, facts)
    card = card_of_sequences(records, job, facts)
    forget_calibration(folder)
    save_calibration(card, records, folder)
    return card, records


def _records_of_generations(
    generations: Sequence[Generated], score: Score, model: EarlyExitModel, facts: dict[str, Any]
) -> ExitRecords:
    """Returns a record for each token that the full model generates greedily, with the answers of every ramp."""
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
