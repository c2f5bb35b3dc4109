"""The plan: what runs where, at which batch, with which ramps on, and how sure they must be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer, Split
from earlyexit.network.chain import check_ends, check_networks, check_weights, used_networks
from earlyexit.policies import PolicyName, kind_of
from earlyexit.policies.reroute import check_rule
from earlyexit.words import check_prune


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Which exit policy, and its numbers; refuses numbers that another policy would need."""

    name: PolicyName = "entropy"
    thresholds: float | Mapping[int, float] | None = None
    """For policies that compare a score with it, and recorded: one for all ramps or one per ramp."""
    confidences: float | Mapping[int, float] | None = None
    """For share: above which a principal value counts; one for all ramps or one per ramp."""
    c: float | None = None
    """For tabi: the confidence up to which every input goes on."""
    k: float | None = None
    """For tabi: the slope of the band above it."""
    patience: int | None = None
    votes: int | None = None
    records: str | None = None
    """For recorded: the file of exit records."""
    own: str | None = None
    """For own: `module:name` of a policy made with `exit_wrapper`."""
    weights: Mapping[int, float] | None = None
    """Of an ensemble, by the end of a network: the weight, in what comes after it, of what was said up to it."""
    decay: float | None = None
    """Of tokens: in how many of them what is added to thresholds at an answer's beginning falls to 1/e (CALM's N / tau,
    `earlyexit.policies.threshold.decayed`)."""

    def __post_init__(self) -> None:
        kind = kind_of(self.name)
        needed, given = kind.takes, set(self.settings) - {"weights", "decay"}
        if given != needed:
            raise PlanError(f"exit policy {self.name!r} takes {_listed(needed)}, not {_listed(given)}")
        for name, count in (("patience", self.patience), ("votes", self.votes)):
            if count is not None and count < 1:
                raise PlanError(f"{name} must be at least 1, not {count}")
        if not all(map(math.isfinite, _numbers(self.thresholds))):
            raise PlanError("thresholds must be finite numbers")
        if not all(0 <= value <= 1 for value in _numbers(self.confidences)):
            raise PlanError("confidences must be numbers from 0 to 1")
        if self.c is not None and self.k is not None:
            check_rule(self.c, self.k)
        if self.own is not None:
            check_own(self.own)
        if self.weights is not None:
            check_weights(self.weights)
            if not kind.mixes:
                raise PlanError(
                    f"exit policy {self.name!r} takes no weights of an ensemble: it decides by what it carries"
                )
        if self.decay is not None:
            check_decay(self.decay)
            if not kind.decays:
                raise PlanError(f"exit policy {self.name!r} takes no decay: it has no scores from 0 to 1")

    @property
    def settings(self) -> dict[str, Any]:
        """What is given beside the name."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "name"}
        return {name: value for name, value in values.items() if value is not None}


def policy_of_score(
    score: PolicyName,
    thresholds: float | Mapping[int, float],
    confidences: Mapping[int, float] | None,
    weights: Mapping[int, float] | None = None,
    decay: float | None = None,
) -> PolicySpec:
    """The policy that compares such scores with thresholds; confidences are those of shares, weights an ensemble's.

    `decay` is that of records of tokens.

    Raises PlanError for shares without.
    """
    counts = "confidences" in kind_of(score).takes
    if counts and confidences is None:
        raise PlanError(f"nothing says above which confidence a {score} counts; exit records of `offramp calibrate` do")
    confidences = confidences if counts else None
    return PolicySpec(name=score, thresholds=thresholds, confidences=confidences, weights=weights, decay=decay)


def check_decay(decay: float) -> None:
    """Raise PlanError for what is no number of tokens."""
    if not 0 < decay < math.inf:
        raise PlanError(f"decay must be a number of tokens above 0, not {decay:g}")


def _numbers(one_or_several: float | Mapping[int, float] | None) -> Iterable[float]:
    if one_or_several is None:
        return ()
    return one_or_several.values() if isinstance(one_or_several, Mapping) else (one_or_several,)


SHARE_TOLERANCE = 2e-3
"""How far the sum of shares may be from 1: a file may round each of three shares to three digits."""
NO_RAMPS = PolicySpec(name="confidence", thresholds=1.0)
"""Of a plan that names none: without active ramps nothing is ever decided; the policy then only concludes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive splits hosted by the same replicas on one accelerator type.

    What lies between two is for the plan to allow: networks that it leaves out.
    """

    device: str
    """Accelerator type, a name that `cluster.devices` knows."""
    replicas: int
    splits: tuple[Split, ...]

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise PlanError(f"a stage needs at least 1 replica, not {self.replicas}")
        if not self.splits:
            raise PlanError("a stage needs at least one split")
        for before, after in pairwise(self.splits):
            if after.first < before.end:
                raise PlanError(f"overlap: two splits run block {after.first}")

    @property
    def first(self) -> int:
        return self.splits[0].first

    @property
    def end(self) -> int:
        """One past its last block. Between `first` and it there may be networks that the plan leaves out."""
        return self.splits[-1].end

    @property
    def num_blocks(self) -> int:
        """How many it runs."""
        return sum([split.end - split.first for split in self.splits])

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First block and one past the last of what it runs without a gap."""
        after = [each.first for before, each in pairwise(self.splits) if before.end < each.first]
        before = [each.end for each, then in pairwise(self.splits) if each.end < then.first]
        return tuple(zip((self.first, *after), (*before, self.end), strict=True))


