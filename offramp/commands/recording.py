"""Makes exit records of labelled rows that a model runs here.

Large outputs are judged batch by batch, so only a few numbers per input and exit are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError, ModelFolderError
from earlyexit.network.boundary import FloatName
from earlyexit.network.chain import Chain
from earlyexit.network.store import ModelCard, load_model, read_card
from earlyexit.policies import make_policy
from earlyexit.policies.base import Opinion
from earlyexit.policies.ensemble import STATE_DTYPE, mixed, weighted_state
from earlyexit.policies.threshold import ThresholdPolicy, shares_above
from earlyexit.tasks import find_task
from earlyexit.tasks.base import IntArray, Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import (
    Progress,
    exit_outputs,
    importance_of,
    no_progress,
    outputs_by_batch,
    times_measured,
)
from earlyexit.words import alpha_for, num_words, relative_importance
from optimizer.confidences import LEVELS, choose_confidences
from optimizer.ensemble import RULES, Gain, fit_weights, held_out_gain
from optimizer.plan import policy_of_score
from profiles.networks import MEASURING, PRUNE, TOKENS_KEPT, WEIGHTS, WORDS_CUT
from profiles.records import ExitRecords
from profiles.scores import BoolArray, Score

SERVED = "likelihood"
"""Rule whose weights are served; the weights of the other rules are only reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble:
    """Weights of an ensemble, found on the design rows."""

    weights: Mapping[int, float]
    """Weights by end block of a network, as policies take them."""
    by_rule: Mapping[str, Mapping[int, float]]
    """Weights of every rule."""
    gain: Gain | None
    """Gain on the rows that go on at every end, with weights fitted without the row; None without such rows."""

    @property
    def is_on(self) -> bool:
        """Whether mixing is worth it, because its gain is significant."""
        return self.gain is not None and self.gain.is_sure

    def document(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "on": self.is_on,
            "weights": {rule: dict(weights) for rule, weights in self.by_rule.items()},
            "gain": None if self.gain is None else asdict(self.gain),
        }


def find_ensemble(
    outputs: Mapping[int, Tensor], chain: Chain, truth_N: ValueArray, goes_on_NE: BoolArray, rows: IntArray
) -> Ensemble:
    """Returns an ensemble fitted on some rows of a chain's temperature-scaled outputs (N, C), by block.

    `goes_on_NE`: which rows go on at every end of a network that is not the last.
    """
    said = [outputs[end].double().softmax(-1).numpy()[rows] for end in chain.ends]
    truth, goes_on = np.asarray(truth_N)[rows].astype(np.int64), goes_on_NE[rows]
    by_rule = {name: fit_weights(said, truth, goes_on, chain.end_ramps, rule) for name, rule in RULES.items()}
    return Ensemble(
        weights=by_rule[SERVED],
        by_rule=by_rule,
        gain=held_out_gain(said, truth, goes_on, chain.end_ramps, RULES[SERVED]),
    )


def mixed_outputs(
    outputs: Mapping[int, Tensor],
    chain: Chain,
    task: Task,
    weights: Mapping[int, float],
    used: Collection[int] | None = None,
) -> dict[int, Tensor]:
    """Returns the mixed outputs (N, C) of every exit, by block, with those of the networks before it.

    They equal what is served, also in rounding. `used`: the networks that a plan uses; None for all. Others add
    nothing, and their own outputs are not changed.
    """
    some = next(iter(outputs.values()))
    state_BS = torch.zeros(len(some), task.num_outputs, dtype=STATE_DTYPE)
    found = dict(outputs)
    for block in sorted(outputs):
        network = chain.network_of(block)
        if used is not None and network not in used:
            continue
        found[block] = mixed(Opinion(task, outputs[block]), state_BS).outputs_BC
        if block in weights:
            state_BS = weighted_state(found[block], weights[block])
    return found


Confidences = Mapping[int, float]
Outputs = tuple[Sequence[int], Mapping[int, Tensor]]
"""Rows, and the temperature-scaled outputs of each exit for them, by block."""


def record_exits(
    folder: Path,
    data: LabelledRows,
    policy: Score,
    *,
    confidences: Confidences | None = None,
    weights: Mapping[int, float] | None = None,
    dtype: FloatName = "float32",
    progress: Progress = no_progress,
) -> ExitRecords:
    """Returns exit records of labelled rows under a calibrated model; `confidences` are for shares.

    Every network of a chain runs in full on every row; `weights` are those of its ensemble.
    """
    card = read_card(folder)
    task = find_task(card.task)
    truth_N = data.targets(task, find_codec(card.codec, folder))
    outputs, tokens_N = outputs_of(folder, card, data, dtype, progress)
    if weights is None:
        records = join_records(outputs, policy, task, truth_N, confidences=confidences)
    else:
        [whole] = outputs
        records = join_records([whole], policy, task, truth_N, confidences=confidences)
        records = records_of_ensemble(whole[1], records, card.chain, task, truth_N, weights)
    return replace(records, tokens_N=tokens_N)


