"""A typed wrapper of numba's compiler, with a cache of machine code on disk; and what several kernels share: labels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
from numba import config, njit

from profiles.scores import FloatArray, IntArray

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """Compiles a kernel at its first call. The kernel releases the GIL, and a division by zero returns infinity."""
    before = config.CACHE_DIR  # type: ignore[attr-defined]  # set from the environment when numba is imported
    config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]  # as above
    try:
        dispatcher = njit(cache=True, nogil=True, error_model="numpy")(kernel)
    except RuntimeError:  # neither this folder nor the user's cache folder is writable
        _warn_without_cache()
        dispatcher = njit(nogil=True, error_model="numpy")(kernel)
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]  # as above
    return cast("Callable[P, R]", dispatcher)


@cache
def cache_folder() -> Path:
    """Returns the folder of the machine code: its name is a hash of all sources of the planner that define kernels.

    numba recompiles a cached kernel if its own file changes, but not if a kernel that it calls changes in another file.
    """
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    digest = sha256(b"".join(each for each in sources if b"optimizer.search.compiled import" in each)).hexdigest()
    above = config.CACHE_DIR or Path(__file__).parent / "__pycache__"  # type: ignore[attr-defined]  # as below
    return Path(above) / f"kernels-{digest[:16]}"


@cache
def _warn_without_cache() -> None:
    logger.warning("the planner is compiled anew in every process: set NUMBA_CACHE_DIR to a writable folder")


class Labels(NamedTuple):
    """The labels of a search (L), followed by unused rows. Each search defines its own columns."""

    int_LI: IntArray
    float_LF: FloatArray


@compiled
def with_doubled_capacity(labels: Labels) -> Labels:
    """Returns a copy of the labels with room for twice as many."""
    int_LI, float_LF = labels
    return Labels(np.concatenate((int_LI, np.empty_like(int_LI))), np.concatenate((float_LF, np.empty_like(float_LF))))


@compiled
def dominates(figures_LF: FloatArray, one: int, other: int, first: int, end: int, rounding: float) -> bool:
    """Returns whether row `one` is at most row `other` in columns `first` to `end` - 1; equal rows dominate."""
    for column in range(first, end):  # noqa: SIM110 - kernels have no generators
        if figures_LF[one, column] > figures_LF[other, column] * (1 + rounding):
            return False
    return True
