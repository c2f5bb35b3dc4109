"""Carrying out a change-over: the steps are decided elsewhere, here they happen, and are waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from deployments.control.fleet import Fleet
from deployments.reports import IngressReport
from earlyexit.clock import Clock
from earlyexit.errors import OfframpError
from optimizer.live.changeover import Await, ChangeStep, Drain, Prepare, Scale, Switch
from optimizer.placement import PlacedPlan

START_S = 120.0
"""For a replica to load its model and warm up; after that, something else is wrong."""
DRAIN_S = 60.0
"""For the inputs of the plan before: no piece is lost if they take longer, so the change goes on."""
LOOK_S = 0.25

Sleep = Callable[[float], Awaitable[None]]
Reports = Callable[[], Awaitable[Sequence[IngressReport]]]
Meanwhile = Callable[[], Awaitable[None]]


class ChangeOver:
    """What leads a fleet from plan to plan."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        sleep: Sleep,
        reports: Reports,
        starts_at_once: int | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """`reports` asks the ingresses, and keeps the probes that they hand over; None starts all replicas at once.

        `meanwhile`: what must not wait until a change is through, asked at every look.
        """
        self._fleet = fleet
        self._clock = clock
        self._sleep = sleep
        self._reports = reports
        self._starts_at_once = starts_at_once
        self._meanwhile = meanwhile
        self.told: dict[str, int] = {}
        """Replicas that slots were asked for, by this process."""
        self.late = 0
        """Times in a row that replicas did not start in time."""

    async def carry_out(
        self, steps: Sequence[ChangeStep], after: Callable[[], PlacedPlan], switched: Callable[[], None]
    ) -> None:
        """Take the steps, and say when the ingresses follow.

        `after`: the plan that they lead to, asked when it is needed, for its thresholds may become others on the way.
        Raises OfframpError where replicas do not come in time, or their accelerators are gone; and whatever the fleet
        raises. Steps taken then stay taken: what is still missing can be worked out anew.
        """
        for step in steps:
            match step:
                case Scale(slot=slot, replicas=replicas):
                    await self._start_some(slot, replicas)
                    await self._scale(slot, replicas)
                case Await(replicas=replicas):
                    await self._await(replicas)
                case Prepare():
                    await self._fleet.prepare(after())
                case Switch():
                    await self._fleet.follow(after())
                    self.late = 0
                    switched()
                case Drain():
                    await self._drain(after().epoch)

    async def keep_in_place(self, placed: PlacedPlan, running: Mapping[str, int]) -> None:
        """Have every slot told again that does not run what it should, without waiting.

        A replica that died comes back by itself; a deployed configuration that was applied again does not.
        """
        for slot, replicas in running.items():
            needed = placed.occupied.get(slot, 0)
            if replicas != needed:
                await self._scale(slot, needed)

    def coming(self, running: Mapping[str, int]) -> dict[str, int]:
        """Replicas that run, or were asked for and may be starting."""
        return {slot: max(count, self.told.get(slot, 0)) for slot, count in running.items()}

    async def _scale(self, slot: str, replicas: int) -> None:
        await self._fleet.scale(slot, replicas)
        self.told[slot] = replicas

    async def _start_some(self, slot: str, replicas: int) -> None:
        """Of many new replicas so many after so many: one that starts takes a core, maybe one that others serve on."""
        if self._starts_at_once is not None:
            running = (await self._fleet.running()).get(slot, 0)
            for count in range(running + self._starts_at_once, replicas, self._starts_at_once):
                await self._await({slot: count})

    async def _await(self, replicas: Mapping[str, int]) -> None:
        for slot, count in replicas.items():  # a change that broke off may have told them otherwise
            if self.told.get(slot, 0) < count:
                await self._scale(slot, count)
        room = sum((await self._fleet.capacity()).values())
        until_s = self._clock.now_s() + START_S
        while missing := _missing(replicas, await self._fleet.running()):
            if self._clock.now_s() >= until_s:
                self.late += 1
                raise OfframpError(f"replicas did not start within {START_S:.0f} s: {missing}")
            if sum((await self._fleet.capacity()).values()) < room:
                raise OfframpError(f"accelerators were lost while replicas were to start: {missing}")
            await self._wait()

    async def _drain(self, epoch: int) -> None:
        """An ingress that does not report may still have inputs under way."""
        until_s = self._clock.now_s() + DRAIN_S
        while self._clock.now_s() < until_s:
            reports = await self._reports()
            if reports and all(report.oldest_epoch >= epoch for report in reports):
                return
            await self._wait()

    async def _wait(self) -> None:
        if self._meanwhile is not None:
            await self._meanwhile()
        await self._sleep(LOOK_S)


def _missing(replicas: Mapping[str, int], running: Mapping[str, int]) -> str:
    """Empty where nothing is."""
    return ", ".join(
        f"{slot} runs {running.get(slot, 0)} of {count}"
        for slot, count in replicas.items()
        if running.get(slot, 0) < count
    )
