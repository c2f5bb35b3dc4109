"""Calibrates single models, chains and decoders: makes exit records of labelled rows, and finds thresholds.

Large outputs are processed batch by batch, so that only a few numbers per input and exit remain in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError
from earlyexit.network.boundary import FloatName
from earlyexit.network.chain import ModelChain
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import ModelCard, check_prunable, load_model, read_card, save_model
from earlyexit.policies import make_policy
from earlyexit.policies.base import ExitOutput
from earlyexit.policies.ensemble import STATE_DTYPE, mixed, weighted_state
from earlyexit.policies.threshold import ThresholdPolicy, shares_above
from earlyexit.tasks import find_task
from earlyexit.tasks.base import IntArray, Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask, first_token
from earlyexit.training.ramps import Progress, by_batch, exit_outputs, importance_of, no_progress, times_measured
from earlyexit.training.tokens import GenerationOptions, generate
from earlyexit.words import alpha_for, num_words, relative_importance
from offramp.commands.folders import keeps_answers, members_of, read_calibration, replacing_model, save_calibration
from offramp.commands.jobs import CalibrateJob
from offramp.commands.thresholds import (
    CalibrationData,
    calibration_facts,
    check_job_of_tokens,
    check_ramps,
    check_rows,
    design_and_test_rows,
    likely_thresholds,
    measured_costs,
    promised_records,
)
from optimizer.calibration.calibration_file import MEMBERS, PRUNED, REFERENCE, CalibrationCard
from optimizer.calibration.ensemble import fit_weights, held_out_gain
from optimizer.calibration.thresholds import LEVELS, choose_confidences
from optimizer.plans.plan import policy_of_score
from optimizer.problems.networks import Used
from profiles.latency import LatencyProfile
from profiles.networks import ALONE_FILE, DECAY, MEASURING, PRUNE, TOKENS_KEPT, WEIGHTS, WORDS_CUT, subsets
from profiles.records import ExitRecords
from profiles.scores import SCORES, BoolArray, Score

ANSWER_TOKENS = 64
"""Maximum number of tokens of an answer, if neither the job nor the training of the ramps sets it."""
MAX_PROMPT_TOKENS = 128
"""Maximum number of tokens of a text in the training of a decoder's ramps."""
Confidences = Mapping[int, float]
ByBlock = Mapping[int, Tensor]
"""The temperature-scaled outputs of each exit, (N, C), by block."""
Outputs = tuple[Sequence[int], ByBlock]
"""Row indices, and the outputs for these rows."""
Calibrated = tuple[CalibrationCard, ExitRecords]


def calibrate(folder: Path, data: LabelledRows, job: CalibrateJob, *, progress: Progress = no_progress) -> Calibrated:
    """Finds thresholds, and writes them with the exit records into the model folder. After an error it is as before.

    Rows of a model that keeps its answers need no labels. Raises DataError for too few rows and unsupported options.
    """
    card = read_card(folder)
    job = _check_job(job, folder, card)
    check_rows(data, job)  # after the job has its number of calibrations, of which a chain has several
    if card.generates:
        return _calibrate_decoder(folder, data, job, progress)
    task, facts = find_task(card.task), calibration_facts(job)
    policy = choose_score(task, job.policy)
    design, _ = design_and_test_rows(data, job)
    is_one = card.chain.is_one
    is_labelled = data.are_labelled or not keeps_answers(card.provenance)
    if job.metric == "harm" and not is_labelled:
        raise DataError(f"{job.source}: rows without labels; --metric harm needs labels")
    labels = data.targets(task, find_codec(card.codec, folder)) if is_labelled else None
    outputs, tokens_N = compute_outputs(folder, card, data, job.dtype, progress, fitted=not is_one)
    truth_N = labels
    if truth_N is None:  # ramps are calibrated for the full model's answers
        [(_, raw)] = outputs
        truth_N = task.answer(raw[card.num_blocks - 1]).numpy()
    model = load_model(folder) if is_one else None
    if model is None:
        facts |= {MEMBERS: members_of(folder, card)}
    else:
        outputs = _scaled(model, outputs, truth_N, design)
    records = join_records(
        outputs, policy, task, truth_N, choice=(design, job.budget), provenance=facts, tokens_N=tokens_N
    )
    records = records if is_labelled else replace(records, true_losses_NE=None)  # the accuracy is unknown
    costs = measured_costs(job.latency, records, design) or (None if is_one else parameters_by_block(folder, card))
    recorded = CalibrationData(
        job=job, views=[records], facts=facts, task=task, labels=labels, costs=costs, first=card.chain.starts[-1]
    )
    if model is None:
        return _calibrate_chain(recorded, folder, card, data, next(iter(outputs))[1], progress)
    calibration = recorded.card()
    with replacing_model(folder) as made:
        save_model(model, made)
        members = {MEMBERS: members_of(made, card)}
        calibration = calibration.model_copy(update={"provenance": calibration.provenance | members})
        records = replace(records, provenance=facts | members)
        save_calibration(calibration, records, made)
    return calibration, records


