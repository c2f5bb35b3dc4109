"""What happens to a service from outside: replicas die or slow down, accelerators go and come, inputs change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from simulator.control.fleet import SimulatedFleet
from simulator.decisions import IntArray
from simulator.events import CONTROLS, Events
from simulator.scenario import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    at_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise DataError(f"at_s must be a finite number of seconds from 0 on, not {self.at_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDies(_At):
    """A replica's process ends; nothing happens where its slot has no such replica then."""

    slot: str
    rank: int = 0
    """0: the one that has taken calls for longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSlows(_At):
    """A replica, healthy so far or not, takes `slowness` times as long as its profile says; 1: it is well again."""

    slot: str
    rank: int = 0
    slowness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsLost(_At):
    """Accelerators of a type are gone, with what runs on them; a node that dies is all of its own."""

    device: str
    numbers: tuple[int, ...]
    """From 0 on; replicas take the lowest free one, a plan's first stage first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsBack(_At):
    """Those are there again, empty."""

    device: str
    numbers: tuple[int, ...]


Fault = ReplicaDies | ReplicaSlows | AcceleratorsLost | AcceleratorsBack


def schedule(faults: Sequence[Fault], fleet: SimulatedFleet, events: Events) -> None:
    """Have faults happen, each at its time."""
    for fault in faults:
        events.at(fault.at_s, CONTROLS, lambda each: _happen(each, fleet), fault)


def _happen(fault: Fault, fleet: SimulatedFleet) -> None:
    match fault:
        case AcceleratorsLost(device=device, numbers=numbers):
            fleet.lose(device, numbers)
        case AcceleratorsBack(device=device, numbers=numbers):
            fleet.bring_back(device, numbers)
        case ReplicaDies(slot=slot, rank=rank):
            replica = fleet.replica_at(slot, rank)
            if replica is not None:
                fleet.die(replica)
        case ReplicaSlows(slot=slot, rank=rank, slowness=slowness):
            replica = fleet.replica_at(slot, rank)
            if replica is not None:
                fleet.slow(replica, slowness)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix(_At):
    """What inputs are from a time on: rows of the decisions, in turn."""

    rows_N: IntArray


def rows_in_turn(mixes: Sequence[Mix], arrivals_s: FloatArray, inputs_per_request: int = 1) -> IntArray:
    """The row of every input of requests that arrive then; raises DataError where the first mix begins late.

    What a `Scenario` takes whose inputs change.
    """
    begins_s = np.array([mix.at_s for mix in mixes])
    if not len(mixes) or begins_s[0] > 0 or (np.diff(begins_s) <= 0).any():
        raise DataError("mixes begin at 0 s, and one after the other")
    counts = np.diff(np.append(np.searchsorted(arrivals_s, begins_s), len(arrivals_s))) * inputs_per_request
    return np.concatenate([np.resize(mix.rows_N, count) for mix, count in zip(mixes, counts, strict=True)])
