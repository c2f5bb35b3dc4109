"""TCB, figures 11 to 14: schemes with first come, first served, and slots; simulated, and computed on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from earlyexit.engine.queue import first_fit_decreasing
from earlyexit.network.checkpoint import random_model
from earlyexit.network.layers import torch_segments
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Attend, Layout, Masks
from experiments import tcb_device
from experiments.kit import Spread, spread
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest, ratio
from experiments.tcb_device import (
    ANSWERED,
    SCHEDULED,
    SIDES,
    Cost,
    Side,
    Work,
    by_rate,
    fit,
    grouped,
    layout,
    published_v100,
)
from experiments.turns import Figures, in_turns
from simulator.inputs import IntArray, truncated_normal

# Batching schemes of TCB's evaluation, computed by one encoder: padded rows, and rows of several inputs.


class Rows(Layout):
    """Slots of one length make up a whole batch. Places of no input are computed, and their values are discarded."""

    def __init__(self, lengths_B: IntArray, slots: list[list[int]], slot_length: int) -> None:
        super().__init__(lengths_B.astype(np.int32))
        self.longest = slot_length
        vars(self).update(slots=slots, scheme="slotted", _shares_rows=True)  # replaces the choice of Layout

    @property
    def uniform(self) -> bool:
        """Whether there is no padding, and no slot with two inputs."""
        return self.num_tokens == self.num_inputs * self.longest

    @cached_property
    def position_N(self) -> Tensor:
        """The position of every place in its input; 0 for a place of no input."""
        return self.spread(torch.from_numpy(self._positions()))

    def spread(self, values_N: Tensor) -> Tensor:
        """Moves values of tokens to their places."""
        places = values_N.new_zeros(len(self.slots) * self.longest)
        places[self.row_place_N] = values_N
        return places

    def masks(self, bias_HTT: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Masks:
        """Returns the attention masks: None without padding, only the padding's if no two inputs share a slot."""
        if self.uniform:
            return [bias_HTT]
        alone = len(self.slots) == self.num_inputs
        return [self._masked((self.owner_RT >= 0)[:, None, None, :] if alone else self.same_R1TT, bias_HTT)]

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """Runs attention on values that are already in rows."""
        (mask,) = masks
        attended = attend(values_ND.view(len(self.slots), self.longest, -1), mask)
        return tuple(each.flatten(0, 1) for each in attended)


def padded_rows(lengths: Sequence[int]) -> Rows:
    """Returns a row per input, as long as the longest (the paper's TNB)."""
    return Rows(np.array(lengths), [[index] for index in range(len(lengths))], max(lengths))


@torch.inference_mode()
def outputs_of(model: EarlyExitModel, tokens_N: Tensor, layout: Layout) -> Tensor:
    """Returns the full model's outputs for inputs in this layout."""
    packed = Layout(layout.lengths_B)
    rows = isinstance(layout, Rows)
    values = (layout.spread(tokens_N),) if isinstance(layout, Rows) else (tokens_N,)
    (hidden,) = model.run_blocks(0, model.num_blocks, values, layout)
    hidden_ND = hidden[layout.row_place_N] if rows else hidden
    return model.exit_outputs(model.num_blocks - 1, (hidden_ND,), packed)


# TCB's batching schemes computed on this CPU: one encoder with random weights, one thread, processor time.

MODELS = {
    "minilm": {"hidden_size": 384, "num_blocks": 6, "num_heads": 12, "intermediate_size": 1536, "max_length": 400},
    "bert": {"hidden_size": 768, "num_blocks": 3, "num_heads": 12, "intermediate_size": 3072, "max_length": 400},
}
"""MiniLM, and a quarter of BERT-base; all blocks are alike."""
TINY = MODELS["minilm"] | {"hidden_size": 48, "num_blocks": 2, "intermediate_size": 96}
VOCABULARY = 1000
"""Number of ids from which tokens are drawn; more ids would cost nothing."""
LONGEST, MEAN = 100, 20
"""Tokens (section 6.2.1)."""
ROW, REAL_SLOTS = 400, (1, 2, 4, 5, 8, 10)
"""Tokens per row, and slots per row (section 6.2.3). With 10 slots the longest input just fits."""
UNIFORM = ((1, 16), (8, 16), (64, 16), (4, 32), (32, 32), (64, 32), (1, 100), (16, 100))
"""Numbers of inputs and tokens of the padded batches to which the dynamic program's costs are fitted."""
OURS = "packed, attention apart"

Runs = Sequence[tuple[Sequence[int], Layout]]
"""The runs of a batch in order: positions of the inputs, and their layout."""