def with_splits(stages: Sequence[Stage], changed: Callable[[Stage, Split], Split]) -> tuple[Stage, ...]:
    """The same stages with each split changed, by its stage and itself."""
    return tuple(replace(stage, splits=tuple(changed(stage, split) for split in stage.splits)) for stage in stages)


def chains_of(stages: Sequence[Stage], num_blocks: int) -> list[tuple[Stage, ...]]:
    """The stages of every chain; a chain ends with the stage that runs the model's last block."""
    chains: list[tuple[Stage, ...]] = [()]
    for stage in stages:
        chains[-1] += (stage,)
        if stage.end == num_blocks:
            chains.append(())
    return [chain for chain in chains if chain]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Chains of stages side by side. The stages of a chain run the whole model, from block 0 to its end.

    Of a cascade, a chain may leave out networks. Refuses gaps, overlaps, splits over a crossing, and splits that
    disagree on stop or stay, or on `overlap_below`.
    """

    stages: tuple[Stage, ...]
    """The stages of all chains, one chain after the other."""
    shares: tuple[float, ...] = (1.0,)
    """Share of the inputs that each chain serves. The shares are positive and sum to 1."""
    policy: PolicySpec | None = None
    """None where no ramp is active."""
    dispatch: Dispatch = "work-conserving"
    order: OrderSpec = DEFAULT
    """Which of the inputs that wait, at ingresses and in replicas, make the next batch."""
    epoch: int = 0
    """Counts plan changes of one service."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """What the planner expects of it: rate_per_s, latency_s, usd_per_hour."""
    networks: tuple[int, ...] = ()
    """One past the last block of every network of the chain, used or not; nothing where there is but one network."""
    prune: Mapping[int, float] = field(default_factory=dict)
    """By end ramp, of the inputs that go on there: words are cut whose tokens got no more than so much of the mean
    attention, Tabi's alpha (section 4.2). Nothing: the texts go on whole."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage")
        check_networks(self.networks)
        chains = chains_of(self.stages, self.num_blocks)
        for chain in chains:
            splits = [split for stage in chain for split in stage.splits]
            for end, split in zip((None, *(split.end for split in splits)), splits, strict=False):
                check_split(split, end, self.networks)
        check_end(self.num_blocks, self.networks)
        check_shares(self.shares, len(chains))
        check_prune(self.prune, self.networks)
        if self.prune and self.after_answer == "stay":
            raise PlanError(
                "prune: inputs that stay are to tell what the reference says of whole texts; with after_answer stop "
                "probes tell it, and words can be pruned of the others"
            )
        for before, after in pairwise(self.splits):
            if before.after_answer != after.after_answer:
                raise PlanError(
                    f"inputs stop or stay in a whole plan: blocks {after.first} on say {after.after_answer!r}, "
                    f"those before {before.after_answer!r}"
                )
            if before.overlap_below != after.overlap_below:
                raise PlanError(
                    f"overlap_below is a whole plan's: blocks {after.first} on say {after.overlap_below}, those before "
                    f"{before.overlap_below}"
                )
        if self.ramps and self.policy is None:
            raise PlanError(f"ramps {list(self.ramps)} are active, but no exit policy says when to leave")
        if self.policy is not None and self.policy.weights is not None:
            check_ends(self.policy.weights, self.networks)
        for called in ("threshold", "confidence"):
            numbers = None if self.policy is None else getattr(self.policy, f"{called}s")
            missing = [ramp for ramp in self.ramps if isinstance(numbers, Mapping) and ramp not in numbers]
            if missing:
                raise PlanError(f"active ramps {missing} have no {called}")

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(split for stage in self.stages for split in stage.splits)

    @property
    def chains(self) -> tuple[Plan, ...]:
        """Every chain as a plan of its own, which predicts its share of the rate."""
        if len(self.shares) == 1:
            return (self,)
        rate_per_s, chains = self.predicted.get("rate_per_s"), chains_of(self.stages, self.num_blocks)
        rates = [{} if rate_per_s is None else {"rate_per_s": share * rate_per_s} for share in self.shares]
        return tuple(
            replace(self, stages=stages, shares=(1.0,), predicted={**self.predicted, **rate})
            for stages, rate in zip(chains, rates, strict=True)
        )

    def with_replicas(self, counts: Sequence[int]) -> Plan:
        """The plan with other numbers of replicas, and no predictions; a chain's share follows its scarcest stage."""
        stages = tuple(replace(stage, replicas=count) for stage, count in zip(self.stages, counts, strict=True))
        kept = iter([now.replicas / was.replicas for now, was in zip(stages, self.stages, strict=True)])
        left = [part * min(islice(kept, len(each.stages))) for part, each in zip(self.shares, self.chains, strict=True)]
        return replace(self, stages=stages, shares=tuple(share / sum(left) for share in left), predicted={})

    @property
    def ramps(self) -> tuple[int, ...]:
        """The ramps that are active in any chain, in ascending order."""
        return tuple(sorted({ramp for split in self.splits for ramp in split.ramps}))

    @property
    def num_blocks(self) -> int:
        return self.stages[-1].end

    @property
    def entry(self) -> int:
        """The block at which inputs enter the first chain: the first block of the first network that it uses."""
        return self.stages[0].first

    @property
    def used(self) -> tuple[int, ...]:
        """Places of the networks that any chain uses; the last network is always among them."""
        return used_networks(self.networks, {split.first for split in self.splits})

    @property
    def after_answer(self) -> AfterAnswer:
        """What inputs do whose answer left at a ramp."""
        return self.stages[0].splits[0].after_answer

    @property
    def overlap_below(self) -> int | None:
        """Inputs left in a running batch below which a device may run its next one beside it; None: never."""
        return self.stages[0].splits[0].overlap_below

    @property
    def planned_stages(self) -> tuple[Stage, ...]:
        """The stages as planners make them, to be compared with theirs: they do not choose whether batches overlap."""
        return self.with_splits(overlap_below=None).stages

    def with_splits(self, **changes: Any) -> Plan:
        """The same plan with `after_answer` or `overlap_below` changed in all splits; its predictions are kept."""
        return replace(self, stages=with_splits(self.stages, lambda _, split: replace(split, **changes)))


