"""What plans of token budgets promise, against what they do in the simulator; and against batches of inputs.

    python -m experiments.tokens.plans [--seconds 3] [--most 128]

One V100 by BERT's published latencies at 128 tokens, three splits with exits, at several kinds of lengths: AG News and
IMDB mixed, and TCB's (section 6.2.1). The planner's rate beside what the plan answers when more arrives than it can do,
without an SLO; and how far the seconds of batches spread then, beside the same plan's with batches of as many inputs as
its budgets hold on average. Then, at nine tenths of that rate, who is in time with both. Writes runs/token-plans.json.
Minutes: about 2.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.split import Split
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.tokens.times import text_lengths
from optimizer.decision import Planned
from optimizer.evaluate import promised
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.what_if import with_batch_limit
from profiles.catalogue import published_profile
from profiles.lengths import Lengths
from simulator.decisions import IntArray, nested
from simulator.lengths import truncated_normal
from simulator.outcome import Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

LENGTH, NUM = 128, 20_000
SURVIVAL = (1, 1, 1, 0.9, 0.85, 0.8, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5)
SLO_S = 0.2
OVERLOAD, LOAD = 1.3, 0.9
POLICY = PolicySpec(name="entropy", thresholds=0.4)
"""The simulator does not read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of lengths."""

    kind: str
    mean: float
    predicted_per_s: float
    simulated_per_s: float
    spread_tokens: float
    spread_inputs: float
    in_time_tokens: float
    in_time_inputs: float
    token_fill: float

    @property
    def error(self) -> float:
        """Above 0 where the planner promises too much."""
        return self.predicted_per_s / self.simulated_per_s - 1


def kinds(seed: int) -> dict[str, IntArray]:
    """Lengths by where they come from."""
    rng = np.random.default_rng(seed)
    news, films = text_lengths()
    mixed = np.where(rng.random(NUM) < 0.8, rng.choice(news, NUM), rng.choice(films, NUM))
    normal = {
        f"normal, mean 20, variance {variance}": truncated_normal(
            NUM, mean=20, variance=variance, low=3, high=100, seed=seed
        )
        for variance in (20, 100, 400)
    }
    return {"AG News and IMDB, 4 to 1": mixed, **normal, "all of 128": np.full(NUM, LENGTH)}


def problem(lengths: Lengths, most: int = LENGTH) -> PlanProblem:
    """One V100, batches of `most` inputs of 128 tokens at most, by default of all that were measured."""
    profile = published_profile("bert-base", "V100")
    whole = PlanProblem(
        num_blocks=profile.num_blocks,
        ramps=profile.ramps,
        survival_N=SURVIVAL,
        latency={"V100": profile.at(LENGTH)},
        devices={"V100": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1.25e9),
        bytes_per_sample_N=(0.0,) * profile.num_blocks,
        slo=Slo(latency_s=SLO_S),
        objective=MaximizeRate(),
        lengths=lengths,
    )
    return with_batch_limit(whole, most)


def by_inputs(stages: tuple[Stage, ...], lengths: Lengths) -> tuple[Stage, ...]:
    """Batches of as many inputs as the budgets hold on average."""

    def changed(split: Split) -> Split:
        assert split.tokens is not None
        return replace(split, tokens=None, batch=max(1, round(lengths.filled(split.tokens) / lengths.mean)))

    return tuple(replace(stage, splits=tuple(map(changed, stage.splits))) for stage in stages)


def answered_per_s(outcome: Outcome, since_s: float) -> float:
    """By when answers were given, while requests arrived."""
    given_s = outcome.arrived_s_R + outcome.latency_s_N
    return float(((given_s >= since_s) & (given_s < outcome.duration_s)).sum() / (outcome.duration_s - since_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Lengths, and what the planner makes of them."""

    lengths_N: IntArray
    asked: PlanProblem
    planned: Planned
    seed: int

    @classmethod
    def of(cls, lengths_N: IntArray, seed: int, most: int = LENGTH) -> Planning:
        """The best plan of `problem`."""
        asked = problem(Lengths.of(lengths_N.tolist()), most)
        planned = solve(asked)
        assert isinstance(planned, Planned), "an SLO of 200 ms has plans"
        return cls(lengths_N=lengths_N, asked=asked, planned=planned, seed=seed)

    @property
    def counting_inputs(self) -> tuple[Stage, ...]:
        """The plan's stages, whose batches are bounded by inputs."""
        assert self.asked.lengths is not None
        return by_inputs(self.planned.stages, self.asked.lengths)

    def played(
        self, stages: tuple[Stage, ...], load: float, seconds: float, *, slo_s: float = SLO_S, admission: bool = True
    ) -> Outcome:
        """Stages at so many times the planned rate, as long; the first quarter is the warm-up."""
        figures = self.planned.figures
        return simulate(
            Scenario(
                problem=self.asked,
                plan=Plan(stages=stages, policy=POLICY, predicted=promised(self.asked, figures)),
                decisions=nested(SURVIVAL, self.asked.ramps, np.random.default_rng(self.seed), num_rows=NUM),
                rows_N=np.arange(NUM),
                lengths_R=self.lengths_N,
                arrivals_s=poisson_arrivals(load * figures.rate_per_s, seconds, self.seed),
                duration_s=seconds,
                warm_up_s=seconds / 4,
                slo_s=slo_s,
                admission=admission,
            )
        )


