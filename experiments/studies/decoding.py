"""E3, figures 10 to 12: decoders on 4 accelerators (section 5.1.3)."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from earlyexit.named import Fill
from experiments.data import require_data
from experiments.problems import RAMPS_AT_SPLIT_ENDS
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, largest_ratios, ratio
from optimizer.generation.demand import Generation
from optimizer.plans.plan import Stage
from optimizer.problems.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned
from optimizer.search.planner import solve
from optimizer.search.space import SPACES, Space
from profiles.lengths import Lengths
from profiles.table import FloatArray, LatencyTable

# E3's generative models (section 5.1.3) on 4 accelerators: published times of layers, and exits as in the paper.

PHI_2: Final = "profiles/vidur/a40_phi-2_mlp.csv.gz"
LLAMA_2: Final = "profiles/vidur/a40_Llama-2-7b-hf_mlp.csv.gz"
NUM_GPUS: Final = 4
PATIENT_S: Final = 100.0
"""An SLO that never limits, because closed-loop clients promise nothing."""
LINK: Final = Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)
"""10 Gbit/s between servers (section 5)."""
SIDES: Final[Mapping[str, Space]] = {
    "stock": SPACES["stock"],
    "early-exit": SPACES["early-exit"],
    "e3": RAMPS_AT_SPLIT_ENDS,
    "best": SPACES["best"],
}
"""E3 checks for exits only at the ends of splits (section 5.1.3)."""

MOST_NAMED: Final = 3

T5_BLOCKS: Final = 8
T5_WIDTH: Final = 512
OUTPUT_TOKENS: Final = 18.0
"""Mean length of summaries (section 5.1.3); the paper does not state it for translations."""
T5_LAYER: Final = 2 * 4 * T5_WIDTH * 384 + 3 * T5_WIDTH * 1024
"""Weights of a decoder layer of the T5 v1.1 with 8 layers: self and cross attention, gated feed-forward."""
T5_HEAD: Final = T5_WIDTH * 32128
T5_COPY: Final = 2 * T5_WIDTH * 384 / T5_LAYER
"""Share for its own keys and values; those of the encoder exist from the beginning."""
ONE_EXIT: Final = (1.0, 1.0, *(0.3,) * 6)
"""70 % leave after layer 2, none elsewhere: the paper states nothing more."""
EVERY_LAYER: Final = (1.0, 0.6, 0.3, 0.25, 0.21, 0.18, 0.15, 0.13)
"""As many leave by layer 2, and others before and after it: invented so that a token runs 8 / 2.84 layers."""

LLAMA_BLOCKS: Final = 32
LLAMA_HEAD: Final = 128256 * 4096 / (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
"""Weights of the vocabulary head over those of a layer, of Llama 3.1 8B."""
PROMPT_TOKENS: Final = 128
"""Tokens of a BoolQ question with its passage; the paper does not state it."""
LLAMA_EXITS: Final = (*(1.0,) * 25, *(0.5,) * 7)


@cache
def layer_times(name: str) -> tuple[FloatArray, FloatArray]:
    """Returns tokens per batch (ascending) and seconds of a layer without attention, from one of vidur's files."""
    with gzip.open(require_data(name), "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["num_tensor_parallel_workers"] == "1"]
    medians = [key for key in rows[0] if key.endswith(".median") and ".emb." not in key]
    found = {int(row["num_tokens"]): sum(float(row[key] or 0) for key in medians) / 1e3 for row in rows}
    tokens = sorted(found)
    return np.array(tokens, dtype=float), np.array([found[each] for each in tokens])


def layer_s(name: str, tokens: Sequence[float]) -> FloatArray:
    """Returns seconds of a layer, non-decreasing in the number of tokens."""
    known, seconds = layer_times(name)
    found: FloatArray = np.interp(np.array(tokens, dtype=float), known, np.maximum.accumulate(seconds))
    return found


def table_of(block_s_B: FloatArray, head_s_B: FloatArray, batches: tuple[int, ...], num_blocks: int) -> LatencyTable:
    """Returns equal blocks, with the head in the last one and in a ramp after each other block."""
    block_s_NB = np.tile(block_s_B, (num_blocks, 1))
    block_s_NB[-1] += head_s_B
    return LatencyTable(batches=batches, block_s_NB=block_s_NB, ramp_s_EB=np.tile(head_s_B, (num_blocks - 1, 1)))


def t5(survival_N: tuple[float, ...], *, with_head: bool = False, fill: Fill = "copy") -> PlanProblem:
    """Returns decoder steps of CALM's T5 on 4 accelerators, without the encoder.

    With `with_head`, the vocabulary head and its ramps take time in proportion to their weights; otherwise none.
    """
    batches = (1, 2, 4, 8, 16, 32, 64)
    block_s_B = layer_s(PHI_2, batches)
    head_s_B = block_s_B * (T5_HEAD / T5_LAYER if with_head else 0.0)
    nothing = LatencyTable(batches=(1,), block_s_NB=np.zeros((T5_BLOCKS, 1)), ramp_s_EB=np.zeros((T5_BLOCKS - 1, 1)))
    generation = Generation(
        prompt=Lengths(mean=1),
        output=Lengths(mean=OUTPUT_TOKENS),
        fill=fill,
        copy_share=T5_COPY,
        prefill={"A6000": nothing},
    )
    table = table_of(block_s_B, head_s_B, batches, T5_BLOCKS)
    return _problem(table, survival_N, bytes_per_sample=2.0 * T5_WIDTH, generation=generation)


def llama(survival_N: tuple[float, ...] = LLAMA_EXITS, *, with_head: bool = True) -> PlanProblem:
    """Returns prompts of Llama 3.1 8B whose answer is one token, so that no sequence continues."""
    batches = (1, 2, 4, 8, 16)
    block_s_B = layer_s(LLAMA_2, [PROMPT_TOKENS * batch for batch in batches])
    head_s_B = layer_s(LLAMA_2, batches) * (LLAMA_HEAD if with_head else 0.0)
    table = table_of(block_s_B, head_s_B, batches, LLAMA_BLOCKS)
    return _problem(table, survival_N, bytes_per_sample=2.0 * 4096 * PROMPT_TOKENS, generation=None)


def llama_of(num_gpus: int, slo_s: float) -> PlanProblem:
    """Returns the problem with E3's one ramp, after layer 25, with more accelerators and an SLO."""
    whole, ramp = llama(), LLAMA_EXITS.index(0.5) - 1
    table = whole.latency["A6000"]
    return replace(
        whole,
        ramps=(ramp,),
        latency={"A6000": replace(table, ramp_s_EB=table.ramp_s_EB[:1])},
        devices={"A6000": Supply(count=num_gpus)},
        slo=Slo(latency_s=slo_s),
    )


def _problem(
    table: LatencyTable, survival_N: tuple[float, ...], *, bytes_per_sample: float, generation: Generation | None
) -> PlanProblem:
    num_blocks = len(survival_N)
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        survival_N=survival_N,
        latency={"A6000": table},
        devices={"A6000": Supply(count=NUM_GPUS)},
        link=LINK,
        bytes_per_sample_N=(bytes_per_sample,) * num_blocks,
        slo=Slo(latency_s=PATIENT_S),
        objective=MaximizeRate(),
        generation=generation,
    )


