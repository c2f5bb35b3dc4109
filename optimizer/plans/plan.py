"""The plan: stages of splits on accelerators, with batch sizes, active ramps and an exit policy; and its placement."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Annotated, Any

from pydantic import Field

from cluster.devices import DeviceName
from cluster.inventory import MAX_COUNT
from earlyexit.data.strict import FromFile
from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import PlanError, within
from earlyexit.network.boundary import AfterAnswer, Split
from earlyexit.network.chain import check_ends, check_networks, check_weights
from earlyexit.policies import kind_of
from earlyexit.policies.reroute import check_rule
from earlyexit.words import check_prune

RampKey = Annotated[int, Field(strict=False)]
"""A ramp as a key of a mapping. It is not strict, because JSON has string keys only."""
ByRamp = Mapping[RampKey, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(FromFile):
    """An exit policy and its settings. Settings of other policies are refused."""

    name: str = "entropy"
    thresholds: float | ByRamp | None = None
    """For `recorded` and for policies that compare a score: one threshold for all ramps, or one per ramp."""
    confidences: float | ByRamp | None = None
    """For `share`: confidence above which a principal value counts; one for all ramps, or one per ramp."""
    c: float | None = None
    """For `tabi`: confidence up to which every input continues."""
    k: float | None = None
    """For `tabi`: slope of the exit probability above `c`."""
    patience: Annotated[int | None, Field(ge=1)] = None
    votes: Annotated[int | None, Field(ge=1)] = None
    records: str | None = None
    """For `recorded`: the file of exit records."""
    own: str | None = None
    """For `own`: `module:name` of a policy made with `exit_wrapper`."""
    weights: ByRamp | None = None
    """For ensembles: by the end of a network, the weight of the mixture so far in the next network's answer."""
    decay: float | None = None
    """For tokens: number of tokens after which the extra caution at an answer's start has fallen to 1/e (N / tau in
    CALM, `earlyexit.policies.threshold.decayed`)."""

    def __post_init__(self) -> None:
        kind = kind_of(self.name)
        required, present = kind.takes, set(self.settings) - {"weights", "decay"}
        if present != required:
            raise PlanError(f"exit policy {self.name!r} takes {_and_list(required)}, not {_and_list(present)}")
        if not all(map(math.isfinite, _numbers(self.thresholds))):
            raise PlanError("thresholds must be finite numbers")
        if not all(0 <= value <= 1 for value in _numbers(self.confidences)):
            raise PlanError("confidences must be numbers from 0 to 1")
        if self.c is not None and self.k is not None:
            check_rule(self.c, self.k)
        if self.own is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", self.own):
            raise PlanError(f"an own exit policy is named module:name, not {self.own!r}", at=("own",))
        if self.weights is not None:
            check_weights(self.weights)
            if not kind.mixes:
                raise PlanError(
                    f"exit policy {self.name!r} takes no weights of an ensemble: it decides by earlier answers"
                )
        if self.decay is not None:
            check_decay(self.decay)
            if not kind.decays:
                raise PlanError(f"exit policy {self.name!r} takes no decay: it has no scores from 0 to 1")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings beside the name that are not None."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "name"}
        return {name: value for name, value in values.items() if value is not None}


def policy_of_score(
    score: str,
    thresholds: float | Mapping[int, float],
    confidences: Mapping[int, float] | None,
    weights: Mapping[int, float] | None = None,
    decay: float | None = None,
) -> PolicySpec:
    """Returns the policy that compares this score with thresholds; raises PlanError if it lacks confidences.

    `confidences` are used by the score `share` alone.
    """
    if "confidences" not in kind_of(score).takes:
        confidences = None
    elif confidences is None:
        raise PlanError(f"the score {score} needs confidences; exit records of `offramp calibrate` have them")
    return PolicySpec(name=score, thresholds=thresholds, confidences=confidences, weights=weights, decay=decay)


def check_decay(decay: float) -> None:
    """Raises PlanError unless `decay` is a positive, finite number of tokens."""
    if not 0 < decay < math.inf:
        raise PlanError(f"decay must be a number of tokens above 0, not {decay:g}")


def _numbers(setting: float | Mapping[int, float] | None) -> Iterable[float]:
    if setting is None:
        return ()
    return setting.values() if isinstance(setting, Mapping) else (setting,)


