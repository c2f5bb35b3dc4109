"""What kills a part of a running service, and watches what becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from experiments.live.meter import replica_pids
from experiments.live.service import Service

LOOK_S = 0.25
ASK_S = 5.0
WATCHED_S = 60.0
"""How long a dead controller is waited for."""

Kill = Callable[[Service], Awaitable[dict[str, Any]]]
"""Kills something, and tells what became of it."""


async def kill_controller(service: Service) -> dict[str, Any]:
    """Until it answers again, and until it has decided something again."""
    pids = replica_pids(service.app)["controller"]
    killed_s = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    answers_s = plans_s = None
    while time.monotonic() - killed_s < WATCHED_S and plans_s is None:
        await asyncio.sleep(LOOK_S)
        try:
            description = await service.describe(timeout_s=ASK_S)
        except Exception:  # whatever a dead controller's caller gets; the next look is soon
            continue
        answers_s = answers_s or time.monotonic() - killed_s
        if description["forecast"] is not None:  # a controller that has just started has none until it plans
            plans_s = time.monotonic() - killed_s
    return {"killed": pids, "answers_again_s": answers_s, "plans_again_s": plans_s}


async def kill_one_of_each_stage(service: Service) -> dict[str, Any]:
    """The first process of every slot that the plan uses."""
    pids = replica_pids(service.app)
    killed = {slot: pids[slot][0] for slot in (await service.current())["slots"]}
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    return {"killed": killed}