def _check_job(job: CalibrateJob, folder: Path, card: ModelCard) -> CalibrateJob:
    """Returns the job with its ramps as blocks and its number of calibrations.

    Raises DataError for options that the model does not support, and ModelFolderError for a chain with a model that is
    not calibrated, because chains use the models' temperatures.
    """
    if card.generates:
        check_job_of_tokens(job)
    elif job.decay is not None or job.answers is not None:
        raise DataError(f"--decay and --answers are only for models that generate tokens, and {card.name} is not one")
    if job.latency is not None:
        LatencyProfile.load(job.latency)  # a file that cannot be read is refused before the model runs
    if card.chain.is_one:
        if job.prune is not None or job.ensemble:
            raise DataError(f"{folder} is a single network: --prune and --ensemble are for chains")
        check_ramps(job, card.ramps)
        return job
    for member in card.network_folders(folder):
        read_calibration(member)
    if job.ramps == "ends":
        job = job.model_copy(update={"ramps": card.chain.end_ramps})
    check_ramps(job, card.ramps)
    if job.prune is not None:
        check_prunable(folder, card.chain.end_ramps)
    return job.model_copy(update={"num_calibrations": 1 + _has_reference(job, card.chain) + (job.prune is not None)})


def _has_reference(job: CalibrateJob, chain: ModelChain) -> bool:
    """Returns whether there will be a second calibration, for the last network alone."""
    return job.ramps is None and bool(chain.ramps_of(len(chain.lengths) - 1))


def choose_score(task: Task, requested: Score | None) -> Score:
    """Returns the requested score, or the task's default; raises DataError or PlanError for another task's."""
    if requested in ("foreseen", "similar"):
        raise DataError(f"{requested} is only for models that generate; for the task {task.name} use confidence")
    if requested is not None:
        make_policy(requested, **policy_of_score(requested, 0.0, {}).settings).check_task(task)
    usual: Score = "share" if task.large and task.num_principal_values else "confidence"
    return requested or ("entropy" if isinstance(task, LabelTask) else usual)


def _scaled(model: EarlyExitModel, parts: Iterable[Outputs], labels: ValueArray, design: IntArray) -> Iterable[Outputs]:
    """Fits temperatures on the design rows, and returns the outputs scaled by them.

    The temperature remains 1 for large outputs, and for the last exit of a model that keeps its answers. The ramps of
    such a model are fitted to these answers, which they must repeat, and not to `labels`.
    """
    model.temperatures_E.fill_(1.0)
    if model.task.large:
        return parts
    [(rows, raw)] = parts
    design_B, exits = torch.from_numpy(design), sorted(raw)
    if keeps_answers(model.info.provenance):
        labels = model.task.answer(raw[exits.pop()]).numpy()
    for block in exits:
        model.temperatures_E[block] = model.task.fit_temperature(raw[block][design_B], labels[design])
    return [(rows, {block: raw_NC / float(model.temperatures_E[block]) for block, raw_NC in raw.items()})]


def parameters_by_block(folder: Path, card: ModelCard) -> list[float] | None:
    """Returns the number of parameters of each block, as its estimated cost; None if it is unknown for a network."""
    costs = list[float]()
    for member in card.network_folders(folder):
        blocks = getattr(load_model(member).backbone, "blocks", None)
        if not isinstance(blocks, torch.nn.ModuleList):
            return None
        costs += [float(sum(each.numel() for each in block.state_dict().values())) for block in blocks]
    return costs if len(costs) == card.num_blocks and all(costs) else None


