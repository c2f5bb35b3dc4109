"""Search spaces: the plans among which each strategy chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from earlyexit.network.boundary import AfterAnswer
from optimizer import Strategy
from optimizer.cost.evaluate import TOLERANCE
from optimizer.problems.problem import PlanProblem, device_names

RampRule = Literal["choose", "all", "none", "split-ends"]
"""Allowed sets of active ramps: any set, all ramps, no ramps, or any set of ramps at the ends of splits."""
MAX_LABELS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time at which a search ends. Kernels cannot look at it, so a search ends after the kernel that runs then."""

    seconds: float
    """Seconds that the whole search may take."""
    ends_s: float
    """The time at which this search, or this part of it, ends."""
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Restrictions on plans. The defaults allow almost every plan."""

    strategy: Strategy = "best"
    """The strategy that uses this space, or a variant of it."""
    ramps: RampRule = "choose"
    splits_per_stage: bool = True
    """Whether a stage may have several splits."""
    several_stages: bool = True
    most_blocks: int | None = None
    """Largest number of blocks of a split, for an exact search. None: no limit."""
    one_batch: bool = False
    """Whether all splits have the same batch size."""
    batch: int | None = None
    """The batch size of all splits, in a part of a space. None: any."""
    most_chains: int = 3
    """Largest number of parallel chains."""
    after_answer: tuple[AfterAnswer, ...] = ("stop",)
    """Whether answered inputs stop or stay, if the mean answer time is minimized. Other objectives gain nothing by
    `stay`."""
    max_labels: int = MAX_LABELS
    """Labels after which an exact search gives up, except one for plans of one split. 0: there is no exact search."""
    limit: TimeLimit | None = field(default=None, compare=False)
    """When a search returns its best plan so far, and the bound that it has proven. None: it ends by itself."""

    def is_over(self) -> bool:
        """Returns whether the time limit has passed."""
        return self.limit is not None and self.limit.now_s() >= self.limit.ends_s

    @property
    def within(self) -> str:
        """The words ` within 5 s` if time is over, for messages about a search that found nothing; else no words."""
        return f" within {self.limit.seconds:g} s" if self.limit is not None and self.is_over() else ""

    def with_share(self, share: float) -> Space:
        """Returns the space for a search that may take a share of the time that is left."""
        if self.limit is None:
            return self
        now_s = self.limit.now_s()
        return replace(self, limit=replace(self.limit, ends_s=now_s + share * (self.limit.ends_s - now_s)))

    def contained(self) -> Iterator[Space]:
        """Yields spaces that the space of a strategy contains, while time is left. Their plans have fewer splits."""
        for each in CONTAINED.get(self.strategy, ()):
            if not self.is_over():
                yield replace(SPACES[each], max_labels=self.max_labels, limit=self.limit)


SPACES: dict[Strategy, Space] = {
    "best": Space(after_answer=("stop", "stay")),
    # The model without exits, replicated.
    "stock": Space(strategy="stock", ramps="none", splits_per_stage=False, several_stages=False),
    # All ramps in one split: the batch shrinks (E3 section 2.3).
    "early-exit": Space(strategy="early-exit", ramps="all", splits_per_stage=False, several_stages=False),
    # One split per stage, one batch size, and all ramps (E3 sections 3.2 and 3.3).
    "e3": Space(strategy="e3", ramps="all", splits_per_stage=False, one_batch=True, most_chains=1),
    # Each device runs all splits.
    "serial": Space(strategy="serial", several_stages=False, after_answer=("stop", "stay")),
    # The whole model, replicated. Answers leave at active ramps, and every input runs to the end (Apparate, SOSP'24).
    "apparate": Space(strategy="apparate", splits_per_stage=False, several_stages=False, after_answer=("stay",)),
    # The whole model, replicated, with the exits that a search over recorded batches finds (PAME, ICS'22, section 6).
    "pame": Space(strategy="pame", splits_per_stage=False, several_stages=False),
}
CONTAINED: dict[Strategy, tuple[Strategy, ...]] = {
    "best": ("stock", "early-exit", "serial"),
    "serial": ("stock", "early-exit"),
    "e3": ("early-exit",),
}


def payable_names(problem: PlanProblem) -> tuple[str, ...]:
    """Returns the available device types of which the budget can pay for at least one device."""
    limit = problem.max_usd_per_hour * (1 + TOLERANCE)
    return tuple(name for name in device_names(problem) if problem.usd_of({name: 1}) <= limit)


def parts_of(problem: PlanProblem, space: Space) -> Iterator[tuple[PlanProblem, Space]]:
    """Yields the parts of a space, each with a problem that has some of the devices.

    Plans of a single stage use one device type. If all splits must have the same batch size, each size is a part.
    """
    names = payable_names(problem)
    groups = [names] if space.several_stages else [(name,) for name in names]
    for group in (group for group in groups if group):
        part = problem.on(group)
        sizes = {batch for name in group for batch in problem.latency[name].batches}
        # The largest batch first: its plan is often the fastest, so that bounds exclude the other sizes.
        for batch in sorted(sizes, reverse=True) if space.one_batch else [None]:
            yield part, replace(space, batch=batch)