class Timed:
    """A model with random weights, and inputs by their lengths."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._model = random_model(sizes | {"vocab_size": VOCABULARY}).requires_grad_(False)
        torch_segments(self._model)

    def run(self, parts: Sequence[tuple[Sequence[int], Callable[[Sequence[int]], Runs]]]) -> Figures:
        """Returns milliseconds of batches by scheme, one after the other, including the layout."""
        began_s = time.thread_time()
        for lengths, scheme in parts:
            self.outputs(lengths, scheme)
        return {"ms": 1e3 * (time.thread_time() - began_s)}

    def outputs(self, lengths: Sequence[int], scheme: Callable[[Sequence[int]], Runs]) -> Tensor:
        """Returns the outputs in the order of the inputs."""
        num = sum(lengths)
        values = np.random.default_rng(num).integers(0, VOCABULARY, size=num, dtype=np.int32)
        tokens = torch.split(torch.from_numpy(values), list(lengths))
        runs = scheme(lengths)
        found = [
            outputs_of(self._model, torch.cat([tokens[index] for index in positions]), layout)
            for positions, layout in runs
        ]
        order = np.argsort(np.concatenate([positions for positions, _ in runs]))
        return torch.cat(found)[torch.from_numpy(order)]

    def cost(self, rounds: int) -> Cost:
        """Returns the cost of padded batches, for the dynamic program."""
        sides = {f"{size} x {length}": partial(self.run, [([length] * size, padded)] * 3) for size, length in UNIFORM}
        found = in_turns(sides, rounds)
        works = (Work(size * length, size * length**2) for size, length in UNIFORM)
        return fit({work: median(found[name]["ms"]) / 3e3 for work, name in zip(works, sides, strict=True)})


def packed(lengths: Sequence[int], attention: str = "auto") -> Runs:
    """Returns Offramp's layout."""
    layout = Layout(np.array(lengths, dtype=np.int32), attention=attention)  # type: ignore[arg-type] # of four names
    return [(range(len(lengths)), layout)]


def padded(lengths: Sequence[int]) -> Runs:
    """Returns TNB's layout."""
    return [(range(len(lengths)), padded_rows(lengths))]


def grouped_rows(cost: Cost, lengths: Sequence[int]) -> Runs:
    """Returns TTB's layout: TurboTransformers' dynamic program, each group padded to its longest input."""
    groups = [run.positions for run in grouped(lengths, cost)]
    return [(group, padded_rows([lengths[index] for index in group])) for group in groups]


def concatenated(row: int, slots: int, lengths: Sequence[int]) -> Runs:
    """Returns TCB's layout: rows of `row` tokens with several inputs each, pure ConcatBatching if a row is one slot.

    The rest of a row, and empty slots of the last row, are not computed. Raises ValueError for an input longer than a
    slot.
    """
    rows = Rows(np.array(lengths), first_fit_decreasing(lengths, row // slots), row // slots)
    return [(range(len(lengths)), rows)]


def schemes_of(cost: Cost) -> Mapping[str, Callable[[Sequence[int]], Runs]]:
    """Returns the schemes by name."""
    return {
        OURS: packed,
        "packed, attention padded": partial(packed, attention="padded"),
        "packed, attention in slots": partial(packed, attention="slotted"),
        "padded (TNB)": padded,
        "grouped (TTB)": partial(grouped_rows, cost),
        "rows of 100 (TCB, pure)": partial(concatenated, LONGEST, 1),
    }


def compared(
    timed: Timed, parts: Sequence[Sequence[int]], schemes: Mapping[str, Callable[[Sequence[int]], Runs]], rounds: int
) -> dict[str, list[float]]:
    """Returns milliseconds of batches by scheme, per round; schemes take turns."""
    _check(timed, parts[0], schemes.values())
    sides = {name: partial(timed.run, [(part, scheme) for part in parts]) for name, scheme in schemes.items()}
    return {name: figures["ms"] for name, figures in in_turns(sides, rounds).items()}


def times_of(took_ms: Mapping[str, Sequence[float]], base: str) -> dict[str, Spread]:
    """Returns every scheme's time relative to `base`, within rounds."""
    ratios = {
        name: spread(other / one for other, one in zip(took, took_ms[base], strict=True))
        for name, took in took_ms.items()
    }
    return {name: each for name, each in ratios.items() if each is not None}


def _check(timed: Timed, lengths: Sequence[int], schemes: Iterable[Callable[[Sequence[int]], Runs]]) -> None:
    expected, *others = (timed.outputs(lengths, scheme) for scheme in schemes)
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


# First come, first served: the gain from the schemes alone, in TCB's figures 11 and 12.

ALL: Mapping[str, Side] = {
    **SIDES,
    "TCB, slotted": tcb_device.SLOTTED_TCB,
    "TTB, 64 inputs": replace(tcb_device.TNB, scheme="grouped"),
    "slots, 64 inputs": replace(tcb_device.TNB, scheme="slots"),
}
READINGS = {"variance": 1, "deviation": 2}
"""Possible meanings of the paper's "variance", and the power that makes a variance of it."""
PAPER_TNB, PAPER_TTB = 3.33, {20.0: 1.52, 100.0: 1.72}


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The CPU's figures at one variance."""

    cost: Cost
    over_packed: Mapping[str, Spread]


def fcfs_study(variance: float, effort: Effort) -> StudyResult:
    """Simulates rising rates and full batches on three devices, and computes batches on this CPU.

    The paper's two ratios come first: as simulated, and for a device whose time hardly grows with the batch.
    """
    drawn, device = tcb_device.lengths(tcb_device.DRAWN, variance), tcb_device.paper_device()
    found = by_rate(drawn, tcb_device.ARRIVAL, device, effort)
    computed, bound = compute(drawn, effort), bounds(drawn)
    slow = f"V100 with a fixed part as long as makes TNB's ratio {PAPER_TNB} (variance 20)"
    devices = {
        "V100, published": published_v100(),
        "this CPU, MiniLM": computed.cost,
        slow: with_the_paper_s_ratio(device),
    }
    full = {
        name: {side: tcb_device.capacity(its, drawn, cost) for side, its in ALL.items()}
        for name, cost in devices.items()
    }
    paper = {"TNB": PAPER_TNB if variance == 20.0 else None, "TTB": PAPER_TTB[variance]}
    measured = {f"{kind}, this CPU, 64 inputs": each for kind, each in computed.over_packed.items()}
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"maximum throughput, TCB / {other}", found.over(SCHEDULED, other), paper[other])
                for other in paper
            ),
            *(
                Comparison(f"the same on a {slow}: TCB / {other}", ratio(full[slow]["TCB"], full[slow][other]), each)
                for other, each in paper.items()
            ),
            *(Comparison(f"bound by count: {name}", each) for name, each in bound.items()),
            *(Comparison(f"packed over {name}", each.median) for name, each in measured.items()),
        ),
        pictures=(
            found.lines(SCHEDULED, f"First come, first served, variance {variance:g}", "scheduled in time per second"),
            found.lines(ANSWERED, "The same, answered by the deadline", "answered in time per second"),
        ),
        tables=(_full_table(full), _readings_table(variance), found.table()),
    )


