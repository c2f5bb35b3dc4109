"""numba's compiler, typed: a kernel keeps its signature, and its machine code is kept on disk between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """The kernel as machine code, made at its first call; other threads run meanwhile, and x/0 is infinite.

    The kept code is renewed when the kernel's own file changes, not when a kernel of another file that it calls does.
    """
    return cast("Callable[P, R]", njit(cache=True, nogil=True, error_model="numpy")(kernel))
