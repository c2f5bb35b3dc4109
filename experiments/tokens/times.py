"""What a batch of inputs of mixed lengths takes, against what tables of one length say of its tokens.

    python -m experiments.tokens.times [--hidden 256] [--blocks 4] [--budgets 1024 4096] [--repeats 5]

Batches are drawn in turn from AG News and IMDB and filled up to a budget of tokens. Each is timed in the same rounds as
the profile's own splits, at several lengths, of a transformer with random weights on the CPU. Predicted is the table of
a length L at tokens / L inputs, for every L; and the table at the batch's own length, between the two around it, where
"own" is the mean length that a token sees (the sum of squared lengths over their sum: what attention over nothing but
tokens would cost), or the longest input's (what padded attention costs). Writes runs/token-times-*.json. Minutes: 3.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.clock import MonotonicClock
from earlyexit.split import Split
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.trained import ag_news, imdb
from profiles.latency import LatencyProfile
from profiles.live_splits import LiveSplits
from profiles.measure import LEAST_WARM_UPS, latency_tables, profile_splits, time_splits

FloatArray = npt.NDArray[np.float64]
LENGTHS = (32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16)
MOST = 512
"""Tokens that the model takes; longer texts are cut, as the codec cuts them."""
SPECIAL = 2
PIECES_PER_WORD = 1.3
"""Tokens of WordPiece per word of English, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A batch, measured."""

    lengths: tuple[int, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def token_length(self) -> float:
        """The mean length that a token sees."""
        return sum(each * each for each in self.lengths) / self.tokens


def text_lengths() -> tuple[list[int], list[int]]:
    """Tokens of AG News and of IMDB, by their words."""
    news, films = ag_news.unseen_pairs(), imdb.pairs()
    return [_tokens(text) for text, _ in news], [_tokens(text) for text, _ in films]


def drawn(budget: int, number: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Batches of both kinds in equal parts, each as many of the next inputs as the budget has room for."""
    kinds = text_lengths()
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    while len(batches) < number:
        kind = kinds[rng.integers(2)]
        tokens = kind[rng.integers(len(kind))]
        if batch and sum(batch) + tokens > budget:
            batches.append(tuple(batch))
            batch = []
        batch.append(tokens)
    return batches


def main() -> None:
    """Measure, print and write."""
    parser = ArgumentParser(prog="python -m experiments.tokens.times", description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--number", type=int, default=8, help="batches of each budget")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    batches = [each for budget in options.budgets for each in drawn(budget, options.number, rng)]
    profile, timed = measure(batches, options)
    errors = {name: _errors(timed, predict) for name, predict in predictors(profile).items()}
    rows = [
        (name, *(f"{value:.1%}" for value in (np.median(np.abs(each)), np.abs(each).max(), np.median(each))))
        for name, each in errors.items()
    ]
    show(
        f"{len(timed)} batches of AG News and IMDB, hidden {options.hidden}, {options.blocks} blocks, CPU",
        ("predicted by", "|error| median", "worst", "bias"),
        rows,
    )
    document: dict[str, Any] = {
        "options": vars(options),
        "tables": {length: profile.at(length).block_s_NB.sum(0).tolist() for length in profile.lengths},
        "batches": [{"lengths": each.lengths, "seconds": each.seconds} for each in timed],
        "errors": {name: each.tolist() for name, each in errors.items()},
    }
    print(f"written: {keep(document, RUNS / f'token-times-{options.hidden}.json')}")


def measure(batches: Sequence[tuple[int, ...]], options: Any) -> tuple[LatencyProfile, list[Timed]]:
    """A profile and the batches, in the same rounds."""
    import torch

    torch.set_num_threads(options.threads)
    splits = LiveSplits(_model(options), np.random.default_rng(options.seed))
    clock, rng = MonotonicClock(), np.random.default_rng(options.seed)
    whole = [Split(first=0, end=options.blocks, batch=len(each)) for each in batches]
    runs = [splits.prepare_mixed(split, each) for split, each in zip(whole, batches, strict=True)]
    seconds: list[list[float]] = [[] for _ in runs]
    own = profile_splits(options.blocks, (), BATCHES, LENGTHS)
    points = []
    for round_ in range(options.repeats):
        points.append(time_splits(own, splits, clock=clock, rng=rng, repeats=1))
        for k in rng.permutation(len(runs)):
            for _ in range(LEAST_WARM_UPS):  # as points of a profile are: libraries keep what they made for a shape
                runs[k]()
            began_s = clock.now_s()
            runs[k]()
            seconds[k].append(clock.now_s() - began_s)
        print(f"round {round_ + 1} of {options.repeats}", flush=True)
    joined = [
        type(first[0])(timed=first[0].timed, seconds=tuple(each.seconds[0] for each in first))
        for first in zip(*points, strict=True)
    ]
    profile = LatencyProfile(
        model="random",
        num_blocks=options.blocks,
        ramps=(),
        device="cpu",
        backend="torch",
        dtype="float32",
        kind="measured",
        tables=latency_tables(joined, options.blocks, ()),
        provenance={},
    )
    return profile, [
        Timed(lengths=each, seconds=float(np.median(took))) for each, took in zip(batches, seconds, strict=True)
    ]


def predictors(profile: LatencyProfile) -> dict[str, Callable[[Timed], float]]:
    """By what is assumed of the batch's length."""

    def at(length: float, tokens: int) -> float:
        below = max(each for each in (*LENGTHS[:1], *LENGTHS) if each <= max(length, LENGTHS[0]))
        above = min(each for each in (*LENGTHS, LENGTHS[-1]) if each >= min(length, LENGTHS[-1]))
        share = 0.0 if above == below else (length - below) / (above - below)
        return (1 - share) * _seconds(profile, below, tokens) + share * _seconds(profile, above, tokens)

    by_length = {
        f"the table of {length} tokens": (lambda each, length=length: at(length, each.tokens)) for length in LENGTHS
    }
    return by_length | {
        "the length that a token sees": lambda each: at(each.token_length, each.tokens),
        "the longest input": lambda each: at(max(each.lengths), each.tokens),
    }


def _seconds(profile: LatencyProfile, length: int, tokens: int) -> float:
    """Linear between measured sizes, and past the largest along its last piece."""
    table = profile.at(length)
    total_s_B, size = table.block_s_NB.sum(0), tokens / length
    if size <= table.batches[-1]:
        return float(np.interp(size, table.batches, total_s_B))
    slope = (total_s_B[-1] - total_s_B[-2]) / (table.batches[-1] - table.batches[-2])
    return float(total_s_B[-1] + slope * (size - table.batches[-1]))


def _errors(timed: Sequence[Timed], predict: Callable[[Timed], float]) -> FloatArray:
    return np.array([predict(each) / each.seconds - 1 for each in timed])


def _tokens(text: str) -> int:
    return min(MOST, round(len(text.split()) * PIECES_PER_WORD) + SPECIAL)


def _model(options: Any) -> Any:
    from earlyexit.checkpoint import RampOptions, random_model

    sizes = {
        "vocab_size": 1000,
        "hidden_size": options.hidden,
        "num_blocks": options.blocks,
        "num_heads": options.hidden // 64,
        "intermediate_size": 4 * options.hidden,
        "max_length": MOST,
    }
    return random_model(sizes, ramps=RampOptions(at=()), seed=options.seed)


if __name__ == "__main__":
    main()
