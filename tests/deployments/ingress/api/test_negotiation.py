from __future__ import annotations

import pytest

from deployments.api.endpoint import preferred, takes_gzip

JSON, PNG = "application/json", "image/png"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param("", JSON, id="nothing"),
        pytest.param("*/*", JSON, id="anything"),
        pytest.param("application/json", JSON, id="JSON"),
        pytest.param("image/png", PNG, id="PNG"),
        pytest.param("Image/PNG", PNG, id="large-letters"),
        pytest.param("image/*", PNG, id="any-image"),
        pytest.param("image/png, application/json", JSON, id="as-much-of-both"),
        pytest.param("image/png;q=0.9, application/json;q=0.8", PNG, id="weights"),
        pytest.param("image/avif,image/webp,image/png,image/*;q=0.8,*/*;q=0.5", PNG, id="a-browsers-images"),
        pytest.param("text/html,application/xml;q=0.9,*/*;q=0.8", JSON, id="a-browsers-pages"),
        pytest.param("*/*, application/json;q=0", PNG, id="anything-but-JSON"),
        pytest.param("application/json;charset=utf-8", JSON, id="other-parameters"),
        pytest.param("image/png;q=much, application/json;q=0.1", JSON, id="no-weight"),
        pytest.param("text/html", None, id="neither"),
        pytest.param("image/jpeg, image/png;q=0", None, id="refused"),
        pytest.param("image/png;q=2", None, id="a-weight-above-1"),
        pytest.param(";,;q=", None, id="noise"),
    ],
)
def test_a_caller_gets_what_it_likes_best_of_what_there_is(accept: str, content_type: str | None) -> None:
    assert preferred(accept, (JSON, PNG)) == content_type


@pytest.mark.parametrize(
    ("accept_encoding", "takes"),
    [
        ("", False),
        ("identity", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0, *", False),
        ("deflate, br, zstd", False),
    ],
)
def test_answers_are_compressed_for_clients_that_say_so(accept_encoding: str, takes: bool) -> None:
    assert takes_gzip(accept_encoding) == takes
