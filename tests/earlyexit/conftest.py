from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

settings.register_profile("on a shared machine", deadline=None)
settings.load_profile("on a shared machine")


@pytest.fixture
def small_model() -> EarlyExitModel:
    """Four blocks, ramps after 0, 1 and 2, three labels, random weights; new for every test."""
    return small()


@pytest.fixture(scope="session")
def encoded() -> list[Encoded]:
    """Twenty-four inputs of 2 to 20 tokens."""
    rng = np.random.default_rng(7)
    return random_inputs(rng, rng.integers(2, 21, size=24).tolist(), least=1)
