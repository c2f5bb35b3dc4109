"""Files of arrays: .npz by name, .npy of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file, by name; the one of a .npy file has the name ''. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            return {name: loaded[name] for name in loaded.files}
    # Zip, zlib and numpy's reader of array headers each fail in ways of their own, not all of them documented.
    except Exception as error:
        raise DataError(f"{path}: no file of arrays: {error}") from error
