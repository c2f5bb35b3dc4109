"""The planning problem: a model, its latencies, the available devices, the SLO and the objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field, Tag

from cluster.inventory import MAX_COUNT as MAX_COUNT
from earlyexit.data.strict import FromFile
from earlyexit.errors import PlanError, within
from earlyexit.network.chain import check_networks
from optimizer.generation.demand import Generation
from profiles.lengths import Lengths
from profiles.records import RecordedBatches
from profiles.table import MOST_SECONDS, FloatArray, LatencyTable, Seconds, check_ramps

# An SLO that every plan meets.
ANY_LATENCY_S = 1e15
IN_TIME = 0.99
"""Default of `in_time` in files when the cost is minimized."""
# Allowed seconds of one block, at any batch size. With values far outside, rates overflow and searches never end.
LEAST_BLOCK_S, MOST_BLOCK_S = 1e-9, 1e9
# Limits of files, far outside real values. Beyond them, sums and quotients overflow or lose precision.
MAX_BLOCKS = 10_000
"""A larger number is refused before it exhausts the memory."""
LEAST_RATE, MOST_RATE = 1e-9, 1e12
"""Per second. The lower limit is one request in thirty years."""
UsdPerHour = Annotated[float, Field(ge=0, le=1e12)]
Latency = Annotated[float, Field(ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)]
Slack = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
InTime = Annotated[float, Field(ge=0, lt=1)]
MOST_NETWORKS = 6
"""Networks of a cascade. Each subset that contains the last network is planned as a problem of its own: at most 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply(FromFile):
    """Number and price of the accelerators of one type."""

    count: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    usd_per_hour: UsdPerHour = 0.0
    per_node: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Accelerators in a node, of all types together, which share its network card."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise PlanError(f"a device count must be at least 0, not {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(FromFile):
    """The network link between two stages."""

    bandwidth_bytes_per_s: Annotated[float, Field(ge=1e-3, le=1e18)]
    delay_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingresses(FromFile):
    """The ingresses of a service, which carry a limited rate."""

    inputs_per_s: Rate
    """Inputs, or steps of sequences, that one ingress carries per second."""
    replicas: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1

    @property
    def most_per_s(self) -> float:
        """The rate that all ingresses carry together."""
        return self.replicas * self.inputs_per_s

    @property
    def words(self) -> str:
        """The limit as text for messages."""
        carry = "ingress carries" if self.replicas == 1 else "ingresses carry"
        return f"{self.replicas} {carry} at most {self.most_per_s:.6g}/s"

    def needed(self, rate_per_s: float) -> int:
        """Returns the number of ingresses that carry a rate."""
        return math.ceil(rate_per_s / self.inputs_per_s * (1 - 1e-12))  # 1.1 / 0.1 is above 11 by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(FromFile):
    """The promised worst-case latency, and the share of it that is held in reserve (in E3, section 4, 20 %)."""

    latency_s: Latency
    slack: Slack = 0.2

    @property
    def limit_s(self) -> float:
        """The largest worst-case latency that a plan may have."""
        return self.latency_s * (1 - self.slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximizeRate(FromFile):
    """Find the plan with the highest rate."""

    maximize: Literal["rate"] = "rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimizeCost(FromFile):
    """Find the cheapest plan that serves a rate."""

    minimize: Literal["cost"] = "cost"
    rate_per_s: Rate
    in_time: InTime = 0.0
    """Share of inputs that must be in time if arrivals are random. 0: no queues, as in E3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimizeLatency(FromFile):
    """Find the plan with the least mean answer time at a rate (Apparate, PAME)."""

    minimize: Literal["latency"] = "latency"
    rate_per_s: Rate
    ramp_budget: Annotated[float | None, Field(le=MOST_SECONDS)] = None
    """Largest time of active ramps, as a share of the blocks' time (Apparate, section 5.1: 2 %). None: no limit."""
    queues: bool = True
    """Whether the answer time includes the queues of inputs that arrive at random. False: no queues, as in Apparate."""

    def __post_init__(self) -> None:
        if self.ramp_budget == 0:
            raise PlanError(
                "a ramp_budget of 0 lets no ramp be active; allowed is a share above 0, such as 0.02 for 2 %"
            )
        if self.ramp_budget is not None and self.ramp_budget < 0:
            raise PlanError(f"ramp_budget must be a finite number above 0, not {self.ramp_budget}")


class MinimizeWorstCase(MinimizeLatency):
    """Find the plan with the least worst-case latency. It is no objective of files, but tells which SLO has a plan."""


Objective = MaximizeRate | MinimizeCost | MinimizeLatency


# Tags are in angle brackets because pydantic puts them into the paths of errors, where they could be read as fields.
def form_tag(value: Any) -> str | None:
    """Returns the tag of the union member that parses this value, or None if no union has such a member."""
    for kind, tag in ((Mapping, "<mapping>"), (list, "<list>"), (str, "<file>")):
        if isinstance(value, kind):
            return tag
    return "<one>" if isinstance(value, int | float) and not isinstance(value, bool) else None


def forms(allowed: str, tag_of: Callable[[Any], str | None] = form_tag) -> Discriminator:
    """Returns a discriminator that selects a union's member by tag. `allowed` describes the members in messages."""
    return Discriminator(tag_of, custom_error_type="form", custom_error_message=f"Input should be {allowed}")


def _objective_in_file(value: Any) -> Any:
    """Leaves out fields without a value, and adds the default of `in_time` in files."""
    if not isinstance(value, Mapping):
        return value
    given = {name: each for name, each in value.items() if each is not None}
    return {"in_time": IN_TIME, **given} if given.get("minimize") == "cost" else given


def _objective_tag(value: Any) -> str | None:
    given = value if isinstance(value, Mapping) else {}
    return f"<minimize {given['minimize']}>" if "minimize" in given else "<maximize>" if "maximize" in given else None


Cost = TypeVar("Cost")
ObjectiveWith = Annotated[
    Annotated[MaximizeRate, Tag("<maximize>")]
    | Annotated[Cost, Tag("<minimize cost>")]
    | Annotated[MinimizeLatency, Tag("<minimize latency>")],
    forms(
        "{maximize: rate}, {minimize: cost, rate_per_s: ..., in_time: ...} or "
        "{minimize: latency, rate_per_s: ..., ramp_budget: ...}",
        _objective_tag,
    ),
    BeforeValidator(_objective_in_file),
]
"""An objective in a file, with the class that reads the least cost."""
FileObjective = ObjectiveWith[MinimizeCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One planning problem, checked for consistency. `optimizer.cost.evaluate` defines its cost model."""

    num_blocks: int
    ramps: tuple[int, ...]
    """In ascending order. Ramp r is after block r. The last block has no ramp, because every input leaves there."""
    survival_N: tuple[float, ...]
    """Share of inputs that reach each block if all ramps are active (the batch profile of E3)."""
    latency: Mapping[str, LatencyTable]
    """By accelerator type."""
    devices: Mapping[str, Supply]
    link: Link
    bytes_per_sample_N: tuple[float, ...]
    """Size of one input's hidden state after each block."""
    slo: Slo
    objective: Objective
    budget_usd_per_hour: float | None = None
    """Largest cost of all replicas together. None: no limit."""
    batches: RecordedBatches | None = None
    """Recorded distribution of the survivors per batch, whose mean is `survival_N`. None: only the mean is known."""
    lengths: Lengths | None = None
    """Lengths of the inputs. Plans then have token budgets (`optimizer.problems.tokens`). None: every input has the
    length at which latencies were measured, and batches are counted in inputs."""
    tokens_per_input: float = 1.0
    """The mean size of an input where batches, survival and rates count tokens (`optimizer.problems.tokens`)."""
    stayers_length_N: tuple[float, ...] | None = None
    """Mean length of the inputs that reach each block, relative to all inputs, with all ramps active. None: equal."""
    networks: tuple[int, ...] = ()
    """One past the last block of each network of a cascade. The last one is the reference. (): a single network."""
    probe_share: float = 0.0
    """Share of inputs that are probes. They run all blocks, so that a controller can observe the exits of all ramps."""
    survival_of: Mapping[tuple[int, ...], tuple[float, ...]] | None = None
    """Survival of plans that use a subset of the networks, by subset. Only the ramps of the subset are active. Blocks
    keep their numbers in the cascade; the values of unused blocks are ignored. Other subsets have nested survival."""
    crossing_s: float = 0.0
    """Seconds in which the ingress encodes the survivors of a network for the next network. The hop, which carries
    `bytes_per_sample_N` of the network's last block, is added."""
    network_tokens: tuple[float, ...] = ()
    """Tokens of an input in each network, relative to `lengths`: tokenizers differ. (): equal."""
    crossing_tokens: tuple[float, ...] = ()
    """Share of tokens that an input keeps when it crosses into each network, because words are pruned (Tabi, section
    4.2). Batches take the time of that many tokens. (): all tokens are kept."""
    most_chains: int = 1
    """Largest number of parallel chains of stages, if a rate or a cost is optimized for a single network."""
    generation: Generation | None = None
    """Set if each input is a step of a sequence: rates then count steps, and the SLO applies to one step."""
    ingress: Ingresses | None = None
    """Limits the rate of every plan, but is no part of the searches. None: the ingresses carry any rate."""

    def __post_init__(self) -> None:
        with within("ramps"):
            check_ramps(self.ramps, self.num_blocks)
        with within("survival"):
            check_survival("survival", self.survival_N, self.num_blocks, range(self.num_blocks))
        self._check_devices()
        if self.lengths is not None:
            with within("lengths"):
                self._check_lengths()
        self._check_networks()
        if self.generation is not None:
            with within("generation"):
                self._check_generation(self.generation)

    def _check_devices(self) -> None:
        if not self.devices:
            raise PlanError("a plan problem needs at least one device type", at=("devices",))
        unmeasured = sorted(set(self.devices) - set(self.latency))
        if unmeasured:
            message = f"devices {unmeasured} have no latency; latency is known for {sorted(self.latency)}"
            raise PlanError(message, at=("devices", unmeasured[0]))
        for device, table in self.latency.items():
            with within("latency", device):
                table.check_rows(self.num_blocks, len(self.ramps))
                check_seconds(device, table)

    def _check_lengths(self) -> None:
        unknown = [device for device in self.devices if self.latency[device].length is None]
        if unknown:
            raise PlanError(
                f"latency of {unknown[0]}: the length at which it was measured is not known; a problem with lengths "
                "needs it to scale the latency"
            )
        if self.batches is not None:
            raise PlanError("batches count inputs of any length; leave out either batches or lengths")
        stayers = self.stayers_length_N
        if stayers is None:
            return
        if len(stayers) != self.num_blocks or not all(0 <= length < math.inf for length in stayers):
            raise PlanError(f"stayers_length needs {self.num_blocks} numbers, one per block, none below 0")

    def _check_networks(self) -> None:
        if self.networks:
            with within("networks"):
                check_networks(self.networks)
                if len(self.networks) > MOST_NETWORKS:
                    raise PlanError(f"a chain has at most {MOST_NETWORKS} networks, not {len(self.networks)}")
                if self.networks[-1] != self.num_blocks:
                    end = f"the last network ends at block {self.networks[-1]}"
                    raise PlanError(f"{end}, there are {self.num_blocks} blocks")
        for name in ("network_tokens", "crossing_tokens"):
            if getattr(self, name) and len(getattr(self, name)) != max(1, len(self.networks)):
                raise PlanError(f"{name} needs a number for each network", at=(name,))
        last = len(self.networks) - 1
        for used, survival_N in (self.survival_of or {}).items():
            with within("survival_of"):
                if list(used) != sorted(set(used)) or not used or used[0] < 0 or used[-1] != last:
                    rule = f"networks that ascend and end with the last, {last}"
                    raise PlanError(f"survival_of needs {rule}, not {list(used)}")
                starts = (0, *self.networks)
                blocks = [block for network in used for block in range(starts[network], starts[network + 1])]
                check_survival(f"survival_of {list(used)}", survival_N, self.num_blocks, blocks)

    def _check_generation(self, generation: Generation) -> None:
        others = {"lengths": self.lengths, "batches": self.batches, "networks": self.networks or None}
        for name, other in others.items():
            if other is not None:
                raise PlanError(f"steps of sequences have no {name}; leave out either generation or {name}")
        if isinstance(self.objective, MinimizeLatency):
            raise PlanError("generation is planned for the highest rate or the least cost, not for the least latency")
        memory = None if generation.kv is None else generation.kv.memory_bytes
        for name, by_device in (("prefill", generation.prefill), ("kv memory_bytes", memory)):
            missing = [] if by_device is None else sorted(set(self.devices) - set(by_device))
            if missing:
                raise PlanError(f"generation {name} has no entry for {missing[0]}; it has {sorted(by_device or ())}")

    @property
    def required_per_s(self) -> float | None:
        """The rate that a plan must serve. None if the rate itself is maximized."""
        return None if isinstance(self.objective, MaximizeRate) else self.objective.rate_per_s

    @property
    def count_C(self) -> FloatArray:
        """The number of accelerators of each type, in the order of `device_names`."""
        return np.array([self.devices[name].count for name in device_names(self)], dtype=np.float64)

    def usd_of(self, used: Mapping[str, Any]) -> Any:
        """Returns the USD per hour of numbers of replicas by accelerator type; arrays of numbers give an array.

        Searches bound it by `usd_C`, so the first replica of a type must not be cheaper than a further one.
        """
        return sum((number * self.devices[name].usd_per_hour for name, number in used.items()), 0.0)

    @property
    def usd_C(self) -> FloatArray:
        """The USD per hour of a further replica of each type."""
        return np.array([self.usd_of({name: 2}) - self.usd_of({name: 1}) for name in device_names(self)], dtype=float)

    @property
    def in_time(self) -> float:
        """Share of inputs that must be in time if arrivals are random; 0 if the problem does not require it."""
        if isinstance(self.objective, MinimizeCost) and self.generation is None:
            return self.objective.in_time
        return 0.0

    def without_queues(self) -> PlanProblem:
        """Returns the problem in which neither the answer time nor the share of inputs in time depends on queues."""
        none: Any = {"in_time": 0.0} if isinstance(self.objective, MinimizeCost) else {"queues": False}
        return replace(self, objective=replace(self.objective, **none))

    @property
    def time_weights(self) -> tuple[float, float]:
        """Weights of the mean answer time and of the worst-case latency in the time that is minimized."""
        return (0.0, 1.0) if isinstance(self.objective, MinimizeWorstCase) else (1.0, 0.0)

    @property
    def max_usd_per_hour(self) -> float:
        """The cost of all devices, or the budget if it is lower."""
        total: float = self.usd_of({name: supply.count for name, supply in self.devices.items()})
        return total if self.budget_usd_per_hour is None else min(total, self.budget_usd_per_hour)

    @property
    def ramp_budget(self) -> float | None:
        """The largest time of active ramps, as a share of the blocks' time. None: no limit."""
        return self.objective.ramp_budget if isinstance(self.objective, MinimizeLatency) else None

    def with_probes(self, share_N: Sequence[float]) -> list[float]:
        """Returns the shares of all inputs that reach each block. `share_N`: those of inputs that are no probes."""
        return [share + self.probe_share * (1 - share) for share in share_N]

    def bandwidth_of(self, device: str) -> float:
        """Returns the bytes per second that a replica can send while all accelerators of its node send."""
        return self.link.bandwidth_bytes_per_s / self.devices[device].per_node

    def on(self, names: Iterable[str]) -> PlanProblem:
        """Returns the problem with only these accelerator types."""
        return replace(self, devices={name: self.devices[name] for name in names})

    def with_counts(self, counts: Mapping[str, int]) -> PlanProblem:
        """Returns the problem with other numbers of these accelerators."""
        changed = {name: replace(self.devices[name], count=count) for name, count in counts.items()}
        return replace(self, devices={**self.devices, **changed})

    def with_rate(self, rate_per_s: float) -> PlanProblem:
        """Returns the problem with another required rate. A problem that maximizes the rate is returned unchanged."""
        if isinstance(self.objective, MaximizeRate):
            return self
        return replace(self, objective=replace(self.objective, rate_per_s=rate_per_s))


def check_survival(name: str, survival_N: Sequence[float], num_blocks: int, blocks: Sequence[int]) -> None:
    """Raises PlanError unless there is a share per block, which is 1 at the first of `blocks` and rises at none."""
    if len(survival_N) != num_blocks or not all(0 <= share <= 1 for share in survival_N):
        raise PlanError(f"{name} needs {num_blocks} shares from 0 to 1, one per block")
    if survival_N[blocks[0]] != 1:
        raise PlanError(f"{name} must be 1 at block {blocks[0]}, where every input enters, not {survival_N[blocks[0]]}")
    for before, after in pairwise(blocks):
        if survival_N[after] > survival_N[before]:
            rise = f"from {survival_N[before]} to {survival_N[after]}"
            raise PlanError(f"{name} rises at block {after}, {rise}; it may only fall")


def check_seconds(device: str, table: LatencyTable) -> None:
    """Raises PlanError if a block's seconds are implausible."""
    for seconds in (float(table.block_s_NB.min()), float(table.block_s_NB.max())):
        if not LEAST_BLOCK_S <= seconds <= MOST_BLOCK_S:
            raise PlanError(
                f"latency of {device}: a block must take {LEAST_BLOCK_S:g} to {MOST_BLOCK_S:g} seconds, not {seconds}"
            )


def device_names(problem: PlanProblem) -> tuple[str, ...]:
    """Returns the available device types, in the order of all of the planner's arrays."""
    return tuple(name for name, supply in sorted(problem.devices.items()) if supply.count > 0)


Reach = Callable[[Sequence[int]], Sequence[float]]
"""Maps the active ramps to the share of inputs that reach each block (N)."""


def nested_shares(survival_N: Sequence[float], active: Sequence[int]) -> list[float]:
    """Returns the share of inputs that reach each block under these active ramps, with nested survival.

    This is the planner's model of survival: an input that passes a ramp passes all earlier ramps as well.
    """
    shares, share = [], 1.0
    for block in range(len(survival_N)):
        shares.append(share)
        share = survival_N[block + 1] if block in active else share
    return shares
