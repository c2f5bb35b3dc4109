from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from earlyexit.sequences.sequence import TextStream
from tests.earlyexit.families.decoders import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKEN_OF = {byte: TOKENIZER.get_vocab()[char] for byte, char in bytes_to_unicode().items()}


def pieces(text: str, *stops: str) -> list[str]:
    """What is given after every byte, and at the end."""
    stream = TextStream(TOKENIZER, [], stops)
    return [*map(stream.push, TOKENIZER.encode(text).ids), stream.finish()]


def test_a_character_is_given_when_its_last_byte_has_come() -> None:
    assert pieces("aé→b") == ["a", "", "é", "", "", "→", "b", ""]


@pytest.mark.parametrize(
    ("prompt", "answer", "given"),
    [
        (b"Hi", "🐭!".encode(), ["", "", "", "🐭", "!"]),
        (b"Hi\xf0\x9f", b"\x90\xad!", ["", "🐭", "!"]),
        (b"Hi\xf0", b"abc", ["a", "b", "c"]),
        (b"\xa8", b"a", ["a"]),
    ],
    ids=["whole", "ends within a character", "ends within none that comes", "nothing else"],
)
def test_nothing_of_a_prompt_is_said_again(prompt: bytes, answer: bytes, given: list[str]) -> None:
    stream = TextStream(TOKENIZER, [TOKEN_OF[byte] for byte in prompt])
    assert [stream.push(TOKEN_OF[byte]) for byte in answer] == given


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert pieces("a\nb\n\nc", "\n\n") == ["a", "", "\nb", "", "", "", ""]


def test_what_was_held_back_is_given_where_no_token_comes_any_more() -> None:
    assert pieces("ends en", "end.") == ["", "", "", "ends", " ", "", "", "en"]


@pytest.mark.parametrize(
    ("text", "stops", "given"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("stop", ("stop",), ""),
        ("never", ("x", "yy"), "never"),
        ("Größe", ("ß",), "Grö"),
    ],
)
def test_a_text_ends_before_its_first_stop_string(text: str, stops: tuple[str, ...], given: str) -> None:
    assert "".join(pieces(text, *stops)) == given


@given(st.text("ab\u00e9\u2192", max_size=30), st.lists(st.text("ab\u00e9\u2192", min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_the_text_cut_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    found = [at for at in map(text.find, stops) if at >= 0]
    # Of two stops that end at one character the longer began earlier; of two that begin together the shorter ends it.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = (
        text
        if not found
        else text[: min(text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends))]
    )
    assert "".join(pieces(text, *stops)) == expected
