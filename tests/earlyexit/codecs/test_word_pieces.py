"""Tokens looked up word by word are those that the tokenizer itself gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from earlyexit.codecs.text import LONGEST_TEXT, TOKENIZER_FILE, TextTokenizer, WordPieces, word_pieces_of
from offramp.commands.packaged import resolve_backbone


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


def test_tokenizers_of_other_kinds_have_none() -> None:
    from tokenizers.models import BPE

    assert word_pieces_of(Tokenizer(BPE())) is None
