"""Accelerators that Ray still counts although their replicas are gone: it notices a dead node only after 15 s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.control.look import used
from optimizer.placement import PlacedPlan

LOOKS = 2
"""A replica that was killed alone is back in seconds; a stage that is empty at so many looks is not waited for."""
BELIEVED_S = 60.0
"""After so long it is tried whether they are there again, if Ray counts them still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    counted: int
    """By Ray, when it was noticed."""
    missing: int
    until_s: float


class Missing:
    """Watches for stages that lost all their replicas: until then the plan goes on with fewer, and Serve mends it."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        """`devices`: accelerator type by slot."""
        self._devices = devices
        self._ran: set[str] = set()
        self._looks = 0
        self._short: dict[str, _Short] = {}

    def left(
        self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan | None, now_s: float
    ) -> dict[str, int]:
        """The accelerators that can be counted on; `placed` is the plan that is served, None in a change-over."""
        if placed is not None:
            self._look(capacity, running, placed, now_s)
        self._short = {
            device: short
            for device, short in self._short.items()
            if now_s < short.until_s and capacity.get(device, 0) == short.counted
        }
        return {
            device: count - (self._short[device].missing if device in self._short else 0)
            for device, count in capacity.items()
        }

    def _look(self, capacity: Mapping[str, int], running: Mapping[str, int], placed: PlacedPlan, now_s: float) -> None:
        """A slot that never ran anything is only slow to start."""
        self._ran |= {slot for slot, count in running.items() if count}
        is_empty = any(slot in self._ran and not running.get(slot, 0) for slot in placed.slots)
        self._looks = self._looks + 1 if is_empty else 0
        if self._looks < LOOKS:
            return
        self._looks = 0
        here = used(running, self._devices)
        for device, needed in used(placed.occupied, self._devices).items():
            missing = min(needed - here.get(device, 0), capacity.get(device, 0))
            if missing > 0:
                counted = capacity[device]
                self._short[device] = _Short(counted=counted, missing=missing, until_s=now_s + BELIEVED_S)