def outputs_of(
    folder: Path, card: ModelCard, data: LabelledRows, dtype: FloatName, progress: Progress, *, fitted: bool = True
) -> tuple[Iterable[Outputs], IntArray | None]:
    """Returns every exit's outputs of the rows, and the tokens of every row in the first network.

    Each exit's outputs are at its own model's temperature, or at 1 if not `fitted`. One network of a chain at a time is
    in memory. Large outputs of a single model come a batch at a time. Raises ModelFolderError for models that are no
    longer those of the chain, or have other ramps.
    """
    chain, tokens_N = card.chain, None
    outputs: dict[int, Tensor] = {}
    for network, member in enumerate(card.members(folder)):
        model = load_model(member, dtype=getattr(torch, dtype))
        if not fitted:
            model.temperatures_E.fill_(1.0)
        if model.ramp_indices != tuple(chain.ramps_of(network)):
            raise ModelFolderError(
                f"{folder}: {model.info.name!r} has ramps {list(model.ramp_indices)}, the chain knows "
                f"{list(chain.ramps_of(network))}; `offramp chain` makes the chain anew"
            )
        encoded = data.encode(find_codec(model.info.codec, member))
        if network == 0 and model.max_length > 1:
            tokens_N = np.array([each.length for each in encoded], dtype=np.int64)
        if chain.is_one and model.task.large:
            return outputs_by_batch(model, encoded, progress=progress), tokens_N
        told = progress if chain.is_one else _told_of(progress, chain.names[network])
        first = chain.starts[network]
        outputs |= {first + block: each for block, each in exit_outputs(model, encoded, progress=told).items()}
    return [(range(len(data)), outputs)], tokens_N


def _told_of(progress: Progress, name: str) -> Progress:
    return lambda what, done, total: progress(f"{what} {name}", done, total)


def records_of_ensemble(
    outputs: Mapping[int, Tensor],
    alone: ExitRecords,
    chain: Chain,
    task: Task,
    truth_N: ValueArray,
    weights: Mapping[int, float],
    used: Sequence[int] | None = None,
) -> ExitRecords:
    """Returns records of a chain's exits whose outputs are mixed with those of earlier networks (`mixed_outputs`).

    `alone`: records of the same rows and outputs without mixing. Losses are against the last network's own answer, so
    the end has a loss where the mixture differs from it.
    """
    found = records_from_outputs(mixed_outputs(outputs, chain, task, weights, used), alone.score, task, truth_N)
    answers_NE, full_N = found.answers(), alone.answers()[:, -1]
    losses_NE = np.stack([task.loss(answers_NE[:, column], full_N) for column in range(answers_NE.shape[1])], axis=1)
    assert found.true_losses_NE is not None
    assert alone.true_losses_NE is not None
    return replace(
        alone,
        scores_NR=found.scores_NR,
        losses_NR=losses_NE[:, :-1],
        end_losses_N=losses_NE[:, -1],
        end_true_losses_N=found.true_losses_NE[:, -1],
        answers_NE=np.column_stack([answers_NE[:, :-1], full_N]),
        true_losses_NE=np.column_stack([found.true_losses_NE[:, :-1], alone.true_losses_NE[:, -1]]),
        provenance=dict(alone.provenance or {}) | {WEIGHTS: dict(weights)},
    )


def score_of(task: Task, asked: Score | None) -> Score:
    """Returns the score for a task: the asked one, or its default. Raises DataError for one that it does not have."""
    labels = isinstance(task, LabelTask)
    if asked in ("foreseen", "similar"):
        raise DataError(f"{asked} is of models that generate tokens, not of the task {task.name}; confidence is of any")
    if asked == "entropy" and not labels:
        raise DataError(f"entropy is of labels, and the model's task is {task.name}; confidence is of any task")
    if asked == "share" and not task.num_principal_values:
        raise DataError(f"the task {task.name} has no principal values to count a share of; confidence is of any task")
    counted = task.large and task.num_principal_values
    return asked or ("entropy" if labels else "share" if counted else "confidence")


def join_records(
    parts: Iterable[Outputs],
    policy: Score,
    task: Task,
    truth_N: ValueArray,
    *,
    confidences: Confidences | None = None,
    choice: tuple[IntArray, float] | None = None,
    provenance: dict[str, Any] | None = None,
) -> ExitRecords:
    """Returns exit records of all rows, in order, from temperature-scaled outputs that come in parts.

    The last block of the outputs is the full model. `choice`, for shares: rows and a budget, for which each ramp gets
    the best of a hundred confidences; it is found by counts of principal values, so nothing runs twice. Raises
    PlanError for shares with neither `confidences` nor `choice`.
    """
    choice = choice if policy == "share" else None
    rows: list[int] = []
    records, shares = [], []
    for some, outputs in parts:
        opinions = {block: Opinion(task, outputs[block]) for block in sorted(outputs)}
        rows += some
        known = confidences if choice is None else dict.fromkeys(outputs, 0.0)
        records.append(_records_of(opinions, policy, task, truth_N[list(some)], known))
        if choice is not None:  # the share of principal values above each level, for every ramp
            (*ramps, _), levels_L = opinions.values(), torch.from_numpy(LEVELS)
            of_ramps = [shares_above(each.principal_values, levels_L).cpu().numpy() for each in ramps]
            shares.append(np.stack(of_ramps, axis=1))
    joined = ExitRecords.join(records).subset(np.argsort(rows))
    joined = replace(joined, sample_ids=tuple(map(str, range(len(rows)))), provenance=provenance)
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


