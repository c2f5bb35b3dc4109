"""The plan problem: what a planner knows, and what it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from earlyexit.errors import PlanError
from earlyexit.network.chain import check_networks
from optimizer.generation.demand import Generation, check_number
from profiles.lengths import Lengths
from profiles.records import RecordedBatches
from profiles.table import LatencyTable

# An SLO that any plan keeps.
ANY_LATENCY_S = 1e15
IN_TIME = 0.99
"""Share of inputs that must be in time where a file asks for the least cost and does not say it."""
# Of a block, for any batch: nothing is so quick or so slow. Far beyond, rates overflow and searches never end.
LEAST_BLOCK_S, MOST_BLOCK_S = 1e-9, 1e9
MOST_NETWORKS = 6
"""Of a chain: every set of them that ends with the last is a problem of its own, 32 in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """How many accelerators of one type there are, and what one costs."""

    count: int
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise PlanError(f"a device count must be at least 0, not {self.count}")
        check_number("usd_per_hour", self.usd_per_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a hop between two stages goes over."""

    bandwidth_bytes_per_s: float
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_zero=True)
        check_number("delay_s", self.delay_s)

    def seconds(self, num_bytes: float) -> float:
        """E3's T_x."""
        return self.delay_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Worst-case latency that is promised, and the share of it kept in hand (E3 section 3.1: 20 %)."""

    latency_s: float
    slack: float = 0.2

    def __post_init__(self) -> None:
        check_number("slo latency_s", self.latency_s, above_zero=True)
        if not 0 <= self.slack < 1:
            raise PlanError(f"slack must be at least 0 and below 1, not {self.slack}")

    @property
    def limit_s(self) -> float:
        """What a plan's worst-case latency may be."""
        return self.latency_s * (1 - self.slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximizeRate:
    """The highest rate that the devices give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimizeCost:
    """The cheapest devices that give a rate."""

    rate_per_s: float
    in_time: float = 0.0
    """Share of inputs that must be in time if they arrive at random (`evaluate.queue_s`); 0: as E3, without queues."""

    def __post_init__(self) -> None:
        check_number("rate_per_s", self.rate_per_s, above_zero=True)
        if not 0 <= self.in_time < 1:
            raise PlanError(f"in_time must be at least 0 and below 1, not {self.in_time}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimizeLatency:
    """The least mean answer time at a rate (Apparate, PAME)."""

    rate_per_s: float
    ramp_budget: float | None = None
    """The most seconds that active ramps may take per second of blocks (Apparate, section 5.1: 2 %); None: no bound."""

    def __post_init__(self) -> None:
        check_number("rate_per_s", self.rate_per_s, above_zero=True)
        if self.ramp_budget == 0:
            raise PlanError(
                "a ramp_budget of 0 lets no ramp be active; allowed is a share above 0, such as 0.02 for 2 %"
            )
        if self.ramp_budget is not None:
            check_number("ramp_budget", self.ramp_budget, above_zero=True)


Objective = MaximizeRate | MinimizeCost | MinimizeLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One planning problem, checked for consistency. `optimizer.evaluate` defines its cost model."""

    num_blocks: int
    ramps: tuple[int, ...]
    """Ascending; ramp r sits after block r. None sits after the last block, where every input leaves."""
    survival_N: tuple[float, ...]
    """Per block k, the share of inputs that no ramp before k lets out, all ramps active (E3's batch profile)."""
    latency: Mapping[str, LatencyTable]
    """Per accelerator type."""
    devices: Mapping[str, Supply]
    link: Link
    bytes_per_sample_N: tuple[float, ...]
    """Per block, the hidden state after it, for one input."""
    slo: Slo
    objective: Objective
    budget_usd_per_hour: float | None = None
    """What all replicas together may cost; None: any price."""
    batches: RecordedBatches | None = None
    """How many of a batch move on, as a distribution, where it is known: `survival_N` is its mean. None: only that."""
    lengths: Lengths | None = None
    """Of the service's inputs: then plans have token budgets (`optimizer.tokens`). None: every input is of the length
    that latencies are of, and batches are counted in inputs."""
    stayers_length_N: tuple[float, ...] | None = None
    """Per block, the mean length of inputs that reach it, all ramps active, over that of all inputs; None: alike."""
    networks: tuple[int, ...] = ()
    """Of a chain: one past the last block of each network, the last being the reference; (): there is one network."""
    survival_of: Mapping[tuple[int, ...], tuple[float, ...]] | None = None
    """By the networks that a plan uses, what `survival_N` is with only their ramps active, in the chain's numbering
    (blocks of others do not count); of sets that are not in it, and for None, survival is nested."""
    crossing_s: float = 0.0
    """What the ingress takes until survivors of a network are on their way to the next, encoded anew; the hop, which
    carries `bytes_per_sample_N` of that block, comes on top."""
    network_tokens: tuple[float, ...] = ()
    """Per network, tokens of an input there over those that `lengths` count, by tokenizer; (): alike."""
    crossing_tokens: tuple[float, ...] = ()
    """Per network, the share of an input's tokens that is left of it where it came over a crossing, words having been
    pruned (Tabi, section 4.2); (): all. Batches take what so many tokens take."""
    most_chains: int = 1
    """Chains of stages that a plan may have side by side, where a rate or a cost is sought, of one network's inputs."""
    generation: Generation | None = None
    """Where inputs are steps of sequences: rates are then of steps, and the SLO is of one. None: they are no steps."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise PlanError(f"a model needs at least 1 block, not {self.num_blocks}")
        self._check_ramps()
        self._check_survival()
        self._check_latency()
        if len(self.bytes_per_sample_N) != self.num_blocks:
            raise PlanError(f"bytes_per_sample needs {self.num_blocks} values, one per block")
        for num_bytes in self.bytes_per_sample_N:
            check_number("bytes_per_sample", num_bytes)
        if self.budget_usd_per_hour is not None:
            check_number("budget usd_per_hour", self.budget_usd_per_hour)
        self._check_batches()
        self._check_lengths()
        self._check_networks()
        self._check_generation()

    def _check_generation(self) -> None:
        if self.generation is None:
            return
        others = {"lengths": self.lengths, "batches": self.batches, "networks": self.networks or None}
        for name, other in others.items():
            if other is not None:
                raise PlanError(f"steps of sequences have no {name}; leave one of generation and {name} out")
        if isinstance(self.objective, MinimizeLatency):
            raise PlanError("generation is planned for the highest rate or the least cost, not for the least latency")
        kv = self.generation.kv
        memory = None if kv is None else kv.memory_bytes
        for name, known in (("prefill", self.generation.prefill), ("kv memory_bytes", memory)):
            missing = [] if known is None else sorted(set(self.devices) - set(known))
            if missing:
                raise PlanError(f"generation {name} says nothing of {missing[0]}; it is of {sorted(known or ())}")

    def _check_networks(self) -> None:
        check_networks(self.networks)
        if len(self.networks) > MOST_NETWORKS:
            raise PlanError(f"a chain has at most {MOST_NETWORKS} networks, not {len(self.networks)}")
        if self.networks and self.networks[-1] != self.num_blocks:
            raise PlanError(f"the last network ends at block {self.networks[-1]}, there are {self.num_blocks} blocks")
        check_number("crossing_s", self.crossing_s)
        for name in ("network_tokens", "crossing_tokens"):
            shares = getattr(self, name)
            if shares and len(shares) != max(1, len(self.networks)):
                raise PlanError(f"{name} needs a number for each network")
            for share in shares:
                check_number(name, share, above_zero=True)
        if max(self.crossing_tokens, default=0) > 1:
            raise PlanError(f"crossing_tokens are shares, at most 1, not {max(self.crossing_tokens)}")
        for used, survival_N in (self.survival_of or {}).items():
            self._check_survival_of(used, survival_N)

    def _check_survival_of(self, used: tuple[int, ...], survival_N: tuple[float, ...]) -> None:
        last = len(self.networks) - 1
        if list(used) != sorted(set(used)) or not used or used[0] < 0 or used[-1] != last:
            raise PlanError(f"survival_of is by ascending networks that end with the last, {last}, not {list(used)}")
        if len(survival_N) != self.num_blocks or not all(0 <= share <= 1 for share in survival_N):
            raise PlanError(f"survival_of {list(used)} needs {self.num_blocks} shares from 0 to 1, one per block")
        starts = (0, *self.networks)
        first, *later = (block for network in used for block in range(starts[network], starts[network + 1]))
        if survival_N[first] != 1:
            given = survival_N[first]
            raise PlanError(
                f"survival_of {list(used)} must be 1 at block {first}, where every input enters, not {given}"
            )
        for before, after in pairwise((first, *later)):
            if survival_N[after] > survival_N[before]:
                raise PlanError(
                    f"survival_of {list(used)} rises at block {after}, from {survival_N[before]} to "
                    f"{survival_N[after]}; it may only fall"
                )

    def _check_ramps(self) -> None:
        if list(self.ramps) != sorted(set(self.ramps)):
            raise PlanError(f"ramps must ascend without repeats, not {list(self.ramps)}")
        outside = [ramp for ramp in self.ramps if not 0 <= ramp < self.num_blocks - 1]
        if outside:
            raise PlanError(f"ramps {outside} are not after blocks 0 to {self.num_blocks - 2}")

    def _check_survival(self) -> None:
        if len(self.survival_N) != self.num_blocks:
            raise PlanError(f"survival needs {self.num_blocks} values, one per block, not {len(self.survival_N)}")
        if not all(0 <= share <= 1 for share in self.survival_N):
            raise PlanError("survival must hold shares between 0 and 1")
        if self.survival_N[0] != 1:
            raise PlanError(f"survival must start at 1: every input reaches block 0, not {self.survival_N[0]}")
        for block, (before, after) in enumerate(pairwise(self.survival_N), start=1):
            if after > before:
                raise PlanError(f"survival rises at block {block}, from {before} to {after}; it may only fall")

    def _check_latency(self) -> None:
        if not self.devices:
            raise PlanError("a plan problem needs at least one device type")
        unmeasured = sorted(set(self.devices) - set(self.latency))
        if unmeasured:
            raise PlanError(f"no latency for devices {unmeasured}; latency is given for {sorted(self.latency)}")
        for device, table in self.latency.items():
            if len(table.block_s_NB) != self.num_blocks:
                raise PlanError(f"latency of {device}: block_s needs {self.num_blocks} rows, one per block")
            if len(table.ramp_s_EB) != len(self.ramps):
                raise PlanError(f"latency of {device}: ramp_s needs {len(self.ramps)} rows, one per ramp")
            check_seconds(device, table)

    def _check_batches(self) -> None:
        known = self.batches
        if known is not None and (known.num_blocks, known.ramps) != (self.num_blocks, self.ramps):
            raise PlanError(
                f"batches are of {known.num_blocks} blocks and ramps {list(known.ramps)}; "
                f"the problem has {self.num_blocks} blocks and ramps {list(self.ramps)}"
            )

    def _check_lengths(self) -> None:
        if self.lengths is None:
            return
        unknown = [device for device in self.devices if self.latency[device].length is None]
        if unknown:
            raise PlanError(
                f"latency of {unknown[0]}: its length is not known, so nothing says what inputs of other lengths take; "
                "lengths need a latency with a length"
            )
        if self.batches is not None:
            raise PlanError("batches are counted in inputs, of whatever length; leave one of batches and lengths out")
        longer = self.stayers_length_N
        if longer is not None and (len(longer) != self.num_blocks or not all(0 <= each < math.inf for each in longer)):
            raise PlanError(f"stayers_length needs {self.num_blocks} numbers, one per block, none below 0")

    @property
    def required_per_s(self) -> float | None:
        """The rate that is asked for; None where the rate is what is sought."""
        return None if isinstance(self.objective, MaximizeRate) else self.objective.rate_per_s

    @property
    def in_time(self) -> float:
        """Share of inputs that must be in time where they arrive at random; 0: none is said."""
        if isinstance(self.objective, MinimizeCost) and self.generation is None:
            return self.objective.in_time
        return 0.0

    @property
    def max_usd_per_hour(self) -> float:
        """What all devices cost, or the budget where that is less."""
        there = sum(supply.count * supply.usd_per_hour for supply in self.devices.values())
        return there if self.budget_usd_per_hour is None else min(there, self.budget_usd_per_hour)

    @property
    def ramp_budget(self) -> float | None:
        """The most seconds that active ramps may take per second of blocks; None: no bound."""
        return self.objective.ramp_budget if isinstance(self.objective, MinimizeLatency) else None

    def with_rate(self, rate_per_s: float) -> PlanProblem:
        """The same problem at another rate; as it is where none is asked for."""
        if isinstance(self.objective, MaximizeRate):
            return self
        return replace(self, objective=replace(self.objective, rate_per_s=rate_per_s))

    def share_after(self, ramp: int | None) -> float:
        """Share of inputs inside the model when `ramp` is the last active one so far; None: no ramp yet."""
        return 1.0 if ramp is None else self.survival_N[ramp + 1]


def check_seconds(device: str, table: LatencyTable) -> None:
    """Raise PlanError for blocks that are too quick or too slow to be true."""
    least_s, most_s = float(table.block_s_NB.min()), float(table.block_s_NB.max())
    if least_s < LEAST_BLOCK_S or most_s > MOST_BLOCK_S:
        given_s = least_s if least_s < LEAST_BLOCK_S else most_s
        raise PlanError(
            f"latency of {device}: a block takes {LEAST_BLOCK_S:g} to {MOST_BLOCK_S:g} seconds, not {given_s}"
        )


def device_names(problem: PlanProblem) -> tuple[str, ...]:
    """The devices that there are, in the order of all of the planner's arrays."""
    return tuple(name for name, supply in sorted(problem.devices.items()) if supply.count > 0)


Reach = Callable[[Sequence[int]], Sequence[float]]
"""From the active ramps to the share of inputs that reach every block (N)."""


def nested_reach(problem: PlanProblem) -> Reach:
    """The planner's view of survival: an input that passes the last active ramp would pass all earlier ones."""
    return partial(nested_shares, problem.survival_N)


def nested_shares(survival_N: Sequence[float], active: Sequence[int]) -> list[float]:
    """Per block, the share of inputs that reaches it with these ramps active, by a nested survival."""
    shares, share = [], 1.0
    for block in range(len(survival_N)):
        shares.append(share)
        share = survival_N[block + 1] if block in active else share
    return shares
