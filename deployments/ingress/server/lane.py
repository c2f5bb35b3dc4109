"""Paths that go straight to their applications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.ingress.server.exchange import App


@dataclass(frozen=True, slots=True)
class LanePath:
    """A path that goes straight to its application, past everything that stands before the others."""

    app: App
    scope: Mapping[str, Any]
    """What routing would have found: `path`, `root_path`, `path_params`."""


Lane = Mapping[bytes, LanePath]
"""By path as it is sent; POST only."""
