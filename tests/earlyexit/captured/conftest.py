from __future__ import annotations

import pytest

from earlyexit.model import EarlyExitModel
from tests.earlyexit.models import small


@pytest.fixture
def small_model() -> EarlyExitModel:
    return small()
