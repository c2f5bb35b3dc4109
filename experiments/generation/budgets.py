"""How many tokens leave where the losses of real generations are tested, and what `copy` changes; with intervals.

    python -m experiments.generation.budgets [--model FOLDER --prompts FILE]    (1,000 translations: 8 minutes)

What `offramp calibrate` tests bounds the loss from records, without a generation per threshold. Here sequences are
generated under every candidate: a fifth of them lay a path of thresholds, two fifths run at places of it, keys and
values computed and copied, and Learn-then-Test keeps the boldest place whose mean loss it accepts with 90 %
confidence; the rest then run there. Losses are 1 - ROUGE-L and the share of tokens that differ, each by itself.
`copy less compute` is the paired difference of a loss under equal thresholds, with its 95 % interval.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from earlyexit.memory import Fill
from earlyexit.model import EarlyExitModel
from earlyexit.offline import Asked, Generated, generate
from earlyexit.train import no_progress
from experiments.generation.guarantee import (
    Early,
    Prompts,
    asked_of,
    beside,
    leaving,
    model_of,
    parser_of,
    parts_of,
    told,
)
from offramp.jobs.token_calibration import record_generations
from optimizer.risk import Guarantee
from optimizer.sequences import bounded_losses, learn_then_test_sequences, of_sequences, path_of, tried_in_order
from profiles.records import ExitRecords

EARLY_SHARES = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
"""Of the design sequences' tokens, that leave at the places of the path that are tried."""
COMPARED = ("tokens that differ", "1 - ROUGE-L")
BATCH = 48
Thresholds = dict[int, float]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, some prompts, and what it says whole."""

    model: EarlyExitModel
    prompts: Prompts
    asked: Asked
    full: Sequence[Generated]

    @classmethod
    def of(cls, model: EarlyExitModel, prompts: Prompts, answer: int) -> Bench:
        asked = replace(asked_of(model, answer), batch=BATCH)
        return cls(model, prompts, asked, generate(model, prompts, asked))

    def early(self, thresholds: Thresholds, fill: Fill) -> Early:
        """Run with exits."""
        said = generate(self.model, self.prompts, leaving(self.asked, thresholds, fill))
        return beside(said, self.full, thresholds, self.model.num_blocks - 1)


def places(design: ExitRecords) -> list[Thresholds]:
    """Of the path the first thresholds that let so many of the design sequences' tokens leave."""
    path = path_of(design)
    shares = [float((design.outcome(each).exits_N < design.num_blocks - 1).mean()) for each in path]
    found = [next((k for k, share in enumerate(shares) if share >= least), None) for least in EARLY_SHARES]
    return [path[k] for k in sorted({k for k in found if k is not None})]


def tested_everywhere(bench: Bench, candidates: Sequence[Thresholds]) -> dict[Fill, list[Early]]:
    """Both fills under every candidate, a line each."""
    found: dict[Fill, list[Early]] = {fill: [] for fill in get_args(Fill)}
    for thresholds in candidates:
        for fill, runs in found.items():
            runs.append(bench.early(thresholds, fill))
        computed, copied = (runs[-1] for runs in found.values())
        line: dict[str, object] = {"left early": round(computed.left_early / computed.tokens, 4)}
        for name in COMPARED:
            line[name] = {"compute": told(computed.losses[name]), "copy": told(copied.losses[name])}
            line[f"{name}, copy less compute"] = told(copied.losses[name] - computed.losses[name])
        print(json.dumps(line), flush=True)
    return found


def kept(
    candidates: Sequence[Thresholds], runs: Sequence[Early], loss: str, guarantee: Guarantee, sequences: int
) -> Thresholds:
    """The boldest of the candidates by their real losses."""
    by_thresholds = {id(each): run.losses[loss] for each, run in zip(candidates, runs, strict=True)}
    return tried_in_order(candidates, lambda each: by_thresholds[id(each)], guarantee, sequences).thresholds


def main() -> None:
    """Print a line of JSON per figure."""
    options = parser_of(__doc__, sequences=500).parse_args()
    model, prompts = model_of(options)
    design, tested, unseen = parts_of(len(prompts))
    records = record_generations(model, prompts, "foreseen", max_tokens=options.answer, progress=no_progress)
    candidates = places(of_sequences(records, design))
    benches = [Bench.of(model, [prompts[k] for k in part], options.answer) for part in (tested, unseen)]
    runs = tested_everywhere(benches[0], candidates)
    every = [each for those in runs.values() for each in those]
    for budget in options.budgets:
        guarantee = Guarantee(budget=budget, confidence=0.9)
        bounded = learn_then_test_sequences(of_sequences(records, design), of_sequences(records, tested), guarantee)
        outcome = of_sequences(records, unseen).outcome(bounded.thresholds)
        early = float((outcome.exits_N < records.num_blocks - 1).mean())
        loss = told(bounded_losses(of_sequences(records, unseen), bounded.thresholds))
        line = {"budget": budget, "of": "bounded loss", "left early": round(early, 4), "unseen": loss}
        print(json.dumps(line | {"thresholds": _plain(bounded.thresholds)}), flush=True)
        for name in COMPARED:
            for fill, those in runs.items():
                every.append(
                    _unseen(benches[1], kept(candidates, those, name, guarantee, len(tested)), name, fill, budget)
                )
    gone, below = sum(each.left_early for each in every), sum(each.below_threshold for each in every)
    print(json.dumps({"tokens that left early in all runs": gone, "of these below their threshold": below}))


def _unseen(bench: Bench, thresholds: Thresholds, name: str, fill: Fill, budget: float) -> Early:
    run = bench.early(thresholds, fill)
    left, loss = round(run.left_early / run.tokens, 4), told(run.losses[name])
    line = {
        "budget": budget,
        "of": name,
        "fill": fill,
        "left early": left,
        "unseen": loss,
        "thresholds": _plain(thresholds),
    }
    print(json.dumps(line), flush=True)
    return run


def _plain(thresholds: Thresholds) -> Thresholds:
    return {ramp: round(float(each), 4) for ramp, each in thresholds.items()}


if __name__ == "__main__":
    main()