def stock_plan(num_blocks: int, *, networks: tuple[int, ...] = (), **stage: Any) -> Plan:
    """The model without exits: one split, no ramps; of a chain, the reference alone.

    `stage` here and below: the `batch` of all splits, and the `device` and `replicas` of their stage.
    """
    return _one_stage((networks[-2] if networks else 0, num_blocks), (), None, networks, **stage)


def early_exit_plan(
    num_blocks: int, ramps: tuple[int, ...], policy: PolicySpec, *, networks: tuple[int, ...] = (), **stage: Any
) -> Plan:
    """All ramps in one split: inputs leave, and the batch shrinks (what E3 section 2.3 finds wanting).

    Of a chain, the reference alone with those of its ramps, as the planner's strategy of this name has it.
    """
    return _one_stage((networks[-2] if networks else 0, num_blocks), ramps, policy, networks, **stage)


def serial_plan(
    num_blocks: int, ramps: tuple[int, ...], policy: PolicySpec, *, networks: tuple[int, ...] = (), **stage: Any
) -> Plan:
    """One stage, cut after every given ramp: survivors wait on the device until their next batch is full."""
    bounds = sorted({0, *(ramp + 1 for ramp in ramps), *networks, num_blocks})
    return _one_stage(bounds, ramps, policy, networks, **stage)