def record_exits(
    folder: Path,
    data: LabelledRows,
    calibration: CalibrationCard,
    dtype: FloatName = "float32",
    progress: Progress = no_progress,
) -> ExitRecords:
    """Runs a calibrated model on labelled rows and returns exit records. Networks of a chain run on every row."""
    card, weights = read_card(folder), calibration.weights
    task = find_task(card.task)
    truth_N = data.targets(task, find_codec(card.codec, folder))
    outputs, tokens_N = compute_outputs(folder, card, data, dtype, progress)
    records = join_records(
        outputs, calibration.policy, task, truth_N, confidences=calibration.confidences, tokens_N=tokens_N
    )
    if weights is None:
        return records
    [(_, whole)] = outputs
    served = mixed_outputs(whole, card.chain, task, weights)
    return records_of_served(served, whole, records, (task, truth_N), provenance={WEIGHTS: dict(weights)})


def compute_outputs(
    folder: Path, card: ModelCard, data: LabelledRows, dtype: FloatName, progress: Progress, *, fitted: bool = True
) -> tuple[Iterable[Outputs], IntArray | None]:
    """Returns the outputs of every exit for the rows, and the number of tokens of each row in the first network.

    Outputs are scaled by the fitted temperatures, or by 1 if not `fitted`. Only one network of a chain is in memory at
    a time. Large outputs of a single model are computed batch by batch.
    """
    chain, tokens_N = card.chain, None
    outputs: dict[int, Tensor] = {}
    for network, member in enumerate(card.network_folders(folder)):
        model = load_model(member, dtype=getattr(torch, dtype))
        if not fitted:
            model.temperatures_E.fill_(1.0)
        encoded = data.encode(find_codec(model.info.codec, member))
        if network == 0 and model.max_length > 1:
            tokens_N = np.array([each.length for each in encoded], dtype=np.int64)
        if chain.is_one and model.task.large:
            return by_batch(model, encoded, model.exit_outputs, "records", progress=progress), tokens_N
        first, name = chain.starts[network], chain.names[network]
        report: Progress = progress if chain.is_one else lambda step, *of, name=name: progress(f"{step} {name}", *of)
        outputs |= {first + block: each for block, each in exit_outputs(model, encoded, progress=report).items()}
    return [(range(len(data)), outputs)], tokens_N


def join_records(
    parts: Iterable[Outputs],
    policy: Score,
    task: Task,
    truth_N: ValueArray,
    *,
    confidences: Confidences | None = None,
    choice: tuple[IntArray, float] | None = None,
    **facts: Any,
) -> ExitRecords:
    """Returns exit records of all rows, in order, from temperature-scaled outputs of parts of the rows.

    The last block of the outputs is the full model. The policy `share` needs `confidences`, or with `choice` rows and a
    budget, for which each ramp gets the best of a hundred. Raises PlanError without both. `facts`: further fields.
    """
    choice = choice if policy == "share" else None
    rows: list[int] = []
    records, shares = [], []
    for part_rows, outputs in parts:
        of_exits = {block: ExitOutput(task, outputs[block]) for block in sorted(outputs)}
        rows += part_rows
        known = confidences if choice is None else dict.fromkeys(outputs, 0.0)
        records.append(_records_of(of_exits, policy, task, truth_N[list(part_rows)], known))
        if choice is not None:  # the share of principal values above each level, for every ramp
            levels_L = torch.from_numpy(LEVELS)
            *ramps, _ = of_exits.values()
            of_ramps = [shares_above(each.principal_values, levels_L).cpu().numpy() for each in ramps]
            shares.append(np.stack(of_ramps, axis=1))
    joined = ExitRecords.join(records).subset(np.argsort(rows))
    joined = replace(joined, sample_ids=tuple(map(str, range(len(rows)))), **facts)
    if choice is None:
        return joined
    design, budget = choice
    shares_NRL = np.concatenate(shares)[np.argsort(rows)]
    levels = choose_confidences(shares_NRL[design], joined.losses_NR[design], budget)
    return replace(
        joined,
        scores_NR=shares_NRL[:, np.arange(len(levels)), levels],
        confidences={ramp: round(float(LEVELS[level]), 4) for ramp, level in zip(joined.ramps, levels, strict=True)},
    )


