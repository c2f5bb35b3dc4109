from __future__ import annotations

import pytest

from tests.deployments.ingress.api.faces import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()
