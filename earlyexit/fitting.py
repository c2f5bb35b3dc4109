"""Numbers as a model's datatype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.signature import DATATYPES

Array = npt.NDArray[Any]


def fitting(column: Array, datatype: str) -> Array:
    """Whole numbers of any type as another that holds all of them; other numbers as one of their own kind.

    Raises ValueError where the datatype holds other kinds of numbers or not all of these.
    """
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if column.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        outside = [int(end) for end in _ends(column) if not limits.min <= int(end) <= limits.max]
        if outside:
            raise ValueError(f"{datatype} holds {limits.min} to {limits.max}, not {outside[0]}")
    elif not np.can_cast(column.dtype, dtype, "same_kind"):
        raise ValueError(f"{column.dtype.name} is no {datatype}")
    return column.astype(dtype, copy=False)


def _ends(column: Array) -> tuple[Any, ...]:
    return (column.min(), column.max()) if column.size else ()
