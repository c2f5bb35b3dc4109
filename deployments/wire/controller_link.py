"""The link to an application's controller."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from deployments.local_ray.private import DeploymentHandles
from earlyexit.errors import ControllerUnavailableError

CONTROLLER = "controller"
"""The deployment's name."""
STARTUP_TIMEOUT_S = 2.0
"""Timeout in seconds of a starting process's request for the plan. Afterwards it follows the plan of its settings."""
CALL_TIMEOUT_S = 5.0
"""Timeout in seconds of any other call to the controller."""

logger = logging.getLogger(f"ray.serve.{__name__}")


class ControllerLink(DeploymentHandles):
    """Calls the controller of an application from its other processes."""

    async def ask_at_startup(self, method: str) -> Any:
        """Returns the controller's answer, or None if it does not answer a starting process in time."""
        try:
            return await self.ask(method, timeout_s=STARTUP_TIMEOUT_S)
        except ControllerUnavailableError as error:
            logger.warning("%s; the plan of the settings is followed", error)
            return None

    async def ask(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Returns the answer of a method of `Controller`; raises ControllerUnavailableError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(await self.handle(CONTROLLER), method).remote(*arguments)
        except Exception as error:  # Ray raises many kinds; the service runs without a controller
            message = f"the controller does not answer: {str(error) or type(error).__name__}"
            raise ControllerUnavailableError(message, retry_after_s=CALL_TIMEOUT_S) from error


def apply_plan(app: str, plan_document: dict[str, Any], *, hold: bool, timeout_s: float) -> int:
    """Calls `Controller.apply` from the process that started the service, and returns the plan's epoch."""
    from ray import serve

    handle: Any = serve.get_deployment_handle(CONTROLLER, app)
    if not handle.is_initialized:  # the throughput switches would run the handle's router on the caller's event loop
        handle._init(_run_router_in_separate_loop=True)
    return int(handle.apply.remote(plan_document, hold).result(timeout_s=timeout_s))
