"""The threads that a device runs in, where it is live."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic

from earlyexit.engine.device import MOST_BATCHES, Device
from earlyexit.engine.engine import Batch, Dispatch
from earlyexit.engine.order import DEFAULT, OrderSpec
from earlyexit.engine.queue import Member
from earlyexit.engine.release import PayloadT
from earlyexit.network.split import Split
from earlyexit.network.wire import WirePiece

logger = logging.getLogger(__name__)


def ignore_death() -> None:
    """Leave it to `is_alive`."""


class DeviceThread(Generic[PayloadT]):
    """A device in a thread of its own, and one more where batches overlap: they never wait for anything but work.

    Should a thread end by an error (the model's own are answered, this is something else), `on_death` is called.
    """

    def __init__(
        self, device: Device[PayloadT], name: str = "device", on_death: Callable[[], None] = ignore_death
    ) -> None:
        self._device = device
        self._name = name
        self._on_death = on_death
        self._clock = device.clock
        self._wake = threading.Condition(device.lock)
        self._stopping = False
        self._started = False
        self._threads = [self._new_thread(name)]
        device.on_room = self._wake.notify

    def start(self) -> None:
        """Begin to take work."""
        with self._wake:
            self._started = True
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Finish the running batches and end; what is queued stays queued."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def is_alive(self) -> bool:
        """Whether the device still takes work."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, next_block: int, members: Sequence[Member[PayloadT]], fallback: Sequence[Split] = ()) -> None:
        """Queue members, as `BatchEngine.submit`; raises PlanError where no split holds the block."""
        with self._wake:
            self._device.engine.submit(next_block, members, self._clock.now_s(), fallback)
            self._wake.notify()

    def follow(
        self,
        splits: Sequence[Split],
        dispatch: Dispatch,
        policy: Any,
        order: OrderSpec = DEFAULT,
        entry: int | None = None,
    ) -> None:
        """Host other splits, and decide by another policy and order, from the next batch on; see `BatchEngine.follow`.

        The first that let batches overlap bring the second thread, which then stays.
        """
        with self._wake:
            self._device.engine.follow(splits, dispatch, order, entry)
            self._device.runner.follow(policy)
            if any(split.overlap_below is not None for split in splits):
                self._add_thread()
            self._wake.notify()

    def admit(self, wire: WirePiece, members: list[Member[PayloadT]]) -> list[Member[PayloadT]]:
        """Whom the network takes of a call's inputs; the others are released, lost: see `Memory.admit`."""
        return self._device.admit(wire, members)

    def end(self, sequences: Collection[int]) -> None:
        """Sequences are over; see `Device.end`."""
        self._device.end(sequences)

    def forget(self, origin: object) -> int:
        """Throw out the queued members of an origin; how many there were."""
        with self._wake:
            return self._device.engine.forget(origin)

    def _new_thread(self, name: str) -> threading.Thread:
        return threading.Thread(target=self._loop, name=name, daemon=True)

    def _add_thread(self) -> None:
        if len(self._threads) < MOST_BATCHES and not self._stopping:
            self._threads.append(self._new_thread(f"{self._name}-beside"))
            if self._started:
                self._threads[-1].start()

    def _loop(self) -> None:
        try:
            self._work()
        except BaseException:
            logger.exception("the device thread ends")
            self._on_death()
            raise

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            coming_back = self._device.run(batch)
            with self._wake:
                self._device.requeue(coming_back)

    def _next(self) -> Batch[PayloadT] | None:
        with self._wake:
            while not self._stopping:
                found = self._device.start_next()
                if isinstance(found, Batch):
                    if self._device.may_begin:  # a batch so small that another may begin beside it at once
                        self._wake.notify()
                    return found
                self._wake.wait(None if found is None else max(0.0, found - self._clock.now_s()))
        return None
