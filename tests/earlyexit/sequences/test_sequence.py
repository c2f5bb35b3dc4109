from __future__ import annotations

import numpy as np

from earlyexit.network.boundary import entering
from earlyexit.sequences.kv_memory import places_of
from earlyexit.sequences.sequence import Said, TokenSequence
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
