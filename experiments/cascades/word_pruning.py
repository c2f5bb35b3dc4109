"""Word pruning: what it cuts, what it saves, and what it costs (Tabi, EuroSys'23, section 4.2 and table 3).

    OFFRAMP_DATA=... python -m experiments.cascades.word_pruning {imdb,ag_news,clinc150} [--share 0.14] [--rounds 7]

The small model is MiniLM-L6, the large one all-mpnet-base-v2, both with heads on frozen backbones. Alpha is chosen on
rows that heads learn from, for the share of words to be cut; accuracy is of other rows. IMDB has 2,000 reviews, so that
each half is tested by heads that learnt from the other. *Rerouted* is the half that the small model is least sure of.
Seconds are the processor's for this thread: of the large model with its encoding on whole texts, and on pruned ones
with everything that pruning adds (the small model's sums of attention, its offsets, the cutting, encoding anew). What
backbones make of texts is kept in runs/word_pruning. Minutes of processor time: IMDB 25, the others 5.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from earlyexit.codecs.text import TextCodec
from earlyexit.model import EarlyExitModel
from earlyexit.network import from_wire
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.reordered import reorder_linears
from earlyexit.split import Segment
from earlyexit.wire import entering
from earlyexit.words import alpha_for, num_words, standing_of
from experiments.cascades.pruning_data import FOLDER, Case, Half, case_of, rerouted_of, right_of
from experiments.kit import keep, show, spread
from experiments.turns import Found, Side, in_turns

SHARES = (0.05, 0.14, 0.3)
TIMED, BATCH = 48, 8
"""Texts of a round, and how many the models run at once."""
REROUTED = 0.5
"""Share of the rows that go on: those of which the small model is least sure."""
POLICY = ConfidencePolicy(1.0)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A part's texts without some of their words."""

    alpha: float
    texts: list[str]
    words_cut: float
    """Share, over all texts."""
    tokens_cut: float
    """Share of the large model's tokens."""


def prune(case: Case, half: Half, rows: Sequence[int], share: float) -> Pruned:
    """The texts of rows, by the alpha that cuts a share of the words that heads learn from."""
    known = [standing_of(case.codec.words(case.texts[row]), case.importance[row]) for row in half.learn]
    alpha = alpha_for(share, np.concatenate(known))
    whole = [case.texts[row] for row in rows]
    texts = [case.codec.pruned(case.texts[row], case.importance[row], alpha, rest=False) for row in rows]
    seen = [case.codec.pruned(text, ones(case.codec, text), 0.5, rest=False) for text in whole]
    return Pruned(
        alpha=alpha,
        texts=texts,
        words_cut=1 - sum(map(num_words, texts)) / sum(map(num_words, seen)),
        tokens_cut=1 - tokens_of(case.large_codec, texts) / tokens_of(case.large_codec, whole),
    )


def ones(codec: TextCodec, text: str) -> Array:
    """An importance by which no word is cut but those that the model does not see."""
    return np.ones(codec.encode([text], truncate=True)[0].length)


def tokens_of(codec: TextCodec, texts: Sequence[str]) -> int:
    """Of all texts together, as far as the model takes them."""
    return sum(each.length for each in codec.encode(texts, truncate=True))


def tell_special(case: Case) -> None:
    """Print how much of all attention the special tokens receive."""
    shares = []
    for text, importance_N in zip(case.texts, case.importance, strict=True):
        (words,) = case.codec.words(text)
        shares.append(1 - importance_N[words.are_words_N].sum() / importance_N.sum())
    quartiles = np.quantile(shares, (0.05, 0.5, 0.95))
    print(
        f"{case.name}: [CLS] and [SEP] receive {np.mean(shares):.1%} of the small model's attention "
        f"(median {quartiles[1]:.1%}, 5 to 95 %: {quartiles[0]:.1%} to {quartiles[2]:.1%})"
    )


def losses(case: Case, shares: Sequence[float]) -> list[dict[str, float]]:
    """What pruning costs in accuracy, over all halves: a row per share."""
    rows = []
    rerouted = [rerouted_of(case, half, REROUTED) for half in case.halves]
    for share in shares:
        whole, cut, found = [], [], []
        for half, (unsure, _) in zip(case.halves, rerouted, strict=True):
            pruned = prune(case, half, unsure.tolist(), share)
            found.append(pruned)
            right = right_of(case, half, unsure, pruned.texts)
            whole.append(right.whole)
            cut.append(right.pruned)
        rows.append(
            {
                "share": share,
                "alpha": float(np.mean([each.alpha for each in found])),
                "words_cut": float(np.mean([each.words_cut for each in found])),
                "tokens_cut": float(np.mean([each.tokens_cut for each in found])),
                "small, of all": float(np.mean([right for _, right in rerouted])),
                "large, of rerouted": float(np.concatenate(whole).mean()),
                **lost_of(np.concatenate(whole).astype(np.float64) - np.concatenate(cut)),
            }
        )
    return rows


