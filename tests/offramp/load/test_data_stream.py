from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from earlyexit.errors import DataError
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


def test_a_list_of_a_clinc150_file_is_named_by_part(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train": [["a", "x"]], "val": [["b", "y"]]}', encoding="utf-8")
    assert list(stream_texts(tmp_path / "c.json", ["text"], part="val")) == [("b",)]


def test_another_column_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,body\n1,a\n", encoding="utf-8")
    assert list(stream_texts(tmp_path / "t.csv", ["body"])) == [("a",)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"id,body\n1,a\n", "no column 'text'; there are id, body"),
        ("t.csv", b"text,label\na,x\nb\n", "t.csv:3: the row does not have 2 columns"),
        ("t.jsonl", b'{"text": "a"}\n{"text": 5}\n', "t.jsonl:2: 'text' is not a string"),
        ("t.csv", b"text\na\n\xff\n", "t.csv:3: not UTF-8"),
        ("t.jsonl", b'{"text": "a"}\n{"te', "t.jsonl:2: not JSON"),
        ("t.txt", b"a\n\xff\n", "t.txt: not UTF-8"),
        ("t.xml", b"", "unknown ending '.xml'; known: .csv, .tsv, .jsonl, .txt"),
    ],
)
def test_what_holds_no_text_is_refused_at_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(stream_texts(tmp_path / name, ["text"]))


def test_a_file_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        stream_texts(tmp_path / "gone.csv", ["text"])


def test_no_more_lines_are_taken_than_are_asked_for() -> None:
    lines = iter(["a\n", "b\r\n", "c\n"])
    assert list(islice(stream_lines(lines, "pipe"), 2)) == ["a", "b"]
    assert list(lines) == ["c\n"]
