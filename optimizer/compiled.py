"""numba's compiler, typed: a kernel keeps its signature, and its machine code is kept on disk between processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar, cast

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """The kernel as machine code, made at its first call; other threads run meanwhile, and x/0 is infinite.

    The kept code is renewed when the kernel's own file changes, not when a kernel of another file that it calls does.
    """
    try:
        made = njit(cache=True, nogil=True, error_model="numpy")(kernel)
    except RuntimeError:  # neither this folder nor the user's can be written
        _say_that_nothing_is_kept()
        made = njit(nogil=True, error_model="numpy")(kernel)
    return cast("Callable[P, R]", made)


@cache
def _say_that_nothing_is_kept() -> None:
    logger.warning("the planner is compiled anew in every process: NUMBA_CACHE_DIR names no folder to keep its code in")
