"""Batches bounded by tokens against batches bounded by inputs, on texts of very mixed length: the engine alone.

    python -m experiments.tokens.budgets

News and film reviews (AG News, IMDB; cut at 512 tokens) on MiniLM-L6 with ramps (`experiments.peers.workloads`,
`long`), all queued at once on one thread, without Ray or HTTP. The budget is the one of which as many inputs come to a
batch, on average, as the other side's batches hold. Sides take turns within each round; medians, and quantiles over all
rounds' batches. Every batch is held against its budget. Seconds are the processor's, not the wall clock's: what else a
machine does is left out.
Minutes: about 10 on one core, and as many to train where the model is missing.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from deployments.stage.build import build_policy
from earlyexit.member import Member
from earlyexit.piece import Piece
from earlyexit.runner import TorchRunner
from earlyexit.signature import Encoded
from earlyexit.split import Budget
from earlyexit.store import load_model
from earlyexit.tokenizer import TextTokenizer
from earlyexit.wire import entering
from experiments.gpu.plans import Plan, early_exit, serial_every_ramp, stock
from experiments.gpu.side import Side, members_of
from experiments.kit import ProcessorClock, show
from experiments.peers.workloads import WORKLOADS, Workload
from experiments.turns import Figures, in_turns, tell

WARM_UP_INPUTS = 64
QUANTILE = 0.99
WIDE = 16
"""Times the inputs of the other side's batches: the bound by inputs that a token budget leaves out of play."""


class Ran(NamedTuple):
    """A batch."""

    first: int
    size: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class Measured:
    """One side's batches over all rounds."""

    budget: Budget
    ran: list[Ran] = field(default_factory=list)

    def add(self, side: Side) -> None:
        """A round's; raises AssertionError for a batch above its budget that is not one input."""
        log = side.log
        for each in map(Ran, log.firsts, log.sizes, log.tokens, log.seconds):
            most = self.budget.tokens
            fits = each.size <= self.budget.inputs and (most is None or each.tokens <= most or each.size == 1)
            assert fits, f"{each} is more than {self.budget}"
            self.ran.append(each)

    def row(self, first: int) -> tuple[object, ...]:
        """Of one split's batches, as the columns below have it."""
        ran = [each for each in self.ran if each.first == first]
        middle_s, late_s = np.quantile([each.seconds for each in ran], [0.5, QUANTILE])
        middle, many = np.quantile([each.tokens for each in ran], [0.5, QUANTILE])
        return (
            len(ran),
            f"{np.mean([each.size for each in ran]):.1f}",
            max(each.tokens for each in ran),
            f"{1000 * middle_s:.0f}",
            f"{1000 * late_s:.0f}",
            f"{many / middle:.2f}",
            f"{late_s / middle_s:.2f}",
        )


def budget_of(lengths: Sequence[int], inputs: int) -> int:
    """The least tokens of which no more batches come than of `inputs` each: the mean batch is the same."""
    wanted = -(-len(lengths) // inputs)
    low, high = 1, sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if num_batches(lengths, Budget(inputs=len(lengths), tokens=middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def num_batches(lengths: Sequence[int], budget: Budget) -> int:
    """Batches that are filled in order of arrival."""
    batches, num_inputs, num_tokens = 0, 0, 0
    for length in lengths:
        if not batches or not budget.room_for(num_inputs, num_tokens, length):
            batches, num_inputs, num_tokens = batches + 1, 0, 0
        num_inputs, num_tokens = num_inputs + 1, num_tokens + length
    return batches


def bounded(plan: Plan, budget: Budget) -> Plan:
    """The same splits with another budget."""
    splits = tuple(replace(split, batch=budget.inputs, tokens=budget.tokens) for split in plan.splits)
    return Plan(name=plan.name, splits=splits)


def texts_of(workload: Workload, max_length: int, number: int, seed: int) -> list[Encoded]:
    """Some of its texts in any order, cut where they are longer than the model takes."""
    texts = [workload.texts[row] for row in workload.draw(number, seed)]
    return TextTokenizer.load(workload.folder, max_length).encode(texts, truncate=True)


def plans_of(num_blocks: int, ramps: tuple[int, ...], batch: int) -> list[Plan]:
    """Full batches to the end, batches that shrink, and survivors that wait for full batches."""
    return [
        stock(num_blocks, batch),
        early_exit(num_blocks, ramps, batch),
        replace(serial_every_ramp(num_blocks, ramps[:1], batch), name="split after block 0"),
    ]


def compare(
    make: Callable[[Plan], Side],
    plan: Plan,
    budgets: dict[str, Budget],
    members: Callable[[], list[Member[Piece]]],
    rounds: int,
) -> dict[str, Measured]:
    """Both budgets in turns; prints the rates, gives the batches."""
    measured = {name: Measured(budget) for name, budget in budgets.items()}
    sides = {name: make(bounded(plan, budget)) for name, budget in budgets.items()}
    named = {name: partial(_rate, sides[name], measured[name], members) for name in budgets}
    tell(f"{plan.name}, {rounds} rounds", in_turns(named, rounds, warm_ups=0))
    return measured


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.tokens.budgets", description=__doc__)
    parser.add_argument("--batch", type=int, default=16, help="inputs of the batches that inputs bound")
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS["long"]()
    model = load_model(workload.folder)
    encoded = texts_of(workload, model.max_length, options.inputs, seed=0)
    lengths = [each.length for each in encoded]
    tokens = budget_of(lengths, options.batch)
    budgets = {"rows": Budget(inputs=options.batch), "tokens": Budget(inputs=WIDE * options.batch, tokens=tokens)}
    runner, clock = TorchRunner(model, build_policy(workload.policy)), ProcessorClock()

    def make(plan: Plan) -> Side:
        side = Side(plan, runner, clock, expected=None)
        side.saturate(_members(runner, encoded[:WARM_UP_INPUTS]))
        return side

    rows: list[tuple[object, ...]] = []
    for plan in plans_of(model.num_blocks, tuple(sorted(workload.thresholds)), options.batch):
        measured = compare(make, plan, budgets, partial(_members, runner, encoded), options.rounds)
        rows += [
            (f"{plan.name}, blocks {split.first} to {split.end - 1}", name, *each.row(split.first))
            for split in plan.splits
            for name, each in measured.items()
        ]
    p50, p90, most = np.quantile(lengths, [0.5, 0.9, 1.0])
    show(
        f"batches of {options.batch} inputs against {tokens} tokens; texts of {np.mean(lengths):.0f} tokens on "
        f"average, {p50:.0f} in the middle, {p90:.0f} at 90 %, at most {most:.0f}",
        ("plan", "bounded by", "batches", "inputs", "most tokens", "p50 ms", "p99 ms", "tokens p99/p50", "s p99/p50"),
        rows,
    )


def _members(runner: TorchRunner, encoded: Sequence[Encoded]) -> list[Member[Piece]]:
    return members_of(runner.from_wire(entering([str(k) for k in range(len(encoded))], encoded)))


def _rate(side: Side, measured: Measured, members: Callable[[], list[Member[Piece]]]) -> Figures:
    texts = members()
    took_s = side.saturate(texts)
    measured.add(side)
    return {"texts/s": len(texts) / took_s}


if __name__ == "__main__":
    main()