def layers_allow(survival_N: Sequence[float], cut: int) -> float:
    """Returns the upper bound over stock's rate with an exit after `cut` layers and full batches."""
    num_blocks = len(survival_N)
    return num_blocks / (cut + survival_N[cut] * (num_blocks - cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of every side's plan, by largest batch."""

    case: str
    batches: tuple[int, ...]
    per_s: Mapping[str, tuple[float, ...]]
    splits: Mapping[str, tuple[str, ...]]
    """Blocks and replicas of every plan, as text."""

    def times(self, one: str, other: str, batch: int) -> float | None:
        """Returns the ratio of the first rate to the second."""
        at = self.batches.index(batch)
        return ratio(self.per_s[one][at], self.per_s[other][at])

    def ratios(self, side: str) -> Ratios:
        """Returns the largest ratios."""
        return largest_ratios(self.per_s, side)

    def over_stock(self) -> tuple[Comparison, ...]:
        """Returns every side over stock, at the smallest and the largest batch."""
        return tuple(
            Comparison(f"{self.case}: {side} / stock, batch {batch}", self.times(side, "stock", batch))
            for side in ("early-exit", "e3", "best")
            for batch in dict.fromkeys((self.batches[0], self.batches[-1]))
        )

    def bars(self, title: str, unit: str) -> Bars:
        """Returns the picture by batch."""
        return Bars(title, "largest batch", f"rate ({unit}/s)", tuple(map(str, self.batches)), self.per_s)


def rates(case: str, problem: PlanProblem, batches: Sequence[int]) -> Rates:
    """Returns every side's plan at every largest batch, by the cost model."""
    planned = {
        side: [_planned(with_batch_limit(problem, batch), space) for batch in batches] for side, space in SIDES.items()
    }
    return Rates(
        case=case,
        batches=tuple(batches),
        per_s={side: tuple(each.figures.rate_per_s for each in plans) for side, plans in planned.items()},
        splits={side: tuple(", ".join(map(_words, each.stages)) for each in plans) for side, plans in planned.items()},
    )


def _planned(problem: PlanProblem, space: Space) -> Planned:
    decision = solve(problem, space)
    assert isinstance(decision, Planned), "these problems promise nothing that a plan does not keep"
    return decision


def _words(stage: Stage) -> str:
    """Formats the splits. Joined and separate splits can cost the same, so more than three are only counted."""
    if len(stage.splits) > MOST_NAMED:
        return f"{stage.replicas} x ({len(stage.splits)} splits)"
    return f"{stage.replicas} x ({' + '.join(f'{split.first}-{split.end - 1}' for split in stage.splits)})"


def plans_table(found: Sequence[Rates]) -> Table:
    """Returns a row per case, batch and side."""
    rows = [
        (each.case, batch, side, each.per_s[side][at], each.per_s[side][at] / each.per_s["stock"][at], words[at])
        for each in found
        for at, batch in enumerate(each.batches)
        for side, words in each.splits.items()
    ]
    return Table("Plans", ("", "batch", "side", "rate (/s)", "over stock", "replicas x blocks"), tuple(rows))


def longest_over_mean(batch: int, mean: float = OUTPUT_TOKENS, most: int = 100_000) -> float:
    """Returns the longest answer of a batch over the mean, if each ends at every token with the same probability.

    A static batch (Orca) takes longer by this factor, because no place is reused before all answers have ended.
    """
    ends = 1 / mean
    tokens = np.arange(most)
    return float((1 - (1 - (1 - ends) ** tokens) ** batch).sum()) / mean


# E3, figure 10: goodput of CALM's T5 in translation on 4 A6000, by batch size.

FIG10_BATCHES: dict[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8), "quick": (8,)}
FIG10_CUT = 2
FIG10_PAPER = 2.84


def fig10_run(effort: Effort) -> StudyResult:
    """Runs the paper's exits, which have the picture.

    Full effort adds exits that would explain the paper's figure, a vocabulary head with its time, and computed fills.
    """
    cases = {"one exit": t5(ONE_EXIT)}
    if effort == "full":
        cases |= {
            "exits everywhere": t5(EVERY_LAYER),
            "one exit, head paid": t5(ONE_EXIT, with_head=True),
            "one exit, fills computed": t5(ONE_EXIT, fill="compute"),
        }
    first, *others = of = [rates(name, problem, FIG10_BATCHES[effort]) for name, problem in cases.items()]
    largest = first.batches[-1]
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, largest", first.ratios("e3").over_stock, FIG10_PAPER),
            Comparison("layers alone allow", layers_allow(ONE_EXIT, FIG10_CUT), FIG10_PAPER),
            Comparison("exits everywhere allow", len(EVERY_LAYER) / sum(EVERY_LAYER), FIG10_PAPER),
            Comparison(f"e3 / early-exit, batch {largest}", first.times("e3", "early-exit", largest)),
            *(comparison for each in others for comparison in each.over_stock()),
        ),
        pictures=(first.bars("CALM's T5: decoder steps on 4 A6000, one exit after layer 2", "tokens"),),
        e3=first.ratios("e3"),
        best=first.ratios("best"),
        tables=(plans_table(of),),
    )


