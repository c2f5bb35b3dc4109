from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from earlyexit.network.boundary import entering
from earlyexit.sequences.kv_memory import places_of
from earlyexit.sequences.sequence import Said, Sampling, TextStream, TokenSequence, choose
from tests.earlyexit.families.decoders import byte_tokenizer, sequence

NUMBER = 2**31 + 5
"""In halves 1 and 5."""
BYTES = byte_tokenizer()


def step(of: TokenSequence) -> tuple[list[int], list[int]]:
    """The tokens of its next step, and what comes beside them."""
    encoded = of.step()
    tokens_N, run_15 = encoded.tensors
    assert encoded.length == len(tokens_N)
    return tokens_N.tolist(), run_15[0].tolist()


def say(of: TokenSequence, token: int, exit_block: int = 4) -> Said | None:
    """Answer its step."""
    return of.answered(np.array([[token], [-0.5]], dtype=np.float32), exit_block)


def test_a_prompt_is_one_step_and_every_token_another() -> None:
    one = sequence([1, 2, 3], max_tokens=2)
    one.begin(NUMBER)
    assert step(one) == ([1, 2, 3], [1, 5, 0, 5, 3])
    said = say(one, 50, exit_block=1)
    assert said is not None
    assert (said.chosen.token, said.chosen.log_probability, said.ended, said.exit) == (50, -0.5, None, 1)
    assert step(one) == ([50], [1, 5, 3, 5, 3])
    said = say(one, 51)
    assert said is not None
    assert said.ended == one.ended == "length"
    assert one.tokens == [1, 2, 3, 50, 51]


def test_a_long_prompt_is_several_steps_of_which_the_last_brings_a_token() -> None:
    one = sequence([1, 2, 3, 4, 5], chunk=2)
    one.begin(1)
    found = []
    for _ in range(2):
        found.append(step(one))
        assert say(one, 99) is None
    assert found == [([1, 2], [0, 1, 0, 17, 5]), ([3, 4], [0, 1, 2, 17, 5])]
    assert step(one) == ([5], [0, 1, 4, 17, 5])
    assert say(one, 99) is not None
    assert step(one) == ([99], [0, 1, 5, 17, 5])


def test_one_that_begins_anew_shows_all_it_has_come_to_and_says_nothing_twice() -> None:
    one = sequence([1, 2], max_tokens=9, chunk=3)
    one.begin(1)
    for token in (50, 51):
        assert say(one, token) is not None
    one.begin(2)
    assert step(one) == ([1, 2, 50], [0, 2, 0, 11, 2])
    assert say(one, 7) is None
    assert step(one) == ([51], [0, 2, 3, 11, 2])
    said = say(one, 52)
    assert said is not None
    assert (said.chosen.token, one.num_said) == (52, 3)


def test_the_place_of_the_token_that_is_asked_for_survives_chunks_and_a_new_beginning() -> None:
    def place(of: TokenSequence) -> int:
        return int(places_of(entering(["a"], [of.step()]))[0])

    one = sequence([1, 2, 3, 4, 5], chunk=3)
    one.begin(1)
    places = [place(one)]
    for token in (99, 50, 51):
        say(one, token)
        places.append(place(one))
    assert places == [0, 0, 1, 2], "in the midst of the prompt, behind it, and of the second and third token"
    one.begin(2)
    for _ in range(2):
        say(one, 99)
    assert place(one) == 2, "not a prompt of seven tokens"


def test_a_stop_string_ends_it_and_what_was_held_back_comes_with_its_length() -> None:
    texts = []
    for text in ("so, end", "so, en"):
        one = sequence([1], stops=("end",), max_tokens=len("so, en") + (text == "so, end"))
        one.begin(1)
        said = [say(one, token) for token in BYTES.encode(text).ids]
        texts.append(["".join(each.text for each in said if each), one.ended])
    assert texts == [["so, ", "stop"], ["so, en", "length"]]


def test_a_source_is_never_cut_and_what_an_answer_starts_with_comes_behind_it() -> None:
    one = sequence([1, 2, 3], chunk=2, start=9, max_tokens=4)
    one.begin(1)
    assert step(one) == ([1, 2, 3, 9], [0, 1, 0, 8, 4])
    for token in (50, 51, 52):
        assert say(one, token) is not None
    assert step(one) == ([52], [0, 1, 6, 8, 4])
    one.begin(2)
    found = [step(one)]
    assert say(one, 99) is None
    assert say(one, 99) is None
    assert [*found, step(one)] == [([1, 2, 3, 9], [0, 2, 0, 8, 4]), ([52], [0, 2, 6, 8, 4])]
    assert one.num_said == 3


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


ANSWER = np.array([[40.0, 7.0, 9.0, 3.0], np.log([0.5, 0.25, 0.15, 0.1])], dtype=np.float32)
"""Four tokens, likeliest first, and the logarithms of their probabilities."""


def shares(sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    found = Counter(choose(ANSWER, sampling, place).token for place in range(draws))
    return {token: count / draws for token, count in found.items()}


def test_without_temperature_the_likeliest_token_comes_next() -> None:
    chosen = choose(ANSWER, Sampling(top_p=0.9, seed=3), 17)
    assert chosen.token == 40
    assert chosen.log_probability == pytest.approx(math.log(0.5))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    expected = {40: 0.5, 7: 0.25, 9: 0.15, 3: 0.1}
    assert shares(Sampling(temperature=1.0)) == pytest.approx(expected, abs=0.025)


def test_temperature_divides_the_logits() -> None:
    cubed = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    expected = dict(zip([40, 7, 9, 3], cubed / cubed.sum(), strict=True))
    assert shares(Sampling(temperature=0.5)) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        pytest.param(Sampling(temperature=1.0, top_p=0.75), {40, 7}, id="the share is reached by two"),
        pytest.param(Sampling(temperature=1.0, top_p=0.76), {40, 7, 9}, id="just not"),
        pytest.param(Sampling(temperature=1.0, top_p=1e-9), {40}, id="there is always one"),
        pytest.param(Sampling(temperature=1.0, top_k=3), {40, 7, 9}, id="three likeliest"),
        pytest.param(Sampling(temperature=1.0, top_k=500), {40, 7, 9, 3}, id="more than there are"),
        pytest.param(Sampling(temperature=1.0, top_k=2, top_p=0.6), {40}, id="of the two likeliest one is two thirds"),
    ],
)
def test_only_the_likeliest_are_drawn_from(sampling: Sampling, left: set[int]) -> None:
    assert set(shares(sampling, 400)) == left


def test_a_seed_and_a_place_draw_the_same_token_always_and_others_draw_others() -> None:
    once = [choose(ANSWER, Sampling(temperature=1.0, seed=5), place).token for place in range(50)]
    again = [choose(ANSWER, Sampling(temperature=1.0, seed=5), place).token for place in reversed(range(50))]
    other = [choose(ANSWER, Sampling(temperature=1.0, seed=6), place).token for place in range(50)]
    assert once == again[::-1]
    assert once != other