def with_the_paper_s_ratio(device: Cost) -> Cost:
    """Returns a device with a fixed cost per run such that TCB has 3.33 times TNB's throughput at variance 20.

    A decoder that generates one token after another takes about as many steps for few requests as for many, so its time
    has a large fixed part. The cost is searched between zero and a hundred times a full batch of TNB's.
    """
    drawn = tcb_device.lengths(tcb_device.DRAWN // 2, 20.0)

    def beyond(fixed_s: float) -> float:
        slow = replace(device, fixed_s=fixed_s)
        tcb, tnb = (tcb_device.capacity(side, drawn, slow) for side in (tcb_device.TCB, tcb_device.TNB))
        return tcb / tnb - PAPER_TNB

    return replace(device, fixed_s=brentq(beyond, 0.0, 100 * tcb_device.BATCH / tcb_device.SATURATED_PER_S))


def bounds(drawn: IntArray) -> dict[str, float]:
    """Returns computed tokens over real tokens for batches of 64 in order of arrival, and requests per batch."""
    flat = Cost(fixed_s=0.0, token_s=1.0, cell_s=0.0)
    parts = [drawn[at : at + tcb_device.BATCH].tolist() for at in range(0, len(drawn), tcb_device.BATCH)]
    padded = sum(run.work.tokens for part in parts for run in layout("padded", part, flat))
    return {
        "tokens of padded rows over tokens": padded / float(drawn.sum()),
        "requests of TCB's batch over those of TNB's": tcb_device.ROW / float(drawn.mean()),
    }


def compute(drawn: IntArray, effort: Effort) -> Computed:
    """Measures MiniLM's size with full effort, on one thread."""
    torch.set_num_threads(1)
    full = effort == "full"
    timed = Timed(MODELS["minilm"] if full else TINY)
    cost = timed.cost(5 if full else 1)
    parts = [drawn[at * tcb_device.BATCH : (at + 1) * tcb_device.BATCH].tolist() for at in range(2 if full else 1)]
    took_ms = compared(timed, parts, schemes_of(cost), rounds=5 if full else 1)
    over = {name: each for name, each in times_of(took_ms, OURS).items() if name != OURS}
    return Computed(cost=cost, over_packed=over)


def _full_table(full: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        (device, side, per_s, ratio(per_s, of["TNB"]), ratio(per_s, of["TTB"]))
        for device, of in full.items()
        for side, per_s in of.items()
    ]
    return Table("Every batch full", ("device", "side", "requests/s", "x TNB", "x TTB"), tuple(rows))


def _readings_table(variance: float) -> Table:
    device, rows = tcb_device.paper_device(), []
    for name, power in READINGS.items():
        drawn = tcb_device.lengths(tcb_device.DRAWN // 2, variance**power)
        per_s = {side: tcb_device.capacity(SIDES[side], drawn, device) for side in ("TNB", "TTB", "TCB")}
        over = (ratio(per_s["TCB"], per_s[other]) for other in ("TNB", "TTB"))
        rows.append((f"{variance:g} is a {name}", float(drawn.mean()), float(drawn.std()), *over))
    return Table(
        "What the paper's variance may be: lengths drawn so, every batch full on the V100",
        ("", "mean tokens", "deviation", "TCB / TNB", "TCB / TTB"),
        tuple(rows),
    )


# The savings from slots of a row (TCB's figures 13 and 14): by operation count, and computed on this CPU.

LENGTH, SLOTS_SLOTS = ROW, REAL_SLOTS
WIDTHS = {"paper's model, 3072 wide": 3072, "BERT-base": 768, "MiniLM": 384}
ONE_BLOCK = 1
"""All blocks are alike, so one shows as much as six."""


def work(rows: int, slots: int) -> Work:
    """Returns the work of a batch of full rows."""
    return Work(rows * LENGTH, rows * slots * (LENGTH // slots) ** 2)


def by_count(width: int, slots: int) -> float:
    """Returns operations of a layer in one slot over those in several.

    A token needs 12 width^2 multiply-adds in linear layers (four projections, and two layers to and from four times the
    width), and 2 width per place that its attention covers.
    """
    return (12 * width + 2 * LENGTH) / (12 * width + 2 * LENGTH / slots)


def measured(timed: Timed, rows: int, rounds: int) -> dict[int, Spread]:
    """Returns the speed-up over one slot, by slots per row, of rows of 400 tokens with inputs of 20 (variance 20)."""
    drawn = truncated_normal(rows * ROW // MEAN, mean=MEAN, variance=20, low=3, high=ROW // REAL_SLOTS[-1], seed=0)
    schemes = {f"{slots}": partial(concatenated, ROW, slots) for slots in REAL_SLOTS} | {OURS: packed}
    took_ms = compared(timed, [drawn.tolist()], schemes, rounds)
    return {slots: times_of(took_ms, f"{slots}")["1"] for slots in SLOTS_SLOTS}


def slots_study(rows: int, paper: float, effort: Effort) -> StudyResult:
    """Runs one batch size, and compares the largest speed-ups with the paper's."""
    torch.set_num_threads(1)
    full = effort == "full"
    timed = Timed((MODELS["minilm"] if full else TINY) | {"num_blocks": ONE_BLOCK})
    computed = measured(timed, rows if full else 1, rounds=3 if full else 1)
    v100 = published_v100()
    series = {
        "this CPU, MiniLM": tuple(computed[slots].median for slots in SLOTS_SLOTS),
        "V100 by its published times, BERT-base": tuple(
            ratio(v100.seconds(work(rows, 1)), v100.seconds(work(rows, slots))) for slots in SLOTS_SLOTS
        ),
        **{
            f"by count, {name}": tuple(by_count(width, slots) for slots in SLOTS_SLOTS)
            for name, width in WIDTHS.items()
        },
    }
    of_ours = computed[max(computed, key=lambda slots: computed[slots].median)]
    return StudyResult(
        comparisons=(
            Comparison("fastest of all numbers of slots over one slot, this CPU", of_ours.median, paper),
            *(
                Comparison(f"the same, {name}", largest(values), paper)
                for name, values in series.items()
                if name[:4] != "this"
            ),
        ),
        pictures=(
            Lines(
                f"Rows of {LENGTH} tokens in slots, batch {rows}",
                "slots in a row",
                "times as fast as one slot",
                tuple(map(float, SLOTS_SLOTS)),
                series,
            ),
        ),
        tables=(
            Table(
                "Times as fast as one slot",
                ("slots", "this CPU (all rounds)", *list(series)[1:]),
                tuple(
                    (str(slots), computed[slots].as_text(), *(values[at] for values in list(series.values())[1:]))
                    for at, slots in enumerate(SLOTS_SLOTS)
                ),
            ),
        ),
    )


FIG11_STUDY = declare("tcb_fig11_fcfs", partial(fcfs_study, 20.0))
FIG12_STUDY = declare("tcb_fig12_fcfs_variance", partial(fcfs_study, 100.0))
"""By the variance of the lengths; simulated, and computed on this CPU."""
FIG13_STUDY = declare("tcb_fig13_slots", partial(slots_study, 10, 1.18))
FIG14_STUDY = declare("tcb_fig14_slots_large", partial(slots_study, 32, 2.31))
"""By the rows of a batch, with the paper's largest speed-up; counted, by published times, and computed on this CPU."""
