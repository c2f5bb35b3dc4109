"""Tokens looked up word by word are those that the tokenizer itself gives."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from earlyexit.codecs import find_codec
from earlyexit.codecs.text import (
    LONGEST_TEXT,
    TOKENIZER_FILE,
    TextCodec,
    TextPairCodec,
    TextTokenizer,
    WordPieces,
    word_pieces_of,
)
from earlyexit.errors import UnprocessableInputError
from earlyexit.network.boundary import Encoded
from offramp.commands.packaged import resolve_backbone

VOCABULARY = {"[CLS]": 1, "[SEP]": 2, "[UNK]": 3, **{letter: 4 + k for k, letter in enumerate("abcdefgh")}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer of letters, `a` being 4, that pads and truncates unless it is told not to."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def text_codec(folder: Path, max_length: int = 8) -> TextCodec:
    codec = find_codec({"name": "text", "max_length": max_length}, folder)
    assert isinstance(codec, TextCodec)
    return codec


def pair_codec(folder: Path, max_length: int = 8) -> TextPairCodec:
    codec = find_codec({"name": "text_pair", "max_length": max_length}, folder)
    assert isinstance(codec, TextPairCodec)
    return codec


def listed(encoded: list[Encoded]) -> list[tuple[list[int], ...]]:
    assert all(array.dtype == np.int32 and len(array) == each.length for each in encoded for array in each.tensors)
    return [tuple(array.tolist() for array in each.tensors) for each in encoded]


def test_a_text_or_a_pair_is_its_token_ids_with_special_tokens_and_without_padding(folder: Path) -> None:
    encoded = text_codec(folder).encode(["a b", "c ?", ""])
    assert listed(encoded) == [([1, 4, 5, 2],), ([1, 6, 3, 2],), ([1, 2],)]
    assert text_codec(folder).encode([]) == []
    encoded = pair_codec(folder).encode([("a b", "c"), ("a", "b c")])
    assert listed(encoded) == [
        ([1, 4, 5, 2, 6, 2], [0, 0, 0, 0, 1, 1]),
        ([1, 4, 2, 5, 6, 2], [0, 0, 0, 1, 1, 1]),
    ]
    assert listed(pair_codec(folder).encode([("a b", "c")])) == listed(encoded)[:1]


def test_too_long_a_text_is_refused_with_its_place_or_cut_but_for_its_special_tokens(folder: Path) -> None:
    codec = text_codec(folder, max_length=4)
    assert listed(codec.encode(["b", "a b c"], truncate=True)) == [([1, 5, 2],), ([1, 4, 5, 2],)]
    assert listed(codec.encode(["a b c"], truncate=True)) == [([1, 4, 5, 2],)]
    with pytest.raises(UnprocessableInputError, match='input 1 has 5 tokens, the model takes 4; send "truncate": true'):
        codec.encode(["a b", "a b c", "a a a a"])
    with pytest.raises(UnprocessableInputError, match="input 0 has 5 tokens"):
        codec.encode(["a b c"])


def test_a_text_that_the_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / TOKENIZER_FILE))
    codec = text_codec(tmp_path)
    assert listed(codec.encode(["a", "a a"])) == [([0],), ([0, 0],)]
    for texts in (["b"], ["a", "b"]):
        with pytest.raises(UnprocessableInputError, match=r"the tokenizer cannot encode a text: .*\[UNK\]"):
            codec.encode(texts)


def test_too_long_a_pair_is_cut_where_it_is_longest(folder: Path) -> None:
    codec = pair_codec(folder, max_length=7)
    cut = codec.encode([("a b c d", "e f g h"), ("a b c d", "e"), ("a", "b c d e"), ("a", "b")], truncate=True)
    assert [ids for ids, _ in listed(cut)] == [
        [1, 4, 5, 2, 8, 9, 2],
        [1, 4, 5, 6, 2, 8, 2],
        [1, 4, 2, 5, 6, 7, 2],
        [1, 4, 2, 5, 2],
    ]
    with pytest.raises(UnprocessableInputError, match=r"input 0 has 11 tokens, the model takes 7; send \"truncate\""):
        codec.encode([("a b c d", "e f g h")])


def test_rows_come_of_columns_and_of_json_and_many_characters_leave_the_event_loop(folder: Path) -> None:
    text, pair = text_codec(folder), pair_codec(folder)
    assert text.from_columns({"text": ["a", "é".encode()]}) == ["a", "é"]
    assert text.from_json("a") == (["a"], False)
    assert text.from_json(["a"]) == (["a"], True)
    assert pair.from_columns({"text": [b"a"], "text_pair": ["b"]}) == [("a", "b")]
    assert pair.from_json(["a", "b"]) == ([("a", "b")], False)
    assert pair.from_json([["a", "b"], ["c", "d"]]) == ([("a", "b"), ("c", "d")], True)
    assert not text.is_slow(["a" * 20_000])
    assert text.is_slow(["a" * 20_000, "b"])
    assert pair.is_slow([("a" * 20_000, "b")])


def test_a_text_is_pruned_by_the_importance_of_its_tokens(folder: Path) -> None:
    codec = text_codec(folder)
    assert codec.pruned("a b c", np.array([9.0, 1.0, 5.0, 3.0, 9.0]), 0.9) == "b c"
    assert codec.pruned("a b c", np.array([9.0, 1.0, 5.0, 3.0, 9.0], dtype=np.float16), 1.1) == "b"
    cut = text_codec(folder, max_length=4)
    assert cut.pruned("a b c d", np.array([9.0, 1.0, 5.0, 9.0]), 0.9) == "b c d", "what was cut is not known"
    pair = pair_codec(folder).pruned(("a b", "c d"), np.array([50.0, 3.0, 10.0, 50.0, 1.0, 2.0, 50.0]), 0.4)
    assert pair == ("a b", "d"), "as one"


def whole(folder: Path, text: str, max_length: int) -> list[int]:
    """What the tokenizer itself makes of a text, cut."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    ids: list[int] = tokenizer.encode(text).ids
    return ids


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a b c d " * 5000, id="short words"),
        pytest.param("a " + "x" * 40_000 + " b c", id="a word that is one token"),
        pytest.param(" " * 30_000 + "a b c d e f g", id="white space"),
        pytest.param("a\nb\n" * 9000, id="lines"),
    ],
)
def test_a_text_far_too_long_is_cut_to_the_tokens_that_the_whole_text_begins_with(folder: Path, text: str) -> None:
    assert listed(text_codec(folder).encode([text], truncate=True)) == [(whole(folder, text, 8),)]