SHARE_TOLERANCE = 2e-3
"""Largest difference between 1 and the sum of shares: a file may round each of three shares to three digits."""
NO_RAMPS = PolicySpec(name="confidence", thresholds=1.0)
"""The policy of plans without active ramps. It never decides; it only forms the final answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(FromFile):
    """Splits that the same replicas host on one accelerator type.

    The splits ascend. Blocks between two splits belong to networks that the plan leaves out; the plan checks this.
    """

    device: DeviceName = "cpu"
    """Accelerator type, a name in `cluster.devices`."""
    replicas: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    splits: Annotated[tuple[Split, ...], Field(strict=False)]

    def __post_init__(self) -> None:
        if not self.splits:
            raise PlanError("a stage needs at least one split")

    @property
    def first(self) -> int:
        return self.splits[0].first

    @property
    def end(self) -> int:
        """One past the stage's last block. Blocks of networks that the plan leaves out may lie before it."""
        return self.splits[-1].end

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of blocks that the stage runs without a gap: first block, and one past the last."""
        gaps = [(before.end, after.first) for before, after in pairwise(self.splits) if before.end < after.first]
        starts, ends = [self.first, *(after for _, after in gaps)], [*(before for before, _ in gaps), self.end]
        return tuple(zip(starts, ends, strict=True))


def with_splits(stages: Sequence[Stage], changed: Callable[[Stage, Split], Split]) -> tuple[Stage, ...]:
    """Returns the stages with each split replaced by `changed(stage, split)`."""
    return tuple(replace(stage, splits=tuple(changed(stage, split) for split in stage.splits)) for stage in stages)


def with_replicas(stages: Iterable[Stage], counts: Iterable[int]) -> tuple[Stage, ...]:
    """Returns the stages with these replicas."""
    return tuple(replace(stage, replicas=count) for stage, count in zip(stages, counts, strict=True))


def replicas_of(stages: Iterable[Stage]) -> Counter[str]:
    """Returns the number of replicas by accelerator type."""
    replicas = Counter[str]()
    for stage in stages:
        replicas[stage.device] += stage.replicas
    return replicas


def chains_of(stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Groups stages by chain. A chain ends with the stage that runs the model's last block."""
    chains: list[tuple[Stage, ...]] = [()]
    for stage in stages:
        chains[-1] += (stage,)
        if stage.end == stages[-1].end:
            chains.append(())
    return [chain for chain in chains if chain]