FIG10_STUDY = declare("fig10_translation", fig10_run, paper=Ratios(over_stock=FIG10_PAPER), needs=(PHI_2,))


# E3, figure 11: goodput of CALM's T5 in summarization, whose answers have several lengths.

FIG11_PAPER = 3.8


def fig11_run(effort: Effort) -> StudyResult:
    """Runs continuous batching on both sides, and static batches of stock."""
    found = rates("one exit", t5(ONE_EXIT), FIG10_BATCHES[effort])
    lost = {batch: longest_over_mean(batch) for batch in found.batches}
    over = [found.times("e3", "stock", batch) or 0.0 for batch in found.batches]
    over_static = [times * lost[batch] for batch, times in zip(found.batches, over, strict=True)]
    static = tuple(rate / lost[batch] for rate, batch in zip(found.per_s["stock"], found.batches, strict=True))
    bound = layers_allow(ONE_EXIT, FIG10_CUT)
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, both continuous, largest", max(over), FIG11_PAPER),
            Comparison("layers alone allow", bound, FIG11_PAPER),
            *(
                Comparison(f"e3 / stock with static batches of {batch}", times, FIG11_PAPER)
                for batch, times in zip(found.batches, over_static, strict=True)
            ),
            Comparison("longest over mean answer that 3.8 x needs beside the bound", FIG11_PAPER / bound),
        ),
        pictures=(
            Bars(
                "CALM's T5 in summarization: decoder steps on 4 A6000",
                "largest batch",
                "rate (tokens/s)",
                tuple(map(str, found.batches)),
                {**found.per_s, "stock, static": static},
            ),
        ),
        e3=found.ratios("e3"),
        best=found.ratios("best"),
        tables=(plans_table([found]),),
    )


