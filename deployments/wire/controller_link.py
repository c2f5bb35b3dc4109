"""Calls to an application's deployments through Serve's handles, and the link to its controller."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from earlyexit.errors import ControllerUnavailableError

CONTROLLER = "controller"
"""The deployment's name."""
PULL_S = 2.0
"""How long an ingress that starts waits for the present plan before it goes by its settings'."""
ASK_S = 5.0
"""Timeout in seconds of a request for the plan."""
ANSWER_S = 4.0
"""Timeout in seconds; less than the live page waits before it reports that there is no news."""

logger = logging.getLogger(f"ray.serve.{__name__}")


def find_deployment(name: str, app: str) -> Any:
    """Returns a deployment's handle, whether it runs or not."""
    from ray import serve

    return serve.get_deployment_handle(name, app)


class Handles:
    """Calls the replicas of one application's deployments, from inside one of them."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handles: dict[str, Any] = {}

    async def of(self, deployment: str) -> Any:
        """Returns a deployment's handle, which is made in a thread, because that waits for Serve."""
        if deployment not in self._handles:
            self._handles[deployment] = await asyncio.to_thread(find_deployment, deployment, self._app)
        return self._handles[deployment]

    async def tell(self, deployment: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Returns what every replica answers: nothing if none runs. Raises TimeoutError, and whatever Ray raises."""
        from ray.serve.exceptions import DeploymentUnavailableError

        handle = await self.of(deployment)
        try:
            return list(await handle.broadcast(method, *arguments).results_async(timeout_s=timeout_s))
        except DeploymentUnavailableError:
            return []

    async def ask(self, deployment: str, method: str, timeout_s: float = ANSWER_S) -> list[Any] | None:
        """Returns what every replica answers, or None, with a warning, if one of them does not answer."""
        from ray.exceptions import RayError

        try:
            return await self.tell(deployment, method, timeout_s=timeout_s)
        except (TimeoutError, RayError) as error:
            logger.warning("%s of %s is missing: %r", method, deployment, error)
            return None


class ControllerLink(Handles):
    """Calls the controller of an application."""

    async def current(self) -> dict[str, Any] | None:
        """Returns the placed plan in force as a document; None if there is none, or no controller."""
        document: dict[str, Any] | None = await self._pull("current")
        return document

    async def coming(self) -> list[dict[str, Any]]:
        """Returns the placed plans that a replica which starts now may serve, the coming one first; may be empty."""
        return await self._pull("coming") or []

    async def describe(self) -> dict[str, Any]:
        """Returns its description of the plan in force; raises ControllerUnavailableError."""
        described: dict[str, Any] = await self._call("describe")
        return described

    async def history(self, limit: int) -> list[dict[str, Any]]:
        """Returns its plans so far; raises ControllerUnavailableError."""
        plans: list[dict[str, Any]] = await self._call("history", limit)
        return plans

    async def _pull(self, method: str) -> Any:
        """Returns what the controller says to a process that starts; None if it does not answer."""
        try:
            return await self._call(method, timeout_s=PULL_S)
        except ControllerUnavailableError as error:
            logger.warning("%s; the settings' plan is followed", error)
            return None

    async def _call(self, method: str, *arguments: object, timeout_s: float = ASK_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(await self.of(CONTROLLER), method).remote(*arguments)
        except Exception as error:  # whatever it is: the service does without
            message = f"the controller does not answer: {str(error) or type(error).__name__}"
            raise ControllerUnavailableError(message, retry_after_s=ASK_S) from error


def ask_controller(app: str, method: str, *arguments: Any, timeout_s: float) -> dict[str, Any]:
    """Calls a controller's method from the process that started the service; returns {} where it answers nothing."""
    handle = find_deployment(CONTROLLER, app)
    if not handle.is_initialized:  # Serve keeps handles; its throughput switches would have them on the caller's loop
        handle._init(_run_router_in_separate_loop=True)
    return getattr(handle, method).remote(*arguments).result(timeout_s=timeout_s) or {}
