"""Every running replica of a deployment, asked at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

ANSWER_S = 4.0
"""Less than the page waits before it says that it has no news."""

logger = logging.getLogger(f"ray.serve.{__name__}")


class Everyone:
    """Of one application, asked from inside one of its replicas."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    async def ask(self, deployment: str, method: str) -> list[Any] | None:
        """What each says; nothing where none runs, None where one that runs does not answer."""
        if deployment not in self._handles:  # in a thread, because making a handle waits for Serve
            self._handles[deployment] = await asyncio.to_thread(serve.get_deployment_handle, deployment, self._app)
        try:
            answers = await self._handles[deployment].broadcast(method).results_async(timeout_s=ANSWER_S)
        except DeploymentUnavailableError:
            return []
        except (TimeoutError, RayError) as error:
            logger.warning("the live page misses %s: %r", deployment, error)
            return None
        return list(answers)
