"""ONNX models that lie in installed packages, which nobody here wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.networks.sites import LIGHT, PACKAGED, located

__all__ = ["LIGHT", "PACKAGED", "model_file"]


def model_file(name: str) -> Path:
    """Where a model lies; skips the test where its package is not installed."""
    path = located(name)
    if path is None:
        pytest.skip(f"the package of {name} is not installed")
    return path
