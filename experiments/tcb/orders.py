"""Who wins, of the four orders, and what it costs long inputs: the simulator, ingress and engine as they serve.

    python -m experiments.tcb.orders
    OFFRAMP_DATA=../shared/data python -m experiments.tcb.orders --quick

One device whose batch of the token budget takes 160 ms, so that TCB's lengths saturate it at about 400/s. Loads are
0.9, 1.2 and 2 times what full batches can do, arrivals Poisson, with an SLO of 1 s for every input, with admission and
without. So `arrival` and `deadline` are the same here; deadlines that are drawn anew for every request are in
`experiments.studies tcb_fig15_orders`. Lengths are TCB's (3 to 100, mean 20, variance 20 and 100) and, with
`OFFRAMP_DATA`, those of IMDB's reviews and AG News' items, one for one, in words, at most 512. The second table has
long inputs overdue sooner, the third has no deadlines at all. Simulated, seed 0; about two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from earlyexit.order import OrderName, OrderSpec
from earlyexit.split import Split
from experiments.data import data_folder
from experiments.kit import show
from experiments.trained import ag_news, imdb
from optimizer.plan import Plan, Stage
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from simulator.decisions import ByRamp, IntArray
from simulator.lengths import truncated_normal
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

NAMES: tuple[OrderName, ...] = ("deadline", "arrival", "shortest", "das")
LOADS = (0.9, 1.2, 2.0)
BATCH = 64
BATCH_S = 0.16
"""Of a full batch: 64 / 400 s, TCB's saturation."""
FIXED_SHARE = 0.1
"""Of these seconds, what a batch of nothing takes."""
SLO_S = 1.0
SECONDS, QUICK_S = 60.0, 10.0
WARM_UP_S = 2.0
LONGEST = 512
LONG_SHARE = 0.1
"""The long inputs: so many of all."""
DRAWN = 20_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """What arrives."""

    name: str
    tokens_N: IntArray

    @property
    def mean(self) -> float:
        return float(self.tokens_N.mean())

    @property
    def long_from(self) -> float:
        """Tokens from which an input counts as long."""
        return float(np.quantile(self.tokens_N, 1 - LONG_SHARE))

    @property
    def budget(self) -> int:
        """Tokens of a batch."""
        return round(BATCH * self.mean)

    @property
    def capacity_per_s(self) -> float:
        """Inputs that full batches answer per second."""
        return BATCH / BATCH_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an order did with a load; shares are of all that arrived after the warm-up."""

    lengths: str
    order: str
    load: float
    admission: bool
    slo_s: float
    utility: float
    """Of what was answered in time, as a share of all there was."""
    in_time: float
    long_in_time: float
    """Of the long inputs."""
    refused: float
    p50_s: float
    oldest_s: float
    """The longest that anybody waited who was answered; with an SLO, nobody's answer is sent after it."""
    oldest_long_s: float
    """Of long inputs."""


def made_up(variance: float) -> Lengths:
    """TCB's."""
    drawn = truncated_normal(DRAWN, mean=20, variance=variance, low=3, high=100, seed=0)
    return Lengths(name=f"3-100, mean 20, variance {variance:g}", tokens_N=drawn)


def real() -> Lengths:
    """As many reviews of IMDB as items of AG News, in turn at random."""
    words = [[len(text.split()) for text, _ in pairs] for pairs in (imdb.pairs(), ag_news.unseen_pairs())]
    number = min(map(len, words))
    mixed = np.concatenate([np.array(each[:number]) for each in words])
    return Lengths(name="IMDB + AG News", tokens_N=np.random.default_rng(0).permutation(mixed).clip(1, LONGEST))


def scenario(
    lengths: Lengths, order: OrderSpec, load: float, *, admission: bool, slo_s: float = SLO_S, seconds: float = SECONDS
) -> Scenario:
    """One replica, one block, no ramps; its batches cost what their tokens cost."""
    mean = round(lengths.mean)
    sizes = (1, 2 * BATCH, 4 * BATCH, 64 * BATCH)
    token_s, fixed_s = (1 - FIXED_SHARE) * BATCH_S / lengths.budget, FIXED_SHARE * BATCH_S
    block_s_NB = np.array([[fixed_s + token_s * mean * size for size in sizes]])
    table = LatencyTable(batches=sizes, block_s_NB=block_s_NB, ramp_s_EB=np.zeros((0, len(sizes))), length=mean)
    problem = PlanProblem(
        num_blocks=1,
        ramps=(),
        survival_N=(1.0,),
        latency={"V100": table},
        devices={"V100": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1.0),
        bytes_per_sample_N=(0.0,),
        slo=Slo(latency_s=min(slo_s, 1e6)),
        objective=MaximizeRate(),
    )
    split = Split(first=0, end=1, batch=4 * BATCH, tokens=lengths.budget)
    plan = Plan(
        stages=(Stage(device="V100", replicas=1, splits=(split,)),),
        order=order,
        predicted={"rate_per_s": lengths.capacity_per_s, "tokens_per_input": lengths.mean},
    )
    return Scenario(
        problem=problem,
        plan=plan,
        decisions=ByRamp(ramps=(), sure_NR=np.zeros((len(lengths.tokens_N), 0), dtype=np.bool_)),
        rows_N=np.arange(len(lengths.tokens_N)),
        lengths_R=lengths.tokens_N,
        arrivals_s=poisson_arrivals(load * lengths.capacity_per_s, seconds, 0),
        duration_s=seconds,
        slo_s=slo_s,
        admission=admission,
        warm_up_s=WARM_UP_S,
    )