def _records_of(
    of_exits: Mapping[int, ExitOutput], policy: Score, task: Task, truth_N: ValueArray, confidences: Confidences | None
) -> ExitRecords:
    *ramps, last = of_exits
    judge = make_policy(policy, **policy_of_score(policy, 0.0, confidences).settings)
    assert isinstance(judge, ThresholdPolicy)
    answers_NE = np.stack([of_exit.value_B.numpy() for of_exit in of_exits.values()], axis=1)
    scores_RN = np.array([judge.score(ramp, of_exits[ramp]).numpy() for ramp in ramps], dtype=np.float32)
    tallies_NE = np.stack([task.tallies(answers_NE[:, column], truth_N) for column in range(len(of_exits))], axis=1)
    return ExitRecords.of_answers(
        answers_NE,
        score=policy,
        num_blocks=last + 1,
        ramps=tuple(ramps),
        sample_ids=tuple(map(str, range(len(truth_N)))),
        scores_NR=scores_RN.reshape(len(ramps), len(truth_N)).T,
        truth_N=truth_N,
        loss=task.loss,
        zero_one=task.zero_one,
        keep_answers=answers_NE.ndim == 2,  # answers are looked up by id as a label or a number
        confidences=None if policy != "share" or confidences is None else {ramp: confidences[ramp] for ramp in ramps},
        tallies_NE=tallies_NE if tallies_NE.shape[2] else None,
    )


def records_of_served(
    served: ByBlock, whole: ByBlock, alone: ExitRecords, truth: tuple[Task, ValueArray], **options: Any
) -> ExitRecords:
    """Returns exit records of the outputs that a chain serves, by block, compared with its reference's own outputs.

    The last exit's answer can differ too, because an ensemble mixes it, or because its text was pruned. `whole` and
    `alone`: outputs and records of the same inputs without either. `options`: of `join_records`.
    """
    last, (task, truth_N) = max(whole), truth
    at_end_N, full_N = (task.answer(each[last]).numpy() for each in (served, whole))
    return join_records(
        [(range(len(truth_N)), {**served, last: whole[last]})],
        alone.score,
        task,
        truth_N,
        confidences=alone.confidences,
        tokens_N=alone.tokens_N,
        end_losses_N=task.loss(at_end_N, full_N),
        end_true_losses_N=task.loss(at_end_N, truth_N),
        **options,
    )


def _calibrate_chain(
    recorded: CalibrationData, folder: Path, card: ModelCard, data: LabelledRows, outputs: ByBlock, progress: Progress
) -> Calibrated:
    """Finds thresholds for the ends and ramps of a chain; its models do not change.

    If the job names no ramps, the ends and a few useful ramps get thresholds (`few_ramps`), and in a second calibration
    a few ramps of the last network. With word pruning, a further calibration of the pruned chain is made, and returned.
    Plans choose one of the calibrations, so the confidence holds for all of them together.
    """
    job, chain, [alone] = recorded.job, card.chain, recorded.views
    mixed = _mixed_if_useful(recorded, outputs, chain) if job.ensemble else recorded
    own = mixed.card(chain.end_ramps)
    reference = mixed.card((), entry=chain.starts[-1]) if _has_reference(job, chain) else None
    with replacing_model(folder) as made:
        if len(mixed.views) > 1:
            alone.save(made / ALONE_FILE)
        save_calibration(own, mixed.views[0], made)
        if reference is not None:
            save_calibration(reference, None, made / REFERENCE)
        if job.prune is None:
            return own, mixed.views[0]
        # Plans may leave out networks, before or after which words are pruned. Thresholds must hold for all texts.
        served, pruning = run_pruned(recorded, folder, card, data, outputs, progress)
        facts = recorded.facts | pruning
        views = [records_of_served(each, outputs, alone, recorded.truth, provenance=facts) for each in served]
        calibration = replace(recorded, views=views, facts=facts).card(chain.end_ramps)
        save_calibration(calibration, views[0], made / PRUNED)
        return calibration, views[0]