def lost_of(lost_N: Array) -> dict[str, float]:
    """Mean points lost on rerouted inputs, with a 95 % interval of the paired difference (normal)."""
    half = 1.96 * lost_N.std(ddof=1) / np.sqrt(len(lost_N))
    mean = float(lost_N.mean())
    return {
        "rerouted": len(lost_N),
        "lost": mean,
        "lost_low": mean - half,
        "lost_high": mean + half,
        "answers_changed": float((lost_N != 0).mean()),
    }


class Clock:
    """Sides whose processor time is compared."""

    def __init__(self, case: Case, alpha: float, rows: Sequence[int]) -> None:
        self._case = case
        self._alpha = alpha
        self._texts = [case.texts[row] for row in rows]
        self._importance = [case.importance[row].astype(np.float16) for row in rows]
        self._pruned = [
            case.codec.pruned(text, own, alpha, rest=False)
            for text, own in zip(self._texts, self._importance, strict=True)
        ]

    def sides(self) -> dict[str, Side]:
        """What is timed, by name; each of them all texts."""
        case = self._case
        return {
            "large, whole": partial(self._timed, partial(self._run, case.large, case.large_codec, self._texts)),
            "large, pruned": partial(self._timed, partial(self._run, case.large, case.large_codec, self._pruned)),
            "cutting": partial(self._timed, self._cut),
            "small": partial(self._timed, partial(self._run, case.small, case.codec, self._texts)),
            "small, measured": partial(
                self._timed, partial(self._run, case.small, case.codec, self._texts, measured=True)
            ),
        }

    def _timed(self, work: Callable[[], None]) -> dict[str, float]:
        began_s = time.thread_time()
        work()
        return {"ms": 1e3 * (time.thread_time() - began_s) / len(self._texts)}

    @torch.inference_mode()
    def _run(self, model: EarlyExitModel, codec: TextCodec, texts: Sequence[str], *, measured: bool = False) -> None:
        for first in range(0, len(texts), BATCH):
            encoded = [codec.encode([text], truncate=True)[0] for text in texts[first : first + BATCH]]
            wire = entering([str(k) for k in range(len(encoded))], encoded, measured=measured)
            model.run(Segment(first=0, end=model.num_blocks, ramp=None), from_wire(model, wire, POLICY))

    def _cut(self) -> None:
        for text, own in zip(self._texts, self._importance, strict=True):
            self._case.codec.pruned(text, own, self._alpha, rest=False)


def saved(found: Found) -> dict[str, object]:
    """How much faster the large model is, alone and with all that pruning adds, by round."""
    ms = {side: np.array(figures["ms"]) for side, figures in found.items()}
    added = ms["cutting"] + ms["small, measured"] - ms["small"]
    return {
        "ms": {side: median(each.tolist()) for side, each in ms.items()},
        "large_alone": spread(1 - ms["large, pruned"] / ms["large, whole"]),
        "with_all": spread(1 - (ms["large, pruned"] + added) / ms["large, whole"]),
        "measuring_over_small": spread(ms["small, measured"] / ms["small"] - 1),
    }


def clock(case: Case, share: float, rounds: int) -> dict[str, object]:
    """Print and give what a share of the words saves in seconds."""
    half = case.halves[0]
    rows = np.random.default_rng(0).choice(half.test, size=min(TIMED, len(half.test)), replace=False)
    alpha = prune(case, half, rows.tolist(), share).alpha
    for model in (case.small, case.large):
        reorder_linears(model.backbone)
    figures = saved(in_turns(Clock(case, alpha, rows.tolist()).sides(), rounds))
    show("", ("side", "ms of the processor per text"), list(dict(figures["ms"]).items()))  # type: ignore[call-overload] # it is one
    for name in ("large_alone", "with_all", "measuring_over_small"):
        print(f"{name.replace('_', ' ')}: {100 * figures[name].median:.1f} %")  # type: ignore[attr-defined] # a Spread
    return figures


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.cascades.word_pruning", description=__doc__)
    parser.add_argument("data", choices=("imdb", "ag_news", "clinc150"))
    parser.add_argument("--share", type=float, default=0.14, help="of the words, whose time is measured")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, help="whose accuracy is measured")
    parser.add_argument("--rows", type=int, help="so many at most")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = case_of(options.data, options.rows)
    tell_special(case)
    rows = losses(case, options.shares)
    show(
        f"{case.name}: {sum(len(half.test) for half in case.halves)} texts",
        tuple(rows[0]),
        [tuple(each.values()) for each in rows],
    )
    times = clock(case, options.share, options.rounds)
    print(keep({"accuracy": rows, "times": times}, FOLDER / f"{case.name}.json"))


if __name__ == "__main__":
    main()