def played(lengths: Lengths, order: OrderSpec, load: float, *, admission: bool, **given: float) -> Found:
    """One simulation."""
    asked = scenario(lengths, order, load, admission=admission, **given)
    outcome = simulate(asked)
    after_N = outcome.arrived_s_R >= WARM_UP_S
    latency_s_N = outcome.latency_s_N[after_N]
    tokens_N = np.resize(lengths.tokens_N, len(after_N))[after_N]
    in_time_N, long_N = latency_s_N <= asked.slo_s, tokens_N >= lengths.long_from
    return Found(
        lengths=lengths.name,
        order=order.name if order.overdue_s is None else f"{order.name}, overdue at {order.overdue_s:g} s",
        load=load,
        admission=admission,
        slo_s=asked.slo_s,
        utility=float((1 / tokens_N[in_time_N]).sum() / (1 / tokens_N).sum()),
        in_time=float(in_time_N.mean()),
        long_in_time=float(in_time_N[long_N].mean()),
        refused=float((outcome.drop_N[after_N] == 0).mean()),
        p50_s=_of(np.median, latency_s_N),
        oldest_s=_of(np.max, latency_s_N),
        oldest_long_s=_of(np.max, latency_s_N[long_N]),
    )


def _of(what: object, latency_s_N: np.ndarray) -> float:
    known = latency_s_N[~np.isnan(latency_s_N)]
    return float(what(known)) if len(known) else math.nan  # type: ignore[operator] # numpy's median and max


def main(argv: Sequence[str] | None = None) -> None:
    """Three tables, and a line of JSON per simulation with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten seconds of arrivals instead of sixty")
    parser.add_argument("--json", action="store_true", help="a line per simulation instead of tables")
    options = parser.parse_args(argv)
    seconds = QUICK_S if options.quick else SECONDS
    workloads = made_up(20), made_up(100), *([real()] if data_folder() else [])
    for title, found in (
        ("orders, SLO 1 s", _orders(workloads, seconds)),
        ("long inputs sooner, SLO 1 s, no admission", _sooner(workloads[1:], seconds)),
        ("no deadlines", _without_deadlines(workloads[1:], seconds)),
    ):
        if options.json:
            print("\n".join(json.dumps(asdict(each)) for each in found), flush=True)
        else:
            _table(title, found)


def _orders(workloads: Iterable[Lengths], seconds: float) -> list[Found]:
    return [
        played(lengths, OrderSpec(name=name), load, admission=admission, seconds=seconds)
        for lengths in workloads
        for load in LOADS
        for admission in (True, False)
        for name in NAMES
    ]


def _sooner(workloads: Iterable[Lengths], seconds: float) -> list[Found]:
    return [
        played(lengths, OrderSpec(name=name, overdue_s=overdue_s), load, admission=False, seconds=seconds)
        for lengths in workloads
        for load in LOADS[1:]
        for name in NAMES[2:]
        for overdue_s in (math.inf, 0.5, 0.25)
    ]


def _without_deadlines(workloads: Iterable[Lengths], seconds: float) -> list[Found]:
    orders = [OrderSpec(), *[OrderSpec(name=name, overdue_s=at_s) for name in NAMES[2:] for at_s in (math.inf, 1.0)]]
    return [
        played(lengths, order, load, admission=False, slo_s=math.inf, seconds=seconds)
        for lengths in workloads
        for load in (0.9, 1.2)
        for order in orders
    ]


def _table(title: str, found: Iterable[Found]) -> None:
    columns = ("lengths", "load", "admission", "order", "utility", "in time", "long in time", "refused")
    rows = [
        (
            each.lengths,
            f"{each.load:g}",
            "on" if each.admission else "off",
            each.order,
            *(f"{share:.1%}" for share in (each.utility, each.in_time, each.long_in_time, each.refused)),
            *(f"{seconds * 1e3:.0f}" for seconds in (each.p50_s, each.oldest_s, each.oldest_long_s)),
        )
        for each in found
    ]
    show(title, (*columns, "p50 ms", "oldest ms", "oldest long ms"), rows)


if __name__ == "__main__":
    main()
