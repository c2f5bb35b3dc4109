"""Who is let in where lengths are mixed: admission that counts tokens, against one that counts inputs.

    python -m experiments.tokens.admission [--seconds 20]

The plan of `experiments.tokens.plans` for AG News and IMDB mixed 4:1, one V100 by BERT's published latencies, and the
same plan with batches of as many inputs as its budgets hold on average, whose admission counts inputs. Both simulated
with the live ingress at loads of 0.9, 1.2 and 2 times the planned rate, SLO 200 ms: what is answered in time, how much
of what was let in was late, and which share of short and of long inputs was refused. Writes runs/token-admission.json.
Minutes: 2.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.tokens.plans import SLO_S, Planning, kinds
from simulator.decisions import IntArray
from simulator.outcome import DROPS, Outcome

KIND = "AG News and IMDB, 4 to 1"
LOADS = (0.9, 1.2, 2.0)
SHORT, LONG = 64, 256
"""Tokens: at most, and at least."""
TOKENS, INPUTS = "tokens", "inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of counting at one load."""

    load: float
    counts: str
    goodput_per_s: float
    goodput_tokens_per_s: float
    late_share: float
    """Of those that were let in, answered too late or dropped."""
    refused_short: float
    refused_long: float


def row_of(outcome: Outcome, lengths_N: IntArray, *, load: float, counts: str, since_s: float) -> Row:
    """Of the inputs that arrived after the warm-up."""
    counted_N = outcome.arrived_s_R >= since_s
    tokens_N = lengths_N[np.arange(len(counted_N)) % len(lengths_N)]
    in_time_N = counted_N & (outcome.latency_s_N <= SLO_S)
    refused_N = counted_N & (outcome.drop_N == DROPS.index("admission"))
    seconds = outcome.duration_s - since_s
    let_in = (counted_N & ~refused_N).sum()

    def refused(which_N: npt.NDArray[np.bool_]) -> float:
        return float(refused_N[which_N & counted_N].mean())

    return Row(
        load=load,
        counts=counts,
        goodput_per_s=float(in_time_N.sum() / seconds),
        goodput_tokens_per_s=float(tokens_N[in_time_N].sum() / seconds),
        late_share=float(1 - in_time_N.sum() / let_in),
        refused_short=refused(tokens_N <= SHORT),
        refused_long=refused(tokens_N >= LONG),
    )


def judged(seconds: float, seed: int) -> list[Row]:
    """Both ways at every load."""
    planning = Planning.of(kinds(seed)[KIND], seed)
    sides = {TOKENS: planning.planned.stages, INPUTS: planning.counting_inputs}
    return [
        row_of(
            planning.played(stages, load, seconds), planning.lengths_N, load=load, counts=counts, since_s=seconds / 4
        )
        for load in LOADS
        for counts, stages in sides.items()
    ]


def main() -> None:
    """Simulate, print and write."""
    parser = ArgumentParser(prog="python -m experiments.tokens.admission", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = judged(options.seconds, options.seed)
    show(
        f"{KIND}, SLO {SLO_S:g} s, {options.seconds:g} s",
        ("load", "counts", "in time /s", "tokens in time /s", "late of let in", f"refused to {SHORT}", f"from {LONG}"),
        [
            (
                row.load,
                row.counts,
                row.goodput_per_s,
                row.goodput_tokens_per_s,
                f"{row.late_share:.1%}",
                f"{row.refused_short:.1%}",
                f"{row.refused_long:.1%}",
            )
            for row in rows
        ],
    )
    print(f"written: {keep({'rows': rows}, RUNS / 'token-admission.json')}")


if __name__ == "__main__":
    main()
