from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offramp.client.protocol import Prediction
from offramp.commands.predict import _told

PNG = "iVBORw0KGgo" + "A" * 89


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"label": "bill"}, "bill"),
        ({"value": 1.23456}, "1.235"),
        ({"keypoints": [{"joint": "head", "x": 5.5, "y": 9.25, "score": 0.5}]}, "head 5.5 9.25 0.5"),
        (
            {"class_map": PNG, "classes": [{"id": 2, "name": "sky", "share": 0.75, "colour": "#000000"}]},
            "a PNG file of 75 bytes, sky 75.0%",
        ),
        ({"embedding": np.zeros((2, 3), dtype=np.float32)}, "float32 [2, 3]"),
        ({"embedding": [0.5, 1.0]}, "0.5, 1"),
    ],
    ids=["label", "number", "keypoints", "class-map", "array", "list"],
)
def test_a_line_of_the_terminal_says_what_there_is_room_for(said: dict[str, Any], words: str) -> None:
    found = Prediction(exit=3, request_id="r", score=0.5, **said)
    assert _told(found.said, found) == f"{words}  (score 0.500, left after block 3)"