def _mixed_if_useful(recorded: CalibrationData, outputs: ByBlock, chain: ModelChain) -> CalibrationData:
    """Returns the data with the results of an ensemble, and if it is useful, with mixed answers.

    There is a view for each set of networks, all of them first. Weights and gain are found on the design rows alone. An
    input counts as passed on at an end if no exit up to there passes the likely thresholds. Raises DataError for share.
    """
    [alone], design, (task, truth_N) = recorded.views, recorded.parts[0], recorded.truth
    if alone.score == "share":
        raise DataError("ensembles need the policy entropy or confidence, not share")
    promised = promised_records(alone, recorded.job)
    likely = likely_thresholds(promised.subset(design), recorded.job.budget, recorded.costs)
    sure_NR = alone.sure_NR({} if likely is None else likely.thresholds)
    until = [np.array(alone.ramps) <= end for end in chain.end_ramps]
    goes_on_NE = np.stack([~sure_NR[:, columns].any(1) for columns in until], axis=1)
    weights, results = find_ensemble(outputs, chain, truth_N, goes_on_NE, design)
    views = recorded.views
    if weights is not None:
        facts = recorded.facts | {WEIGHTS: dict(weights)}
        sets = sorted(subsets(len(chain.lengths)), key=len, reverse=True)
        served = [mixed_outputs(outputs, chain, task, weights, used) for used in sets]
        views = [records_of_served(each, outputs, alone, recorded.truth, provenance=facts) for each in served]
    return replace(recorded, views=views, figures={"ensemble": results})


def find_ensemble(
    outputs: ByBlock, chain: ModelChain, truth_N: ValueArray, goes_on_NE: BoolArray, rows: IntArray
) -> tuple[Mapping[int, float] | None, dict[str, Any]]:
    """Returns an ensemble's weights by end block, and JSON data on it, fitted on `rows` of a chain's outputs, by block.

    The outputs (N, C) are temperature-scaled. The weights are None unless the cross-validated gain on the rows that no
    network but the last answers is significant; without such rows the gain is None. `goes_on_NE`: whether each row goes
    on at the end of each network but the last.
    """
    shares = [outputs[end].double().softmax(-1).numpy()[rows] for end in chain.ends]
    truth, goes_on = np.asarray(truth_N)[rows].astype(np.int64), goes_on_NE[rows]
    weights = fit_weights(shares, truth, goes_on, chain.end_ramps)
    gain = held_out_gain(shares, truth, goes_on, chain.end_ramps)
    is_on = gain is not None and gain.is_sure
    results = {"on": is_on, "weights": weights, "gain": None if gain is None else asdict(gain)}
    return weights if is_on else None, results


def mixed_outputs(
    outputs: ByBlock, chain: ModelChain, task: Task, weights: Mapping[int, float], used: Collection[int] | None = None
) -> dict[int, Tensor]:
    """Returns the outputs (N, C) of every exit by block, mixed with those of earlier networks.

    They equal the served ones, rounding included. `used`: the networks that a plan uses, None for all. Other networks
    contribute nothing, and their own outputs are unchanged.
    """
    state_BS = torch.zeros(len(next(iter(outputs.values()))), task.num_outputs, dtype=STATE_DTYPE)
    result = dict(outputs)
    for block in sorted(outputs):
        if used is not None and chain.network_of(block) not in used:
            continue
        result[block] = mixed(ExitOutput(task, outputs[block]), state_BS).outputs_BC
        if block in weights:
            state_BS = weighted_state(result[block], weights[block])
    return result


