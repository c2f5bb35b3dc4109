"""Calls to an application's deployments through Serve's handles, and the link to its controller."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from deployments.local_ray.private import ask_replicas
from earlyexit.errors import ControllerUnavailableError, OfframpError

CONTROLLER = "controller"
"""The deployment's name."""
STARTUP_TIMEOUT_S = 2.0
"""Timeout in seconds of a starting process's request for the plan. Afterwards it follows the plan of its settings."""
CALL_TIMEOUT_S = 5.0
"""Timeout in seconds of any other call to the controller."""
ANSWER_S = 4.0
"""Timeout in seconds of a broadcast, shorter than the live page's timeout for an update."""

logger = logging.getLogger(f"ray.serve.{__name__}")


class DeploymentHandles:
    """Calls the replicas of one application's deployments, from inside one of them."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handles: dict[str, Any] = {}

    async def handle(self, deployment: str) -> Any:
        """Returns a deployment's handle. It is created in a thread, because that blocks until Serve answers."""
        if deployment not in self._handles:
            from ray import serve

            self._handles[deployment] = await asyncio.to_thread(serve.get_deployment_handle, deployment, self._app)
        return self._handles[deployment]

    async def broadcast(self, deployment: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Returns each replica's answer, none if no replica runs. Raises OfframpError if a replica does not answer."""
        answers = await ask_replicas(await self.handle(deployment), method, *arguments, timeout_s=timeout_s)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise OfframpError(f"{method} failed on a replica of {deployment}: {answer!r}") from answer
        return answers

    async def try_broadcast(self, deployment: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """Returns each replica's answer, None for one without an answer, and one None if Serve names no replicas."""
        try:
            answers = await ask_replicas(await self.handle(deployment), method, *args, timeout_s=timeout_s)
        except Exception as error:  # Ray raises many kinds
            answers = [error]
        for failure in (each for each in answers if isinstance(each, BaseException)):
            logger.warning("the call of %s on %s failed: %r", method, deployment, failure)
        return [None if isinstance(each, BaseException) else each for each in answers]


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
