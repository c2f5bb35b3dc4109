"""What is promised of sequences, and what filling in costs them: on stories260K, or a decoder's folder.

One pass of the full model, every ramp looking, gives exit records. They are divided at random, 200 times, into
sequences that lay the path, that test it, and unseen ones; how often is the unseen ones' loss within the budget, the
bounded one, and the share of tokens that differ where they are really generated, free of the full model's tokens? Then
the thresholds of one division are run for real on its unseen prompts, skipped keys and values computed and copied, and
the full model says how likely it holds what came of it (nats a token).

    python -m experiments.generation.guarantee [--model FOLDER --prompts FILE]    (stories: 8 minutes of one core)
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F

from earlyexit.checkpoint import RampOptions, add_ramps
from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.dataset import read_labelled
from earlyexit.generation.sequence import step_of
from earlyexit.layout import Layout
from earlyexit.memory import Fill
from earlyexit.model import EarlyExitModel
from earlyexit.offline import Asked, Generated, decoder_of, entered, generate
from earlyexit.piece import Piece
from earlyexit.policies.foresight import ForeseenPolicy
from earlyexit.ramps.vocabulary import VocabularyHead
from earlyexit.store import load_model
from earlyexit.tasks.token import TokenTask
from earlyexit.train import no_progress
from earlyexit.training.tokens import TOKEN_OPTIONS, token_states, train_token_ramps
from experiments.data import require_data
from experiments.generation.stories import encode, read_pieces, read_stories
from offramp.jobs.token_calibration import record_generations
from offramp.jobs.token_training import prompts_of
from optimizer.risk import Guarantee
from optimizer.sequences import bounded_losses, differing, learn_then_test_sequences, of_sequences, rouge_loss
from optimizer.thresholds import divide
from profiles.records import ExitRecords, IntArray
from profiles.scores import FloatArray

WORDS = (
    "Zoo Lily Once Tom The Mom One There He She Max Ben Sue dog cat bird ball park day tree red big little car box toy"
)
DESIGN, TESTED = 0.2, 0.4
"""Shares of the sequences; the rest is unseen."""
LOSSES: dict[str, Callable[[Sequence[int], Sequence[int]], float]] = {
    "tokens that differ": differing,
    "1 - ROUGE-L": rouge_loss,
    "not the same to the end": lambda early, full: float(early != full),
}
LOOKED_AT = 24
"""Sequences whose keys and values are compared."""
AT_ONCE = 64
"""Sequences of a batch, where many are generated."""
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """What 200 divisions gave."""

    held: float
    """Share of divisions whose unseen loss was within the budget."""
    unseen_loss: float
    generated_held: float
    """The same of the share of tokens that differ where unseen sequences are generated."""
    generated_loss: float
    generated: int
    """Sequences that were, since a ramp may let a token of theirs out with another."""
    above_bound: int
    """Of those, whose generated loss is above their bounded one."""
    early_tokens: float
    mean_blocks: float
    promised: float
    """Share of divisions in which anything could leave."""


def stories(num_prompts: int, answer: int) -> tuple[EarlyExitModel, Prompts]:
    """With four ramps that learned of its own answers, and other prompts."""
    folder = require_data("generation")
    pieces, rng = read_pieces(folder / "tok512.bin"), random.Random(0)
    torch.manual_seed(0)
    model = add_ramps(
        read_stories(folder / "stories260K.bin"),
        name="stories",
        family="llama",
        codec={"name": "prompt", "max_length": 512},
        task=TokenTask(512, (1, 2)),
        ramps=RampOptions(style="adapted", at=(0, 1, 2, 3), pooling="last"),
    ).requires_grad_(False)
    prompts = [encode(pieces, " ".join(rng.sample(WORDS.split(), 3))) for _ in range(num_prompts + 100)]
    said = generate(model, prompts[:100], Asked(max_tokens=answer, ends=frozenset((1, 2))))
    learned = token_states(model, [each.tokens for each in said], [len(each.prompt) for each in said], TOKEN_OPTIONS)
    train_token_ramps(model, learned)
    return model, prompts[100:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What thresholds do to sequences that are generated under them, keys and values computed."""

    model: EarlyExitModel
    prompts: Prompts
    records: ExitRecords
    asked: Asked
    full: Sequence[Generated]
    """The full model's answers."""

    @classmethod
    def of(cls, model: EarlyExitModel, prompts: Prompts, records: ExitRecords, answer: int) -> Judge:
        """`records`: of these prompts."""
        asked = replace(asked_of(model, answer), batch=AT_ONCE)
        return cls(model=model, prompts=prompts, records=records, asked=asked, full=generate(model, prompts, asked))

    def losses(self, chosen: IntArray, thresholds: Mapping[int, float]) -> tuple[FloatArray, FloatArray]:
        """Of some sequences the bounded losses, and the shares of tokens that differ, (S,) each.

        Where no ramp lets a token out with another an answer is the full model's, so it is not generated.
        """
        bounded_S = bounded_losses(of_sequences(self.records, chosen), thresholds)
        (parting,) = np.nonzero(bounded_S)
        numbers = chosen[parting].tolist()
        early = generate(self.model, [self.prompts[k] for k in numbers], leaving(self.asked, thresholds, "compute"))
        losses_S = np.zeros(len(chosen))
        losses_S[parting] = [
            differing(each.answer, self.full[k].answer) for k, each in zip(numbers, early, strict=True)
        ]
        return bounded_S, losses_S


