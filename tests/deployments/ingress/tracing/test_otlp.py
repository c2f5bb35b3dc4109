from __future__ import annotations

import pytest

from deployments.ingress.tracing.otlp import traces_url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (None, None),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp/traces", "https://host/otlp/traces"),
    ],
    ids=["the SDK's", "a collector", "with a slash", "with a path"],
)
def test_spans_go_to_the_path_that_an_endpoint_names_or_the_usual_one(endpoint: str | None, url: str | None) -> None:
    assert traces_url(endpoint) == url