def run_pruned(
    recorded: CalibrationData, folder: Path, card: ModelCard, data: LabelledRows, whole: ByBlock, progress: Progress
) -> tuple[list[ByBlock], dict[str, Any]]:
    """Runs a chain with word pruning: each network passes its texts on without the job's share of the words.

    Alphas are chosen on the design rows. `whole`: outputs on whole texts. Returns every exit's outputs by block, for
    each set of networks that a plan may use, all first, and facts for the provenance: alphas by end ramp, the share of
    all words that the last network does not get, the share of an input's tokens that each network gets, and the factor
    by which measuring attention slows down each network but the last. Raises DataError for an impossible share.
    """
    share, design, chain = recorded.job.prune, recorded.parts[0], card.chain
    assert share is not None
    codec = find_codec(card.codec, folder)
    assert isinstance(codec, ChainCodec)
    whole_rows, last = data.rows(codec), len(chain.lengths) - 1
    texts: dict[Used, tuple[Sequence[Any], Sequence[Any]]] = {}  # in a set's last network, and importances
    outputs: dict[Used, ByBlock] = {(): whole}
    kept, measuring, prune = list[float](), list[float](), dict[int, float]()
    for network, member in enumerate(card.network_folders(folder)):
        model, own = load_model(member, dtype=getattr(torch, recorded.job.dtype)), codec.of(network)
        for before in sorted([(), *texts], key=len, reverse=True):  # first all earlier networks
            rows, used = whole_rows, (*before, network)
            if before:
                pairs, alpha = zip(*texts[before], strict=True), prune[chain.ends[before[-1]]]
                rows = [codec.pruned_for(network, before[-1], row, seen, alpha).row for row, seen in pairs]
            encoded = own.encode(rows, truncate=True)
            exits = exit_outputs(model, encoded, progress=progress) if before else {}
            outputs[used] = {**outputs[before], **{chain.starts[network] + at: each for at, each in exits.items()}}
            texts[used] = rows, importance_of(model, encoded, progress=progress) if network < last else ()
            if len(before) == network:
                num_tokens = sum(each.length for each in own.encode(whole_rows, truncate=True))
                kept.append(sum(each.length for each in encoded) / num_tokens)
            if len(before) == network < last:
                measuring.append(times_measured(model, encoded))
                standings = [relative_importance(own.words(rows[k]), texts[used][1][k]) for k in design.tolist()]
                prune[chain.ends[network]] = alpha_for(share, np.concatenate(standings))
    words_cut = 1 - num_words(texts[(*range(last + 1),)][0]) / num_words(whole_rows)
    facts = {PRUNE: prune, WORDS_CUT: words_cut, TOKENS_KEPT: kept, MEASURING: measuring}
    return [each for used, each in outputs.items() if used[-1:] == (last,)], facts


def prompts_of(codec: PromptCodec, data: LabelledRows, task: TokenTask, *, chat: bool) -> list[tuple[int, ...]]:
    """Returns the tokens of each row's text, at most `MAX_PROMPT_TOKENS`, or with `chat` of a user message.

    Those of an encoder-decoder end with the token that starts answers. Raises InputError if there is no chat template.
    """
    start = () if task.start is None else (task.start,)
    if not chat:
        return [codec.tokens(text)[:MAX_PROMPT_TOKENS] + start for text in data.texts]
    return [codec.chat([{"role": "user", "content": text}]) + start for text in data.texts]


def _calibrate_decoder(folder: Path, data: LabelledRows, job: CalibrateJob, progress: Progress) -> Calibrated:
    """Records each token that the full model generates greedily with the answers of all ramps, and finds thresholds.

    As in the training of the ramps, prompts are texts or user messages of a chat.
    """
    model = load_model(folder, dtype=getattr(torch, job.dtype))
    codec, task, learned = find_codec(model.info.codec, folder), model.task, model.info.provenance
    assert isinstance(codec, PromptCodec)
    assert isinstance(task, TokenTask)
    chat, max_tokens = bool(learned.get("chat")), job.answers or learned.get("answers") or ANSWER_TOKENS
    decay = {} if job.decay is None else {DECAY: job.decay}
    facts = calibration_facts(job) | {"answers": max_tokens, "chat": chat} | decay
    score = job.policy or "foreseen"
    policy = make_policy(score, **policy_of_score(score, SCORES[score].never, None, decay=job.decay).settings)
    options = GenerationOptions(max_tokens=max_tokens, ends=frozenset(task.ends), policy=policy, observe=True)
    generations = generate(model, prompts_of(codec, data, task, chat=chat), options, progress)
    observed = [token for each in generations for token in each.observed]
    ramps = tuple(block for block in model.ramp_indices if all(block in token for token in observed))
    exits = (*ramps, model.num_blocks - 1)
    records = ExitRecords.of_answers(
        np.array([[first_token(token[block].value) for block in exits] for token in observed], dtype=np.int64),
        score=score,
        num_blocks=model.num_blocks,
        ramps=ramps,
        sample_ids=tuple(f"{k}-{place}" for k, each in enumerate(generations) for place in range(len(each.answer))),
        scores_NR=np.array([[token[block].score for block in ramps] for token in observed], dtype=np.float32),
        tokens_N=np.array(
            [length for each in generations for length in [len(each.prompt)] + [1] * (len(each.answer) - 1)]
        ),
        sequences_N=np.array([k for k, each in enumerate(generations) for _ in each.answer]),
        provenance=facts,
    )
    calibration = CalibrationData(job=job, views=[records], facts=facts).card()
    with replacing_model(folder) as made:
        save_calibration(calibration, records, made)
    return calibration, records