def divisions(judge: Judge, guarantee: Guarantee, count: int) -> Divided:
    """How the promise did on sequences that nobody had seen."""
    records, bounded, differ, early, blocks, promised = judge.records, [], [], [], [], 0
    for seed in range(count):
        design, tested, unseen = parts_of(len(judge.prompts), seed)
        found = learn_then_test_sequences(of_sequences(records, design), of_sequences(records, tested), guarantee)
        outcome = of_sequences(records, unseen).outcome(found.thresholds)
        bounded_S, losses_S = judge.losses(unseen, found.thresholds)
        bounded.append(bounded_S)
        differ.append(losses_S)
        early.append(float((outcome.exits_N < records.num_blocks - 1).mean()))
        blocks.append(outcome.mean_blocks)
        promised += bool(found.thresholds)
    bounded_CS, differ_CS = np.array(bounded), np.array(differ)
    return Divided(
        held=float(np.mean(bounded_CS.mean(1) <= guarantee.budget)),
        unseen_loss=float(bounded_CS.mean()),
        generated_held=float(np.mean(differ_CS.mean(1) <= guarantee.budget)),
        generated_loss=float(differ_CS.mean()),
        generated=int((bounded_CS > 0).sum()),
        above_bound=int((differ_CS > bounded_CS + 1e-9).sum()),
        early_tokens=float(np.mean(early)),
        mean_blocks=float(np.mean(blocks)),
        promised=promised / count,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """What leaving early came to, beside the full model's answers."""

    tokens: int
    left_early: int
    below_threshold: int
    """Of those who left early."""
    losses: dict[str, FloatArray]
    """Of every sequence, by the loss's name."""


def asked_of(model: EarlyExitModel, answer: int) -> Asked:
    """Greedy answers of the whole model, of so many tokens at most."""
    assert isinstance(model.task, TokenTask)
    return Asked(max_tokens=answer, ends=frozenset(model.task.ends))


def leaving(asked: Asked, thresholds: Mapping[int, float], fill: Fill) -> Asked:
    """The same with exits."""
    return replace(asked, policy=ForeseenPolicy(dict(thresholds)), ramps=tuple(thresholds), fill=fill)


def beside(early: Sequence[Generated], full: Sequence[Generated], thresholds: Mapping[int, float], last: int) -> Early:
    """Early generations and the full model's, whose exit is after block `last`."""
    left = [(at, score) for each in early for at, score in zip(each.exits, each.scores, strict=True)]
    gone = [(at, score) for at, score in left if at < last]
    answers = [(one.answer, other.answer) for one, other in zip(early, full, strict=True)]
    return Early(
        tokens=len(left),
        left_early=len(gone),
        below_threshold=sum(bool(np.float32(score) < np.float32(thresholds[at])) for at, score in gone),
        losses={name: np.array([loss(*pair) for pair in answers]) for name, loss in LOSSES.items()},
    )


def told(values_S: FloatArray) -> list[float]:
    """A mean over sequences and the ends of its 95 % interval (normal)."""
    mean, half = values_S.mean(), 1.96 * values_S.std(ddof=1) / np.sqrt(len(values_S))
    return [round(float(each), 4) for each in (mean, mean - half, mean + half)]


def nats(model: EarlyExitModel, said: Sequence[Generated]) -> FloatArray:
    """Of every sequence the cross entropy of its answer's tokens by the full model behind them, in the mean, (S,)."""
    states = token_states(model, [each.tokens for each in said], [len(each.prompt) for each in said], TOKEN_OPTIONS)
    assert isinstance(model.head, VocabularyHead)
    found, first = [], 0
    for each in said:
        rows = states.states[model.num_blocks - 1][first : first + len(each.answer)]
        found.append(float(F.cross_entropy(model.head.classify(rows), torch.tensor(each.answer))))
        first += len(each.answer) + 1  # the last state says what would come next
    return np.array(found)


def run_for_real(
    model: EarlyExitModel, prompts: Prompts, thresholds: dict[int, float], answer: int, fill: Fill
) -> tuple[Early, float]:
    """Early generations beside the full model's, and how far their keys and values are off."""
    asked = asked_of(model, answer)
    full = generate(model, prompts, asked)
    held: list[tuple[Generated, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def keep(number: int, each: Generated) -> None:
        if len(held) < LOOKED_AT:
            held.append((each, _caught_up(model, number, each)))

    early = generate(model, prompts, leaving(asked, thresholds, fill), ended=keep)
    found = beside(early, full, thresholds, model.num_blocks - 1)
    by_full = nats(model, early)
    found.losses["nats a token"], found.losses["more than the full model's"] = by_full, by_full - nats(model, full)
    return found, max(_distance(model, each, kept) for each, kept in held)


@torch.inference_mode()
def _caught_up(model: EarlyExitModel, number: int, each: Generated) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Its keys and values by block, once its last token has run all blocks and whatever waited is filled in."""
    limit = len(each.tokens)
    piece = entered(model, {number: step_of(each.tokens[-1:], number, limit - 1, limit, len(each.prompt))})
    _through(model, piece)
    return [(keys.clone(), values.clone()) for keys, values in _held(model, number, limit)]


def _held(model: EarlyExitModel, number: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    kv = decoder_of(model).memory.kv
    return [kv.held(block, number, tokens) for block in range(model.num_blocks)]


@torch.inference_mode()
def _distance(model: EarlyExitModel, each: Generated, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """From those of the full model, run over the same tokens at once."""
    decoder_of(model).open_memory(len(each.tokens) + 16)
    _through(model, entered(model, {1: step_of(each.tokens, 1, 0, len(each.tokens), len(each.prompt))}))
    pairs = zip(kept, _held(model, 1, len(each.tokens)), strict=True)
    return max(float((a - b).abs().max()) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def _through(model: EarlyExitModel, piece: Piece) -> None:
    model.run_blocks(0, model.num_blocks, piece.tensors, Layout(piece.lengths_B))


def parser_of(description: str | None, *, sequences: int) -> argparse.ArgumentParser:
    """What every experiment on generated sequences is asked; `model_of` has the model and its prompts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder, trained; default: stories260K, trained here")
    parser.add_argument("--prompts", type=Path, help="of --model: a file of prompts")
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--answer", type=int, default=48, help="tokens at most")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    return parser


def model_of(options: argparse.Namespace) -> tuple[EarlyExitModel, Prompts]:
    """As it was asked for."""
    if options.model is None:
        return stories(options.sequences, options.answer)
    return of_folder(options.model, options.prompts, options.sequences)


def parts_of(count: int, seed: int = 0) -> tuple[IntArray, IntArray, IntArray]:
    """Sequences that lay the path, those that test it, and unseen ones, drawn at random."""
    design, rest = divide(count, round(count * DESIGN), seed)
    tested, unseen = np.split(rest, [round(count * TESTED)])
    return design, tested, unseen


def main() -> None:
    """Print a line of JSON per figure."""
    parser = parser_of(__doc__, sequences=400)
    parser.add_argument("--divisions", type=int, default=200)
    parser.add_argument("--run", type=int, default=100, help="unseen prompts that are run for real")
    parser.add_argument("--records", type=Path, help="keep exit records here, or take them from here")
    options = parser.parse_args()
    model, prompts = model_of(options)
    if options.records is not None and options.records.is_file():
        records = ExitRecords.load(options.records)
    else:
        records = record_generations(model, prompts, "foreseen", max_tokens=options.answer, progress=no_progress)
        if options.records is not None:
            records.save(options.records)
    agreement = {
        ramp: round(float(1 - loss), 3) for ramp, loss in zip(records.ramps, records.losses_NR.mean(0), strict=True)
    }
    print(json.dumps({"sequences": len(prompts), "tokens": len(records), "agreement by ramp": agreement}), flush=True)
    judge = Judge.of(model, prompts, records, options.answer)
    for budget in options.budgets:
        found = divisions(judge, Guarantee(budget=budget, confidence=0.9), options.divisions)
        print(json.dumps({"budget": budget, **asdict(found)}), flush=True)
    _print_real(model, prompts, records, options)


def _print_real(model: EarlyExitModel, prompts: Prompts, records: ExitRecords, options: argparse.Namespace) -> None:
    design, tested, unseen = parts_of(len(prompts))
    guarantee = Guarantee(budget=options.budgets[-1], confidence=0.9)
    found = learn_then_test_sequences(of_sequences(records, design), of_sequences(records, tested), guarantee)
    if not found.thresholds:
        print("nothing can be promised: no token leaves")
        return
    chosen = [prompts[k] for k in unseen[: options.run]]
    for fill in get_args(Fill):
        real, distance = run_for_real(model, chosen, found.thresholds, options.answer, fill)
        counts = {name: value for name, value in asdict(real).items() if name != "losses"}
        means = {name: told(losses_S) for name, losses_S in real.losses.items()}
        off = {"keys and values off by": distance}
        print(json.dumps({"budget": guarantee.budget, "fill": fill, **counts, **means, **off}), flush=True)


def of_folder(folder: Path, file: Path, count: int) -> tuple[EarlyExitModel, Prompts]:
    """A trained model, and prompts as it learned of."""
    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    assert isinstance(codec, PromptCodec)
    assert isinstance(model.task, TokenTask)
    rows = read_labelled(file, label_column=None)
    chat = bool(model.info.provenance.get("chat"))
    return model, prompts_of(codec, rows.select(range(min(count, len(rows)))), model.task, chat=chat)


if __name__ == "__main__":
    main()
