from __future__ import annotations

import httpx
import pytest

from deployments.local_ray.applications import RayDashboard
from earlyexit.errors import OfframpError


def answering(status: int, content: bytes = b"") -> RayDashboard:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    return RayDashboard("http://ray:8265/", transport)


async def test_an_answer_is_its_json_or_nothing() -> None:
    assert await answering(200, b'{"a": 1}').ask("GET", "/x") == {"a": 1}
    assert await answering(200).ask("PUT", "/x", {}) is None


async def test_a_refusal_is_an_error_with_the_dashboards_words() -> None:
    with pytest.raises(OfframpError, match="dashboard says 400: no such slot"):
        await answering(400, b"no such slot").ask("POST", "/x")


async def test_a_dashboard_that_is_not_there_is_named() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(OfframpError, match="dashboard at http://ray:8265 cannot be reached"):
        await RayDashboard("http://ray:8265/", httpx.MockTransport(gone)).ask("GET", "/x")
