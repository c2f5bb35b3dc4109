"""numba's compiler, typed: a kernel keeps its signature, and its machine code is kept on disk between processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from numba import config, njit

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """The kernel as machine code, made at its first call; other threads run meanwhile, and x/0 is infinite.

    numba renews kept code when the kernel's own file changes, but not when a kernel of another file that it calls does.
    So it is kept in a folder named for all of the planner's sources that hold kernels.
    """
    before = config.CACHE_DIR  # type: ignore[attr-defined]  # set from the environment when numba is imported
    config.CACHE_DIR = str(  # type: ignore[attr-defined]  # as above
        Path(before or Path(__file__).parent / "__pycache__") / f"kernels-{_fingerprint()}"
    )
    try:
        made = njit(cache=True, nogil=True, error_model="numpy")(kernel)
    except RuntimeError:  # neither this folder nor the user's can be written
        _say_that_nothing_is_kept()
        made = njit(nogil=True, error_model="numpy")(kernel)
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]  # as above
    return cast("Callable[P, R]", made)


def inlined(kernel: Callable[P, R]) -> Callable[P, R]:
    """The same, written into the kernels that call it: a call that passes many arrays costs as much as a short loop."""
    return cast("Callable[P, R]", njit(inline="always", error_model="numpy")(kernel))


@cache
def _fingerprint() -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return sha256(b"".join(each for each in sources if b"optimizer.compiled import" in each)).hexdigest()[:16]


@cache
def _say_that_nothing_is_kept() -> None:
    logger.warning("the planner is compiled anew in every process: NUMBA_CACHE_DIR names no folder to keep its code in")