def judged(kind: str, lengths_N: IntArray, most: int, seconds: float, seed: int) -> Row:
    """Plan, overload, and compare at a load that the plan can bear."""
    planning = Planning.of(lengths_N, seed, most)
    both = planning.planned.stages, planning.counting_inputs
    full, full_inputs = (planning.played(each, OVERLOAD, seconds, slo_s=math.inf, admission=False) for each in both)
    tokens, inputs = (planning.played(each, LOAD, seconds, admission=False) for each in both)
    budget = full.splits[0].lengths
    assert budget is not None
    assert budget.fill is not None
    return Row(
        kind=kind,
        mean=float(lengths_N.mean()),
        predicted_per_s=planning.planned.figures.rate_per_s,
        simulated_per_s=answered_per_s(full, seconds / 4),
        spread_tokens=_spread(full),
        spread_inputs=_spread(full_inputs),
        in_time_tokens=tokens.figures().in_slo_share,
        in_time_inputs=inputs.figures().in_slo_share,
        token_fill=budget.fill,
    )


def _spread(outcome: Outcome) -> float:
    """p99 over p50 of batches' seconds, of the first split."""
    lengths = outcome.splits[0].lengths
    assert lengths is not None
    return lengths.spread


def main() -> None:
    """Simulate, print and write."""
    parser = ArgumentParser(prog="python -m experiments.tokens.plans", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--most", type=int, default=128, help="inputs of 128 tokens in a batch, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [
        judged(kind, each, options.most, options.seconds, options.seed) for kind, each in kinds(options.seed).items()
    ]
    show(
        f"One V100, BERT by latencies at {LENGTH} tokens, budgets up to {options.most * LENGTH}, {options.seconds:g} s",
        (
            "lengths",
            "mean",
            "planned /s",
            "simulated /s",
            "error",
            "token fill",
            "p99/p50 tokens",
            "inputs",
            "in time",
            "inputs",
        ),
        [
            (
                row.kind,
                f"{row.mean:.1f}",
                row.predicted_per_s,
                row.simulated_per_s,
                f"{row.error:+.1%}",
                f"{row.token_fill:.1%}",
                f"{row.spread_tokens:.2f}",
                f"{row.spread_inputs:.2f}",
                f"{row.in_time_tokens:.1%}",
                f"{row.in_time_inputs:.1%}",
            )
            for row in rows
        ],
    )
    print(f"written: {keep({'rows': rows}, RUNS / 'token-plans.json')}")


if __name__ == "__main__":
    main()