def _one_stage(
    bounds: Sequence[int], ramps: tuple[int, ...], policy: PolicySpec | None, networks: tuple[int, ...], *,
    batch: int, device: str = "cpu", replicas: int = 1,
) -> Plan:  # fmt: skip
    """Splits from bound to bound, with the ramps that lie in each."""
    splits = tuple(
        Split(first=first, end=end, batch=batch, ramps=tuple(ramp for ramp in ramps if first <= ramp < end))
        for first, end in pairwise(bounds)
    )
    return Plan(stages=(Stage(device=device, replicas=replicas, splits=splits),), policy=policy, networks=networks)


def check_split(split: Split, end: int | None, networks: tuple[int, ...]) -> None:
    """Raise PlanError unless a split lies in one network and may follow one that ends at `end`; None: be the first.

    Between two networks inputs are encoded anew.
    """
    starts = (0, *networks[:-1])
    if end is None and split.first not in starts:
        where = f"where a network does, at {_or(starts)}" if networks else "at block 0"
        raise PlanError(f"the first split must start {where}, not {split.first}")
    if end is not None and split.first < end:
        raise PlanError(f"overlap: two splits run block {split.first}")
    if end is not None and split.first > end and (end not in networks or split.first not in starts):
        whole = f"; a plan leaves out whole networks, which begin at blocks {_or(starts)}" if networks else ""
        raise PlanError(f"gap: no split runs blocks {end} to {split.first - 1}{whole}")
    over = [bound for bound in networks if split.first < bound < split.end]
    if over:
        raise PlanError(
            f"the split of blocks {split.first} to {split.end - 1} runs over a crossing: a network ends after block "
            f"{over[0] - 1}, and so must a split"
        )


def check_end(end: int, networks: tuple[int, ...]) -> None:
    """Raise PlanError unless splits that end at `end` end with the last network of the chain."""
    if not networks or end == networks[-1]:
        return
    if end > networks[-1]:
        raise PlanError(f"the last split ends at block {end}, the last of the networks at {networks[-1]}")
    if end <= networks[-2]:
        raise PlanError(
            f"the last network, blocks {networks[-2]} to {networks[-1] - 1}, is left out: it answers what no other does"
        )
    raise PlanError(f"gap: no split runs blocks {end} to {networks[-1] - 1}")


def _or(blocks: tuple[int, ...]) -> str:
    *before, last = map(str, blocks)
    return f"{', '.join(before)} or {last}" if before else last


def check_shares(shares: Sequence[float], num_chains: int) -> None:
    """Raise PlanError unless there is one positive share for every chain, and the shares sum to 1."""
    if len(shares) != num_chains:
        raise PlanError(f"the plan has {num_chains} chains and {len(shares)} shares; every chain needs one share")
    for share in shares:
        if not 0 < share <= 1:
            raise PlanError(f"the share of a chain must be above 0 and at most 1, not {share:g}")
    if not math.isclose(sum(shares), 1, abs_tol=SHARE_TOLERANCE):
        raise PlanError(f"the shares of the chains must sum to 1, not to {sum(shares):.6g}")


def check_own(name: str) -> None:
    """Raise PlanError unless `name` has the form `module:name`."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise PlanError(f"an own exit policy is named module:name, not {name!r}")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"