def used_networks(networks: tuple[int, ...], firsts: set[int]) -> tuple[int, ...]:
    """Returns the indices of the networks that contain these blocks; (0,) for a single network."""
    return tuple(sorted({bisect_right(networks, first) for first in firsts})) if networks else (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parallel chains of stages. The stages of a chain run the whole model, from block 0 to its end.

    In a cascade, a chain may leave out networks. Gaps, overlaps and splits across two networks are refused. All splits
    have the same `after_answer` and `overlap_below`.
    """

    stages: tuple[Stage, ...]
    """The stages of all chains, one chain after the other."""
    shares: tuple[float, ...] = (1.0,)
    """Share of the inputs that each chain serves. The shares are positive and sum to 1."""
    policy: PolicySpec | None = None
    """None if no ramp is active."""
    dispatch: Dispatch = "work-conserving"
    order: OrderSpec = DEFAULT
    """The order in which waiting inputs form batches, at ingresses and in replicas."""
    epoch: int = 0
    """Counts the plan changes of a service."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """The planner's predictions: rate_per_s, latency_s, usd_per_hour."""
    networks: tuple[int, ...] = ()
    """One past the last block of each network of the cascade, used or not. Empty for a single network."""
    prune: Mapping[int, float] = field(default_factory=dict)
    """By end ramp: words whose tokens got at most this multiple of the mean attention are cut from the survivors' texts
    (alpha in Tabi, section 4.2). Empty: no pruning."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage")
        if self.networks:
            with within("networks"):
                check_networks(self.networks)
        end: int | None = None
        for number, stage in enumerate(self.stages):
            for index, split in enumerate(stage.splits):
                with within("stages", number, "splits", index):
                    check_split(split, end, self.networks)
                end = split.end
            end = None if stage.end == self.num_blocks else end
        with within("stages", number, "splits", index):
            check_end(self.num_blocks, self.networks)
        with within("chains"):
            check_shares(self.shares, len(chains_of(self.stages)))
        if self.prune:
            with within("prune"):
                check_prune(self.prune, self.networks)
                if self.after_answer == "stay":
                    raise PlanError(
                        "prune: with after_answer stay, every input must get the reference's answer to its whole text; "
                        "with after_answer stop, only probes do, and the texts of other inputs can be pruned"
                    )
        with within("policy"):
            self._check_policy()

    def _check_policy(self) -> None:
        if self.ramps and self.policy is None:
            raise PlanError(f"ramps {list(self.ramps)} are active, but the plan has no exit policy")
        if self.policy is not None and self.policy.weights is not None:
            check_ends(self.policy.weights, self.networks)
        for name in ("threshold", "confidence"):
            numbers = None if self.policy is None else getattr(self.policy, f"{name}s")
            missing = [ramp for ramp in self.ramps if isinstance(numbers, Mapping) and ramp not in numbers]
            if missing:
                raise PlanError(f"active ramps {missing} have no {name}")

    def located_splits(self) -> list[tuple[tuple[str | int, ...], Split]]:
        """Returns all splits, each with its path in the plan."""
        return [
            (("stages", number, "splits", index), split)
            for number, stage in enumerate(self.stages)
            for index, split in enumerate(stage.splits)
        ]

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(split for stage in self.stages for split in stage.splits)

    @property
    def chains(self) -> tuple[Plan, ...]:
        """Each chain as a plan of its own, with its share of the predicted rate."""
        rate_per_s, chains = self.predicted.get("rate_per_s"), chains_of(self.stages)
        rates = [{} if rate_per_s is None else {"rate_per_s": share * rate_per_s} for share in self.shares]
        return tuple(
            replace(self, stages=stages, shares=(1.0,), predicted={**self.predicted, **rate})
            for stages, rate in zip(chains, rates, strict=True)
        )

    def with_replicas(self, counts: Sequence[int]) -> Plan | None:
        """Returns the plan with other numbers of replicas, and no predictions; None if no chain has all its stages.

        Chains with a stage without replicas are left out. The rate of a chain changes in proportion to the replicas of
        its scarcest stage, and shares follow the rates.
        """
        rest, stages, rates = iter(counts), list[Stage](), list[float]()
        for share, chain in zip(self.shares, self.chains, strict=True):
            pairs = list(zip(chain.stages, rest, strict=False))
            if rate := share * min(count / stage.replicas for stage, count in pairs):
                stages += [replace(stage, replicas=count) for stage, count in pairs]
                rates.append(rate)
        shares = tuple(rate / sum(rates) for rate in rates)
        return replace(self, stages=tuple(stages), predicted={}, shares=shares) if rates else None

    @property
    def ramps(self) -> tuple[int, ...]:
        """The ramps that are active in any chain, in ascending order."""
        return tuple(sorted({ramp for split in self.splits for ramp in split.ramps}))

    @property
    def num_blocks(self) -> int:
        return self.stages[-1].end

    @property
    def used(self) -> tuple[int, ...]:
        """Indices of the networks that any chain uses. The last network is always used."""
        return used_networks(self.networks, {split.first for split in self.splits})

    @property
    def after_answer(self) -> AfterAnswer:
        """Whether inputs whose answer left at a ramp stop or stay."""
        return self.stages[0].splits[0].after_answer

    @property
    def overlap_below(self) -> int | None:
        """A device may start the next batch if fewer inputs than this remain in the running one; None: never."""
        return self.stages[0].splits[0].overlap_below

    @property
    def planned_stages(self) -> tuple[Stage, ...]:
        """The stages without `overlap_below`, which planners do not choose, for comparison with a planner's stages."""
        return self.with_splits(overlap_below=None).stages

    def with_splits(self, **changes: Any) -> Plan:
        """Returns the plan with `after_answer` or `overlap_below` changed in all splits, and the same predictions."""
        return replace(self, stages=with_splits(self.stages, lambda _, split: replace(split, **changes)))

    def in_pairs(self) -> Plan:
        """Returns the plan with two batches at once on every replica."""
        return self.with_splits(overlap_below=1 + max(split.batch for split in self.splits))


def stock_plan(num_blocks: int, *, networks: tuple[int, ...] = (), **stage: Any) -> Plan:
    """Returns the plan of one split without ramps. For a cascade, it uses only the last network.

    `stage` holds the `batch` of all splits, and the `device` and `replicas` of their stage, here and below.
    """
    return early_exit_plan(num_blocks, (), None, networks=networks, **stage)


def early_exit_plan(
    num_blocks: int, ramps: tuple[int, ...], policy: PolicySpec | None, *, networks: tuple[int, ...] = (), **stage: Any
) -> Plan:
    """Returns the plan of one split with all ramps, whose batches shrink (the baseline of E3 section 2.3).

    For a cascade, it uses only the last network, like the planner's strategy of this name.
    """
    bounds = (networks[-2] if networks else 0), num_blocks
    return Plan(stages=(_stage(bounds, ramps, **stage),), policy=policy, networks=networks)


def serial_plan(
    num_blocks: int, ramps: tuple[int, ...], policy: PolicySpec, *, networks: tuple[int, ...] = (), **stage: Any
) -> Plan:
    """Returns the plan of one stage with a split after each ramp. Survivors wait on the device for a full batch."""
    bounds = sorted({0, *(ramp + 1 for ramp in ramps), *networks, num_blocks})
    return Plan(stages=(_stage(bounds, ramps, **stage),), policy=policy, networks=networks)


def _stage(bounds: Sequence[int], ramps: tuple[int, ...], *, batch: int, **stage: Any) -> Stage:
    """Returns a stage whose splits lie between the bounds and have the ramps inside them."""
    splits = tuple(
        Split(first=first, end=end, batch=batch, ramps=tuple(ramp for ramp in ramps if first <= ramp < end))
        for first, end in pairwise(bounds)
    )
    return Stage(splits=splits, **stage)


def check_split(split: Split, end: int | None, networks: tuple[int, ...]) -> None:
    """Raises PlanError unless a split may follow a split that ends at `end`, and lies in one network.

    `end` is None for the first split. A split must not cross networks, because inputs are encoded anew between them.
    """
    starts = (0, *networks[:-1])
    if end is None and split.first not in starts:
        where = f"where a network does, at {_or_list(starts)}" if networks else "at block 0"
        raise PlanError(f"the first split must start {where}, not {split.first}")
    if end is not None and split.first < end:
        raise PlanError(f"overlap: two splits run block {split.first}")
    if end is not None and split.first > end and (end not in networks or split.first not in starts):
        whole = f"; a plan leaves out whole networks, which begin at blocks {_or_list(starts)}" if networks else ""
        raise PlanError(f"gap: no split runs blocks {end} to {split.first - 1}{whole}")
    if over := [bound for bound in networks if split.first < bound < split.end]:
        raise PlanError(
            f"the split of blocks {split.first} to {split.end - 1} runs over a crossing: a network ends after block "
            f"{over[0] - 1}, and so must a split"
        )


def check_end(end: int, networks: tuple[int, ...]) -> None:
    """Raises PlanError unless splits that end at `end` end with the last network."""
    if not networks or end == networks[-1]:
        return
    if end > networks[-1]:
        raise PlanError(f"the last split ends at block {end}, the last of the networks at {networks[-1]}")
    if end <= networks[-2]:
        raise PlanError(
            f"the last network, blocks {networks[-2]} to {networks[-1] - 1}, is left out; every plan must use it"
        )
    raise PlanError(f"gap: no split runs blocks {end} to {networks[-1] - 1}")


def _or_list(blocks: tuple[int, ...]) -> str:
    *before, last = map(str, blocks)
    return f"{', '.join(before)} or {last}" if before else last


def check_shares(shares: Sequence[float], num_chains: int) -> None:
    """Raises PlanError unless there is one share per chain and the shares sum to 1."""
    if len(shares) != num_chains:
        raise PlanError(f"the plan has {num_chains} chains and {len(shares)} shares; every chain needs one share")
    if not math.isclose(sum(shares), 1, abs_tol=SHARE_TOLERANCE):
        raise PlanError(f"the shares of the chains must sum to 1, not to {sum(shares):.6g}")


def _and_list(names: Iterable[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """A plan, and the state of the replicas that serve it.

    Each accelerator type has one Serve deployment. Any of its replicas may host any stage of the plan on that type, so
    a change of plan starts replicas only if a type needs more of them.
    """

    plan: Plan
    avoided: Mapping[str, str] = field(default_factory=dict)
    """Stragglers, which get no work: accelerator type by Serve's unique replica id."""
    hosted: Mapping[str, str] = field(default_factory=dict)
    """The slot that each replica hosted when the plan was made, by replica id. Replicas keep their slot if possible."""

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def stage_of(self) -> Mapping[str, Stage]:
        """The stages by slot, in the plan's order. The n-th stage of an accelerator type has the n-th slot."""
        devices = [stage.device for stage in self.plan.stages]
        return {
            f"{deployment_name(stage.device)}-{devices[:index].count(stage.device)}": stage
            for index, stage in enumerate(self.plan.stages)
        }

    @property
    def occupied(self) -> Mapping[str, int]:
        """Replicas per accelerator type, including avoided ones, because they still occupy their accelerators."""
        return dict(Counter(self.avoided.values()) + replicas_of(self.plan.stages))

    def needed(self, device: str) -> Mapping[str, int]:
        """Returns how many replicas each slot of an accelerator type needs, in the plan's order."""
        return {slot: stage.replicas for slot, stage in self.stage_of.items() if stage.device == device}

    def runnable(self, counts: Mapping[str, int]) -> set[str]:
        """Returns the slots of the chains that can run on these numbers of replicas by accelerator type.

        Every stage needs a replica. If there are too few for all chains, those with the largest shares come first.
        """
        found, left, slots = set[str](), Counter(counts), iter(self.stage_of)
        chains = [(chain, [*islice(slots, len(chain))]) for chain in chains_of(self.plan.stages)]
        for _, (chain, own) in sorted(zip(self.plan.shares, chains, strict=True), key=lambda pair: -pair[0]):
            needed = Counter(stage.device for stage in chain)
            if needed <= left:
                left -= needed
                found.update(own)
        return found

    def roles(self, live: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
        """Returns by accelerator type the slot that each live replica hosts, by the replica's id, as in `live`.

        The result is deterministic, so all ingresses that see the same replicas agree. A type with fewer replicas than
        stages serves the chains that can run, if any uses it. Avoided replicas host a slot only if there are fewer
        other replicas than stages.
        """
        usable = {device: [each for each in ids if each not in self.avoided] for device, ids in live.items()}
        usable |= {device: [*ids] for device, ids in live.items() if len(usable[device]) < len(self.needed(device))}
        runnable = self.runnable({device: len(ids) for device, ids in usable.items()})
        hosts: dict[str, dict[str, str]] = {}
        for device, ids in usable.items():
            needed = self.needed(device)
            served = {slot: number for slot, number in needed.items() if slot in runnable}
            hosts[device] = assign_slots(served if served and len(ids) < len(needed) else needed, ids, self.hosted)
        return hosts


def assign_slots(needed: Mapping[str, int], live: Collection[str], before: Mapping[str, str]) -> dict[str, str]:
    """Returns the slot that each live replica of one accelerator type hosts, by the replica's id.

    `needed` holds replicas per slot, in the plan's order, and `before` the slot that each replica hosted so far. As
    many replicas as possible keep their slot. The others fill the open places, in the order of their ids.
    """
    ordered = sorted(live, key=lambda replica: (len(replica), replica))  # numbers in ids ascend numerically
    assigned: dict[str, str] = {}
    places = divide_replicas(needed, len(ordered), Counter(before[replica] for replica in ordered if replica in before))
    for replica in ordered:
        slot = before.get(replica, "")
        if places.get(slot, 0):
            places[slot] -= 1
            assigned[replica] = slot
    others = [replica for replica in ordered if replica not in assigned]
    return assigned | dict(zip(others, Counter(places).elements(), strict=False))


def divide_replicas(needed: Mapping[str, int], number: int, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Divides a number of replicas among slots: each replica goes to the slot with the least share of its need.

    No slot is therefore empty while another has two. Among equal slots, those that already have the replica come first
    (`held` holds the replicas per slot so far).
    """
    divided, held = dict.fromkeys(needed, 0), held or {}
    for _ in range(number if needed else 0):
        slot = min(divided, key=lambda slot: (divided[slot] / needed[slot], divided[slot] >= held.get(slot, 0)))
        divided[slot] += 1
    return divided


def deployment_name(device: str) -> str:
    """Returns the Serve deployment of an accelerator type's replicas. The name is valid in URLs."""
    return f"split-{re.sub(r'[^A-Za-z0-9_]', '-', device)}"