def test_a_pair_far_too_long_is_cut_where_it_is_longest(folder: Path) -> None:
    [ids] = listed(pair_codec(folder).encode([("a " * 50_000, "b")], truncate=True))
    assert ids[0] == [1, 4, 4, 4, 4, 2, 5, 2][: len(ids[0])]
    assert len(ids[0]) == 8


def test_tokenizing_takes_no_longer_for_a_text_that_is_a_hundred_times_too_long(folder: Path) -> None:
    codec, spent_s = text_codec(folder), []
    for repeated in (2_500, 250_000):  # 10 kB and 1 MB
        began_s = time.process_time()
        for _ in range(5):
            codec.encode(["a b " * repeated], truncate=True)
        spent_s.append(time.process_time() - began_s)
    assert spent_s[1] < 10 * spent_s[0] + 0.05, "processor seconds; 100 times as many where every character counts"


def test_a_pair_for_a_network_without_token_types_is_its_token_ids(folder: Path) -> None:
    codec = find_codec({"name": "text_pair", "max_length": 8, "token_types": False}, folder)
    assert listed(codec.encode([("a b", "c")])) == [([1, 4, 5, 2, 6, 2],)]
    assert codec.spec() == {"name": "text_pair", "max_length": 8, "token_types": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(Path(resolve_backbone("minilm")) / TOKENIZER_FILE))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> WordPieces:
    found = word_pieces_of(tokenizer)
    assert found is not None
    return found


@settings(max_examples=150)
@given(text=st.text(st.characters(min_codepoint=1, max_codepoint=130), max_size=60))
def test_plain_texts_have_the_tokenizers_ids(tokenizer: Tokenizer, words: WordPieces, text: str) -> None:
    assert words.ids(text) in (None, tokenizer.encode(text).ids)


def test_what_is_plain_is_looked_up(tokenizer: Tokenizer, words: WordPieces) -> None:
    for text in ("", " ", "Pay my BILL, please!", "unaffordableness_3.5%", "x" * 101, "(a)~b"):
        assert words.ids(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("text", ["café", "a\tb", "[SEP] a", "a" * (LONGEST_TEXT + 1), "\x7f", "水"])
def test_what_is_not_is_left_to_the_tokenizer(words: WordPieces, text: str) -> None:
    assert words.ids(text) is None


def test_words_are_forgotten_before_they_are_too_many(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("earlyexit.codecs.text.MOST_WORDS", 3)
    found = word_pieces_of(tokenizer)
    assert found is not None
    for text in ("one two three", "four five", "six seven one"):
        assert found.ids(text) == tokenizer.encode(text).ids
        assert len(found._pieces) <= 3


def test_one_text_and_several_are_encoded_alike(tokenizer: Tokenizer) -> None:
    texts = TextTokenizer(tokenizer, 12)
    alone = [texts.encode([text], truncate=True)[0] for text in ("pay my bill", "a b c d e f g h i j k l m")]
    together = texts.encode(["pay my bill", "a b c d e f g h i j k l m"], truncate=True)
    for one, other in zip(alone, together, strict=True):
        assert one.length == other.length
        assert one.tensors[0].tolist() == other.tensors[0].tolist()
    assert [each.length for each in alone] == [5, 12]
