from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from deployments.wire.controller_link import ControllerLink
from earlyexit.errors import ControllerUnavailableError


class Method:
    """A remote method of a deployment's handle; its reply is awaited."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def remote(self, *arguments: object) -> Awaitable[Any]:
        async def answer() -> Any:
            if self._reply == "never":
                await asyncio.Event().wait()
            if isinstance(self._reply, Exception):
                raise self._reply
            return [self._reply, *arguments] if arguments else self._reply

        return answer()


class Handle:
    """A controller that replies the same to everything."""

    def __init__(self, reply: Any) -> None:
        self.current = self.coming = self.describe = self.history = Method(reply)


def link(reply: Any) -> ControllerLink:
    def find(name: str, app: str) -> Handle:
        assert (name, app) == ("controller", "offramp")
        return Handle(reply)

    return ControllerLink("offramp", find, pull_s=0.01)


async def test_a_controller_is_asked_by_its_name() -> None:
    assert await link({"plan": 1}).current() == {"plan": 1}
    assert await link([{"plan": 2}, {"plan": 1}]).coming() == [{"plan": 2}, {"plan": 1}]
    assert await link({"epoch": 1}).describe() == {"epoch": 1}
    assert await link("row").history(3) == ["row", 3]


@pytest.mark.parametrize("reply", ["never", ConnectionError("died")], ids=["mute", "dead"])
async def test_an_ingress_that_starts_does_without_a_controller_that_is_gone(reply: Any) -> None:
    assert await link(reply).current() is None
    assert await link(reply).coming() == []


async def test_a_controller_that_is_gone_is_said_to_be() -> None:
    for error, words in ((ConnectionError("died"), "died"), (TimeoutError(), "TimeoutError")):
        with pytest.raises(ControllerUnavailableError, match=f"the controller does not answer: {words}"):
            await link(error).describe()
