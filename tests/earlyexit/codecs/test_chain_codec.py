"""Two networks that read the same rows differently."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from earlyexit.codecs import find_codec, make_codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded
from earlyexit.codecs.text import TextCodec
from earlyexit.errors import UnprocessableInputError
from earlyexit.network.boundary import Encoded
from tests.chained_texts import chain_spec, chained


def ids(encoded: Encoded | None) -> list[int]:
    assert encoded is not None
    return [int(each) for each in encoded.tensors[0]]


def test_a_row_is_encoded_for_its_network_and_callers_see_the_first_codec(
    tmp_path: Path,
) -> None:
    codec = chained(tmp_path)
    [of_first] = codec.encode_for(["a b"], (0, 1))
    [of_second] = codec.encode_for(["a b"], (1,))
    assert (of_first.row, of_first.network, ids(of_first)) == ("a b", 0, [1, 4, 5, 2])
    assert (of_second.network, ids(of_second)) == (1, [1, 14, 15, 2])
    assert ids(codec.of(1).encode(["ab cd"])[0]) == [1, 14, 15, 16, 17, 2]
    # Of a short row nothing is made that the plan may never need.
    assert of_first.of(0) is of_first
    assert of_first.of(1) is None
    text = find_codec({"name": "text", "max_length": 8}, tmp_path / "m0")
    assert (codec.inputs, codec.json_schema, codec.content_types) == (text.inputs, text.json_schema, text.content_types)
    assert codec.from_json(["a", "b"]) == (["a", "b"], True)
    assert codec.from_columns({"text": np.array([b"a"], dtype=object)}) == ["a"]
    assert isinstance(codec.encode(["a b"])[0], ChainEncoded)


def test_what_the_second_network_cannot_take_is_refused_as_it_comes_with_its_place(tmp_path: Path) -> None:
    codec = chained(tmp_path, max_lengths=(16, 8))
    said = r"input 1 has 9 tokens, the model takes 8; .*; the chain goes on with m1"
    for used in ((0, 1), (0,), (1,)):
        with pytest.raises(UnprocessableInputError, match="input 1 has 9 tokens, the model takes 8"):
            codec.encode_for(["a", "abc defg", "b"], used)
    with pytest.raises(UnprocessableInputError, match=said):
        codec.encode(["a", "abc defg", "b"])


def test_truncated_it_is_cut_for_each_network_as_that_needs_it(tmp_path: Path) -> None:
    codec = chained(tmp_path, max_lengths=(16, 4))
    [encoded] = codec.encode_for(["abc def"], (0, 1), truncate=True)
    assert ids(encoded) == [1, 3, 3, 2]
    assert ids(codec.encoded(["abc def"], 1, truncate=True)[0]) == [1, 14, 15, 2]


def test_slow_rows_are_made_for_every_network_that_the_plan_uses_at_once(tmp_path: Path) -> None:
    codec, row = chained(tmp_path, max_lengths=(30_000, 30_000)), "a" * 20_001
    assert codec.is_slow([row])
    assert codec.encode_for([row], (0, 1))[0].of(1) is not None
    [alone] = codec.encode_for(["a " * 3], (1,))
    assert alone.of(0) is None


def test_networks_that_read_alike_share_what_is_made(tmp_path: Path) -> None:
    codec = chained(tmp_path, firsts=(4, 4), halves=False)
    assert (codec.alike(0), codec.alike(1)) == (0, 0)
    [encoded] = codec.encode_for(["a b"], (1,))
    assert encoded.of(codec.alike(1)) is encoded
    assert chained(tmp_path / "other").alike(1) == 1
    assert chained(tmp_path / "shorter", max_lengths=(8, 6), firsts=(4, 4), halves=False).alike(1) == 1


class Lexical(TextCodec):
    """Reads more of its model's folder than the tokenizer."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.lexicon = (folder / "lexicon").read_text(encoding="utf-8")


def test_codecs_that_read_files_of_their_own_do_not_count_as_alike(tmp_path: Path) -> None:
    chained(tmp_path, firsts=(4, 4), halves=False)
    spec = {"name": f"{__name__}:Lexical", "max_length": 8}
    for folder in (tmp_path / "m0", tmp_path / "m1"):
        card = folder / "model.json"
        card.write_text(json.dumps(json.loads(card.read_text(encoding="utf-8")) | {"codec": spec}), encoding="utf-8")
        (folder / "lexicon").write_text(folder.name, encoding="utf-8")
    codec = find_codec(chain_spec((8, 8)) | {"members": [spec, spec]}, tmp_path)
    assert isinstance(codec, ChainCodec)
    assert (codec.alike(0), codec.alike(1)) == (0, 1)


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        pytest.param("abcde", True, id="5 letters and 2 marks and one that some put before a text"),
        pytest.param("abcdef", False, id="may just not fit"),
        pytest.param("ﷺ", False, id="one character that normalizers make 18 of"),
        pytest.param("é", False, id="no ASCII"),
    ],
)
def test_who_surely_fits_is_found_without_being_encoded(tmp_path: Path, text: str, sure: bool) -> None:
    assert chained(tmp_path).surely_takes(text) is sure


def test_its_card_says_all_that_is_needed_to_make_it_again(tmp_path: Path) -> None:
    codec, spec = chained(tmp_path), chain_spec((8, 8))
    assert codec.spec() == spec
    assert make_codec(spec).inputs == codec.inputs
