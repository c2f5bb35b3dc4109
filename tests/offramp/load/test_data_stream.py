from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from offramp.load.data_stream import stream_lines, stream_texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", '\ufefftext,label\n"a, b",x\nc,y\n\n'),
        ("t.tsv", "label\ttext\nx\ta, b\ny\tc\n"),
        ("t.jsonl", '{"text": "a, b", "label": 1}\n{"text": "c"}\n'),
        ("t.txt", "a, b\n\nc\n"),
    ],
)
def test_texts_are_read_by_the_files_ending_without_their_labels(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert list(stream_texts(tmp_path / name, ["text"])) == [("a, b",), ("c",)]


def test_parts_and_columns_are_named_and_no_more_lines_are_taken_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train": [["a", "x"]], "val": [["b", "y"]]}', encoding="utf-8")
    assert list(stream_texts(tmp_path / "c.json", ["text"], part="val")) == [("b",)]
    (tmp_path / "t.csv").write_text("id,body\n1,a\n", encoding="utf-8")
    assert list(stream_texts(tmp_path / "t.csv", ["body"])) == [("a",)]
    lines = iter(["a\n", "b\r\n", "c\n"])
    assert list(islice(stream_lines(lines, "pipe"), 2)) == ["a", "b"]
    assert list(lines) == ["c\n"]
