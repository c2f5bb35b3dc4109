"""The outcome of a simulation: the result of every input in flat arrays, and figures computed from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from simulator.scenario import FloatArray

NOT_DROPPED: Final = -1
DROPS: Final = ("admission", "overloaded", "deadline", "stage_unavailable", "unanswered")
"""Drop reasons of the ingress, and `unanswered` for inputs without an outcome when a simulation was interrupted."""
UNANSWERED: Final = len(DROPS) - 1
REASONS: Final = {reason: code for code, reason in enumerate(DROPS)}
NO_EXIT: Final = -1
PERCENTILES = (50, 95, 99)


class Ledger:
    """The arrival of every request and the result of every input, by number. Ten million inputs take 130 MB."""

    __slots__ = ("arrived_s", "drop", "exit", "inputs_per_request", "latency_s")

    def __init__(self, arrivals_s: FloatArray, inputs_per_request: int) -> None:
        self.inputs_per_request = inputs_per_request
        self.arrived_s = array("d")
        """The time of arrival of each request."""
        self.latency_s = array("d")
        """The latency of each input; NaN without an answer."""
        self.exit = array("h")
        """The block after which the input left."""
        self.drop = array("b")
        """The drop reason as an index of DROPS."""
        self.extend(arrivals_s)

    def extend(self, arrivals_s: FloatArray) -> None:
        """Adds requests whose inputs have no outcome yet."""
        number = len(arrivals_s) * self.inputs_per_request
        self.arrived_s.frombytes(arrivals_s.tobytes())
        self.latency_s.extend(array("d", [math.nan]) * number)
        self.exit.extend(array("h", [NO_EXIT]) * number)
        self.drop.extend(array("b", [NOT_DROPPED]) * number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthUse:
    """The use of a split's batches by inputs of different lengths."""

    budget: int | None
    """The token budget of a batch; None: only the number of inputs is limited."""
    tokens: int
    """The tokens of all batches."""
    fill: float | None
    """The mean share of the budget that was filled; None without a budget."""
    p50_s: float
    """The median seconds of a batch."""
    p99_s: float

    @property
    def spread(self) -> float:
        """The 99th percentile of the batch time divided by the median."""
        return self.p99_s / self.p50_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitUse:
    """The batches of one split on one accelerator type, in the whole simulation."""

    device: str
    first: int
    end: int
    batch: int
    ramps: tuple[int, ...]
    batches: int
    inputs: int
    fill: float
    """The mean share of the target batch that was filled."""
    busy_s: float
    lengths: LengthUse | None = None
    """None if inputs have no lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """The work of the replicas at one stage in the whole simulation."""

    slot: str
    device: str
    replica_s: float
    """The accelerator seconds of the replicas at this stage."""
    utilisation: float
    """The share of these seconds in which a batch ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the requests that arrived after the warm-up. A request is in time if all its inputs are in time."""

    seconds: float
    inputs: int
    offered_per_s: float
    answered: int
    in_slo: int
    """Inputs answered within the SLO."""
    goodput_per_s: float
    """Inputs answered within the SLO, per second."""
    p50_s: float | None
    """Over all answered requests; None if none was answered."""
    p95_s: float | None
    p99_s: float | None
    mean_s: float | None
    request_goodput_per_s: float
    """Inputs of requests that were answered completely and in time, per second."""
    drops: Mapping[str, int]
    """Dropped inputs, by reason."""
    exits: Mapping[int, int]
    """Answers, by the block after which the inputs left."""
    splits: tuple[SplitUse, ...]
    slots: tuple[SlotUse, ...]
    usd_per_hour: float
    """The mean price of the accelerators in use."""
    interrupted: bool

    @property
    def in_slo_share(self) -> float:
        """The share of all arrived inputs that were answered within the SLO."""
        return self.in_slo / self.inputs if self.inputs else 1.0

    @property
    def utilisation(self) -> float:
        """The utilisation of all accelerators."""
        held_s = sum(slot.replica_s for slot in self.slots)
        return sum(slot.replica_s * slot.utilisation for slot in self.slots) / held_s if held_s else 0.0

    def document(self) -> dict[str, Any]:
        """Returns the figures as plain data. `lengths` is left out if inputs have no lengths."""
        document = asdict(self) | {"in_slo_share": self.in_slo_share, "utilisation": self.utilisation}
        for split, use in zip(document["splits"], self.splits, strict=True):
            lengths = split.pop("lengths")
            if use.lengths is not None:
                split["lengths"] = lengths | {"spread": use.lengths.spread}
        return document


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The complete result of a simulation."""

    duration_s: float
    warm_up_s: float
    slo_s: float
    inputs_per_request: int
    arrived_s_R: FloatArray
    """The time of arrival of each request."""
    latency_s_N: FloatArray
    """The latency of each input; NaN without an answer."""
    exit_N: npt.NDArray[np.int16]
    """The block after which each input left; -1 without an answer."""
    drop_N: npt.NDArray[np.int8]
    """The drop reason as an index of `DROPS`; -1 for inputs that were not dropped."""
    splits: tuple[SplitUse, ...]
    slots: tuple[SlotUse, ...]
    usd: float
    """The cost of the accelerators."""
    ended_s: float
    """When the last work was done."""
    interrupted: bool = False

    def figures(self) -> Figures:
        """Returns the figures of everything after the warm-up."""
        return self.figures_between(self.warm_up_s, self.duration_s)

    def figures_between(self, since_s: float, until_s: float) -> Figures:
        """Returns the figures of requests that arrived in a window. Fill, utilisation and cost are of the whole run."""
        width = self.inputs_per_request
        first, end = np.searchsorted(self.arrived_s_R, [since_s, until_s])
        end = len(self.arrived_s_R) if until_s >= self.duration_s else end  # a request may arrive exactly at the end
        latency_s_N = self.latency_s_N[first * width : end * width]
        drop_N = self.drop_N[first * width : end * width]
        exits_N = self.exit_N[first * width : end * width]
        answered_N = ~np.isnan(latency_s_N)
        in_slo_N = latency_s_N <= self.slo_s
        slowest_s_R = latency_s_N.reshape(-1, width).max(1) if len(latency_s_N) else latency_s_N
        whole_s_R = slowest_s_R[~np.isnan(slowest_s_R)]
        p50_s, p95_s, p99_s = np.percentile(whole_s_R, PERCENTILES).tolist() if len(whole_s_R) else (None, None, None)
        seconds = until_s - since_s
        exits, counts = np.unique(exits_N[answered_N], return_counts=True)
        return Figures(
            seconds=seconds,
            inputs=len(latency_s_N),
            offered_per_s=len(latency_s_N) / seconds,
            answered=int(answered_N.sum()),
            in_slo=int(in_slo_N.sum()),
            goodput_per_s=float(in_slo_N.sum()) / seconds,
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            mean_s=float(whole_s_R.mean()) if len(whole_s_R) else None,
            request_goodput_per_s=float((whole_s_R <= self.slo_s).sum()) * width / seconds,
            drops={name: count for k, name in enumerate(DROPS) if (count := int((drop_N == k).sum()))},
            exits=dict(zip(exits.tolist(), counts.tolist(), strict=True)),
            splits=self.splits,
            slots=self.slots,
            usd_per_hour=self.usd / self.ended_s * 3600 if self.ended_s else 0.0,
            interrupted=self.interrupted,
        )
