"""Files of a JSON header and numpy arrays (.npz), checked as they are read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from earlyexit.source_file import Source, StrictDocument

Header = TypeVar("Header", bound=StrictDocument)


def write_npz(path: Path, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
    """One compressed file; arrays that are None are left out."""
    there: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    with path.open("wb") as file:  # given a path, numpy adds an ending to it
        np.savez_compressed(file, header=np.array(json.dumps(header)), **there)


def read_npz(
    path: Path,
    shape: type[Header],
    kinds: Mapping[int, Mapping[str, str]],
    *,
    called: str,
    optional: Collection[str] = (),
) -> tuple[Header, dict[str, npt.NDArray[Any]]]:
    """The header of an .npz file, checked, and its other arrays.

    `kinds`: by schema, for every array the letters of `numpy.dtype.kind` that it may have. Raises DataError, naming
    the file, for whatever else is in it, and for arrays that are missing unless they are `optional`.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            document = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in file.files if name != "header"}
    # Zip, zlib, numpy's reader of array headers and JSON each fail in ways of their own, not all of them documented.
    except Exception as error:
        raise DataError(f"{path} does not hold {called}: {error}") from error
    schema: Any = document.get("schema_version") if isinstance(document, dict) else max(kinds)
    if schema not in kinds:
        raise DataError(f"{path} has schema {schema}, this version reads {', '.join(map(str, kinds))}")
    source = Source(document=document, where=f"{path} does not hold {called}: header", raises=DataError)
    header = source.parse(shape, called="all of it")
    missing = sorted(set(kinds[schema]) - set(optional) - set(arrays))
    if missing:
        raise DataError(f"{path} does not hold {called}: no array {missing[0]!r}")
    for name, array in arrays.items():
        if array.dtype.kind not in kinds[schema].get(name, ""):
            raise DataError(f"{path} does not hold {called}: no array {name!r} of {array.dtype} belongs there")
    return header, arrays