FIG11_STUDY = declare("fig11_summarization", fig11_run, paper=Ratios(over_stock=FIG11_PAPER), needs=(PHI_2,))


# E3, figure 12: goodput of an early-exit Llama 3.1 8B that answers BoolQ in one token, by batch size.

FIG12_BATCHES: dict[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8, 16), "quick": (8,)}
FIG12_CUT = 25
FIG12_PAPER = 1.48


def fig12_run(effort: Effort) -> StudyResult:
    """Runs the vocabulary head in ramps and at the end, which has the picture; full effort also runs without it."""
    cases = {"head paid": llama()} | ({"no head": llama(with_head=False)} if effort == "full" else {})
    first, *_ = of = [rates(name, problem, FIG12_BATCHES[effort]) for name, problem in cases.items()]
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, largest", first.ratios("e3").over_stock, FIG12_PAPER),
            Comparison("layers alone allow", layers_allow(LLAMA_EXITS, FIG12_CUT), FIG12_PAPER),
            *(comparison for each in of for comparison in each.over_stock()),
        ),
        pictures=(first.bars("Llama 3.1 8B, one token per prompt, on 4 A6000", "prompts"),),
        e3=first.ratios("e3"),
        best=first.ratios("best"),
        tables=(plans_table(of),),
    )


FIG12_STUDY = declare("fig12_llama", fig12_run, paper=Ratios(over_stock=FIG12_PAPER), needs=(LLAMA_2,))
