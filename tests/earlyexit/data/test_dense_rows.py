from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from earlyexit.codecs.image import ORIENTATION, ImageCodec, ImageSize
from earlyexit.data.rows import fitted, read_labelled
from earlyexit.errors import DataError
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask
from tests.earlyexit.data.dense_data import CLASSES, JOINTS, write_image, write_poses, write_scenes

POSE = PoseTask(JOINTS, heatmap_side=8, image_side=32, tolerance=3)
SCENES = SegmentationTask(CLASSES, height=24, width=32, ignored=["Unlabelled"])


def test_joints_are_read_in_the_order_of_the_first_image(tmp_path: Path) -> None:
    table = write_poses(tmp_path / "set")
    rows = read_labelled(tmp_path / "set", joints=table, part="train")
    assert len(rows) == 6
    assert rows.part_names == JOINTS
    assert rows.label_names == ()
    targets = rows.targets(POSE, ImageCodec(32, 32))
    assert targets.shape == (6, 3, 2)
    assert np.isnan(targets[0, 2]).all()
    assert np.isnan(targets).any((1, 2)).tolist() == [True, False, False, True, False, False]
    image = np.asarray(Image.open(tmp_path / "set/train/im1.png"))
    for joint, (x, y) in enumerate(targets[1].astype(int)):
        assert image[y, x, joint] == 255


def test_joints_go_along_where_an_image_is_brought_to_another_size(tmp_path: Path) -> None:
    table = write_poses(tmp_path / "set", width=64, height=48)
    rows = read_labelled(tmp_path / "set", joints=table)
    targets = rows.targets(POSE, ImageCodec(32, 32))
    x, y = rows.labels[1][0]
    assert targets[1, 0].tolist() == pytest.approx([(x + 0.5) / 2 - 0.5, (y + 0.5) * 32 / 48 - 0.5])


def test_joints_that_are_cut_off_are_not_seen() -> None:
    """Of 64 x 32 pixels the middle 32 x 32 are kept."""
    size = ImageSize(height=32, width=32, shortest_edge=32)
    found = fitted(np.array([[15, 3], [16, 3], [47, 31], [48, 31]], dtype=np.float32), (64, 32), size)
    assert np.isnan(found[[0, 3]]).all()
    assert found[[1, 2]].tolist() == [[0, 3], [31, 31]]


def test_maps_of_classes_are_those_of_the_images_names(tmp_path: Path) -> None:
    table = write_scenes(tmp_path / "set")
    rows = read_labelled(tmp_path / "set", classes=table, part="train")
    assert rows.part_names == CLASSES
    targets = rows.targets(SCENES, ImageCodec(24, 32))
    assert targets.shape == (4, 24, 32)
    for k, classes in enumerate(targets):
        image = np.asarray(Image.open(tmp_path / f"set/train/image/im{k}.png"))
        assert ((image[..., 0] < 100) == (classes == 1)).all()


def test_maps_are_told_apart_by_the_folders_they_lie_in(tmp_path: Path) -> None:
    table = write_scenes(tmp_path / "set")
    for scene, known in (("s1", 0), ("s2", 1)):
        write_image(tmp_path / f"set/seq/image/{scene}/1.png", np.zeros((24, 32, 3), np.uint8))
        write_image(tmp_path / f"set/seq/label/{scene}/1.png", np.full((24, 32), known, np.uint8))
    rows = read_labelled(tmp_path / "set", classes=table, part="seq")
    assert rows.targets(SCENES, ImageCodec(24, 32))[:, 0, 0].tolist() == [0, 1]


CROPPED = ImageCodec(16, 24, shortest_edge=30, interpolation="nearest")
"""Of 24 x 32 pixels less than the middle third is kept."""


def test_maps_are_cut_as_their_images_are(tmp_path: Path) -> None:
    table = write_scenes(tmp_path / "set")
    rng = np.random.default_rng(0)
    for k in range(4):
        classes = rng.integers(0, 3, (24, 32), dtype=np.uint8)
        write_image(tmp_path / f"set/train/label/im{k}.png", classes)
        write_image(tmp_path / f"set/train/image/im{k}.png", np.repeat(classes[..., None], 3, 2))
    rows = read_labelled(tmp_path / "set", classes=table, part="train")
    seen = [np.asarray(each.tensors[0])[0, ..., 0] for each in rows.encode(CROPPED)]
    targets = rows.targets(SegmentationTask(CLASSES, height=16, width=24), CROPPED)
    assert targets.tolist() == np.stack(seen).tolist()


def write_turned(path: Path, pixels: np.ndarray) -> None:
    """As a camera does that is held sideways: to be seen turned right by 90 degrees."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, exif=exif)


def test_joints_are_places_in_the_upright_image(tmp_path: Path) -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[3, 35] = 255
    write_turned(tmp_path / "set/a.png", pixels)
    table = tmp_path / "joints.csv"
    table.write_text("image,joint,x,y,visible\na.png,neck,16,35,1\n", encoding="utf-8")
    rows = read_labelled(tmp_path / "set", joints=table)
    codec = ImageCodec(40, 20)
    (x, y), image = rows.labels[0][0].astype(int), np.asarray(rows.encode(codec)[0].tensors[0])[0]
    assert image[y, x].tolist() == [255] * 3
    assert fitted(rows.labels[0], (rows.sides or ())[0], codec.size).tolist() == [[16, 35]]
    table.write_text("image,joint,x,y,visible\na.png,neck,35,3,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"joint 'neck' at \(35, 3\) is outside its image of 20 x 40 pixels"):
        read_labelled(tmp_path / "set", joints=table)


def test_rows_are_divided_and_picked_with_their_answers(tmp_path: Path) -> None:
    table = write_poses(tmp_path / "set")
    rows = read_labelled(tmp_path / "set", joints=table)
    kept, held = rows.divide(1 / 3, seed=0)
    assert (len(kept), len(held)) == (4, 2)
    assert kept.sides == ((32, 32),) * 4
    last = rows.select([5])
    assert last.labels[0] is rows.labels[5]
