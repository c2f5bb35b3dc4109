"""Fixtures that the tests of this folder share: a small text model, and one Ray."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.end_to_end.one_ray import URL, OneRay
from tests.end_to_end.tiny_service import Tiny, make_tiny, text_service


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def one_ray(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRay]:
    one_ray = OneRay(tmp_path_factory.mktemp("one_ray"), text_service(tiny))
    yield one_ray
    one_ray.end()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=URL, timeout=60.0) as client:
        yield client
