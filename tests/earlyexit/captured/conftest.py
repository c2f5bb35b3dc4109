from __future__ import annotations

import pytest

from earlyexit.network.model import EarlyExitModel
from tests.earlyexit.models import small


@pytest.fixture
def small_model() -> EarlyExitModel:
    return small()