def records_from_outputs(
    outputs: Mapping[int, Tensor],
    policy: Score,
    task: Task,
    truth_N: ValueArray,
    *,
    provenance: dict[str, Any] | None = None,
) -> ExitRecords:
    """Returns exit records from the temperature-scaled outputs (N, ...) of all rows, by block."""
    return join_records([(range(len(truth_N)), outputs)], policy, task, truth_N, provenance=provenance)


def _records_of(
    opinions: Mapping[int, Opinion], policy: Score, task: Task, truth_N: ValueArray, confidences: Confidences | None
) -> ExitRecords:
    *ramps, last = opinions
    judge = make_policy(policy, **policy_of_score(policy, 0.0, confidences).settings)
    assert isinstance(judge, ThresholdPolicy)
    answers_NE = np.stack([opinion.value_B.numpy() for opinion in opinions.values()], axis=1)
    scores = [judge.score(ramp, opinions[ramp]).numpy() for ramp in ramps]
    no_scores = np.zeros((len(truth_N), 0))
    tallies_NE = np.stack([task.tallies(answers_NE[:, column], truth_N) for column in range(len(opinions))], axis=1)
    return ExitRecords.of_answers(
        answers_NE,
        score=policy,
        num_blocks=last + 1,
        ramps=tuple(ramps),
        sample_ids=tuple(map(str, range(len(truth_N)))),
        scores_NR=(np.stack(scores, axis=1) if scores else no_scores).astype(np.float32),
        truth_N=truth_N,
        loss=task.loss,
        zero_one=task.zero_one,
        keep_answers=answers_NE.ndim == 2,  # answers are looked up by id as a label or a number
        confidences=None if policy != "share" or confidences is None else {ramp: confidences[ramp] for ramp in ramps},
        tallies_NE=tallies_NE if tallies_NE.shape[2] else None,
    )


def run_pruned(
    folder: Path,
    card: ModelCard,
    data: LabelledRows,
    whole: Mapping[int, Tensor],
    *,
    share: float,
    parts: tuple[IntArray, IntArray],
    dtype: FloatName,
    progress: Progress,
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """Prunes a share of the words at every crossing, by alphas of the design rows, and runs the networks after it.

    Returns all exits' outputs by the chain's block, and the facts for the provenance of what is found with them: alpha
    by end ramp, the share of all words that the last network does not see, of every network the share of an input's
    tokens that is left there, and of every network but the last how many times as long it takes to tell what attention
    its tokens receive. `whole`: every exit's outputs on whole texts, of which those of the first network are used; its
    words can be pruned (`check_prunable`). Raises DataError for a share that no alpha cuts.
    """
    chain = card.chain
    codec = find_codec(card.codec, folder)
    assert isinstance(codec, ChainCodec)
    rows = given = data.rows(codec)
    kept, measuring = [1.0], list[float]()
    outputs = {block: each for block, each in whole.items() if block < chain.bounds[0]}
    prune: dict[int, float] = {}
    for network, member in enumerate(card.members(folder)):
        model = load_model(member, dtype=getattr(torch, dtype))
        encoded = codec.of(network).encode(rows, truncate=True)
        if network:
            whole_encoded = codec.of(network).encode(given, truncate=True)
            kept.append(sum(each.length for each in encoded) / sum(each.length for each in whole_encoded))
            first = chain.starts[network]
            found = exit_outputs(model, encoded, progress=progress)
            outputs |= {first + block: each for block, each in found.items()}
        if network < len(chain.lengths) - 1:
            importance = importance_of(model, encoded, progress=progress)
            measuring.append(times_measured(model, encoded))
            words = codec.of(network).words
            standings = [relative_importance(words(rows[row]), importance[row]) for row in parts[0].tolist()]
            alpha = prune[chain.ends[network]] = alpha_for(share, np.concatenate(standings))
            rows = [
                codec.pruned_for(network + 1, network, row, own, alpha).row
                for row, own in zip(rows, importance, strict=True)
            ]
    words_cut = 1 - num_words(rows) / num_words(given)
    return outputs, {PRUNE: prune, WORDS_CUT: words_cut, TOKENS_KEPT: kept, MEASURING: measuring}
