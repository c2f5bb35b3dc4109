from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from earlyexit.tasks.checks import to_png
from offramp.client.protocol import Prediction
from offramp.commands.predict import MapFiles, Row, is_png, with_files

MAP = np.array([[0, 1], [2, 1]], dtype=np.uint8)
CONTENT = base64.b64encode(to_png(MAP, 3)).decode()


def test_a_picture_becomes_a_file_named_after_its_image_and_none_is_written_over(tmp_path: Path) -> None:
    maps = MapFiles(tmp_path / "maps")
    said = maps.put("street/a.jpg", {"class_map": CONTENT, "score": 0.5, "note": "PNG"})
    assert said == {"class_map": str(tmp_path / "maps/a.png"), "score": 0.5, "note": "PNG"}
    assert np.asarray(Image.open(tmp_path / "maps/a.png")).tolist() == MAP.tolist()
    (tmp_path / "a.png").write_bytes(b"a photo")
    maps = MapFiles(tmp_path)
    paths = [maps.put(image, {"class_map": CONTENT})["class_map"] for image in ("1/a.jpg", "2/a.png", "b.jpg")]
    paths.append(MapFiles(tmp_path).put("elsewhere/a.jpg", {"class_map": CONTENT})["class_map"])
    assert [Path(path).name for path in paths] == ["a-2.png", "a-3.png", "b.png", "a-4.png"]
    assert (tmp_path / "a.png").read_bytes() == b"a photo"


def test_rows_of_a_run_name_the_files_and_those_that_failed_have_none(tmp_path: Path) -> None:
    rows: list[Row] = []
    write = with_files(rows.append, MapFiles(tmp_path))
    write(Row(shown={"image": "a.jpg"}, prediction=Prediction(exit=2, request_id="r", class_map=CONTENT, score=0.5)))
    write(Row(shown={"image": "b.jpg"}, error="no image"))
    assert [row.to_json() for row in rows] == [
        {"image": "a.jpg", "class_map": str(tmp_path / "a.png"), "score": 0.5, "exit": 2},
        {"image": "b.jpg", "error": "no image"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("value", ["", "bill", "iVBORw0K", 3, None, io.BytesIO()])
def test_only_png_files_in_base64_are_taken_for_them(value: object) -> None:
    assert not is_png(value)
    assert is_png(CONTENT)
