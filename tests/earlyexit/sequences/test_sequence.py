from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import scaled_dot_product_attention
from transformers.convert_slow_tokenizer import bytes_to_unicode

from earlyexit.errors import OverloadedError
from earlyexit.network.boundary import entry_piece
from earlyexit.sequences.kv import COPIED_TOKENS, FILLED_ROWS, KvStore, Run, places_of
from earlyexit.sequences.sequence import CONTEXT_TOKENS, Sampling, StepResult, TextStream, TokenSequence, choose
from tests.earlyexit.codecs.prompts import END, byte_tokenizer, marked_tokenizer
from tests.earlyexit.families.decoders import sequence

NUMBER = 2**31 + 5
"""A sequence number with the halves 1 and 5."""
BYTES = byte_tokenizer()


def step(of: TokenSequence) -> tuple[list[int], list[int]]:
    """Returns the tokens of its next step, and the row of the tensor `run`."""
    encoded = of.step()
    tokens_N, run_15 = encoded.tensors
    assert encoded.length == len(tokens_N)
    return tokens_N.tolist(), run_15[0].tolist()


def say(of: TokenSequence, token: int, exit_block: int = 4) -> StepResult | None:
    """Answers its step."""
    return of.answered(np.array([[token], [-0.5]], dtype=np.float32), exit_block)


def test_steps_are_the_chunks_of_the_prompt_then_single_tokens() -> None:
    one = sequence([1, 2, 3], max_tokens=2)
    one.begin(NUMBER)
    assert step(one) == ([1, 2, 3], [1, 5, 0, 5, 3])
    said = say(one, 50, exit_block=1)
    assert said is not None
    assert (said.token, said.log_probability, said.ended, said.exit) == (50, -0.5, None, 1)
    assert (said.likeliest_2k.shape, said.likeliest_2k.base) == ((2, 1), None), "an unread token keeps no reply"
    assert step(one) == ([50], [1, 5, 3, 5, 3])
    said = say(one, 51)
    assert said is not None
    assert said.ended == one.ended == "length"
    assert one.tokens == [1, 2, 3, 50, 51]
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


def test_a_restarted_sequence_has_its_tokens_as_prompt() -> None:
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
    assert (said.token, len(one.tokens) - one.num_prompt) == (52, 3)


def test_the_place_of_the_requested_token_survives_chunks_and_restarts() -> None:
    def place(of: TokenSequence) -> int:
        return int(places_of(entry_piece(["a"], [of.step()]))[0])

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


def test_a_sequence_ends_at_a_stop_string_or_its_length() -> None:
    texts = []
    for text in ("so, end", "so, en"):
        one = sequence([1], stops=("end",), max_tokens=len("so, en") + (text == "so, end"))
        one.begin(1)
        said = [say(one, token) for token in BYTES.encode(text).ids]
        texts.append(["".join(each.text for each in said if each), one.ended])
    assert texts == [["so, ", "stop"], ["so, en", "length"]]


def test_a_source_is_never_divided_and_is_followed_by_the_start_token() -> None:
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
    assert len(one.tokens) - one.num_prompt == 3


TOKEN_OF = {byte: BYTES.get_vocab()[char] for byte, char in bytes_to_unicode().items()}


def pieces(text: str, *stops: str) -> list[str]:
    """Returns the text that is released after every byte, and at the end."""
    stream = TextStream(BYTES, [], stops)
    return [*map(stream.push, BYTES.encode(text).ids), stream.held]


def test_a_character_is_released_after_its_last_byte_unless_a_stop_string_may_begin() -> None:
    assert pieces("aé→b") == ["a", "", "é", "", "", "→", "b", ""]
    assert pieces("a\nb\n\nc", "\n\n") == ["a", "", "\nb", "", "", "", ""]
    # What was held back is given where no token comes any more.
    assert pieces("ends en", "end.") == ["", "", "", "ends", " ", "", "", "en"]


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
def test_no_text_of_a_prompt_is_repeated(prompt: bytes, answer: bytes, given: list[str]) -> None:
    stream = TextStream(BYTES, [TOKEN_OF[byte] for byte in prompt])
    assert [stream.push(TOKEN_OF[byte]) for byte in answer] == given


def test_many_tokens_without_characters_are_not_decoded_again_and_again() -> None:
    tokenizer, lengths = marked_tokenizer(), list[int]()

    def decode(tokens: list[int], **options: bool) -> str:
        lengths.append(len(tokens))
        return str(tokenizer.decode(tokens, **options))

    stream = TextStream(cast(Tokenizer, SimpleNamespace(decode=decode)), [TOKEN_OF[72]])
    tokens = [END] * 500 + [TOKEN_OF[0x9F]] * 500 + [TOKEN_OF[105]]  # the byte begins no character
    assert "".join(map(stream.push, tokens)) == "\ufffd" * 500 + "i"
    assert max(lengths) <= 2 * CONTEXT_TOKENS


def test_invalid_bytes_after_characters_that_were_given_are_replaced() -> None:
    """Byte fallback decodes a run of bytes as a whole: its line feed is U+FFFD if later bytes are no character."""
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xF0>": 2, "t": 3, "<0xE2>": 4, "<0x86>": 5, "<0x92>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert list(map(TextStream(tokenizer, [3]).push, [1, 2, 3, 3])) == ["\n", "", "\ufffdt", "t"]
    # The end of a long prompt, which is decoded alone, begins with a whole character.
    assert list(map(TextStream(tokenizer, [4, 5, 6] * 30).push, [4, 5, 6])) == ["", "", "→"]


@given(st.text("ab\u00e9\u2192", max_size=30), st.lists(st.text("ab\u00e9\u2192", min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_the_text_cut_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    # Of two stops that end at one character the longer began earlier; of two that begin together the shorter ends it.
    spans = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces(text, *stops)) == text[: min(spans, default=(0, len(text)))[1]]


ANSWER = np.array([[40.0, 7.0, 9.0, 3.0], np.log([0.5, 0.25, 0.15, 0.1])], dtype=np.float32)
"""Four tokens, the most probable first, and the logarithms of their probabilities."""


def shares(sampling: Sampling, draws: int = 4000, answer: NDArray[np.float32] = ANSWER) -> dict[int, float]:
    found = Counter(int(answer[0, choose(answer[1], sampling, place)]) for place in range(draws))
    return {token: count / draws for token, count in found.items()}


def test_tokens_are_sampled_by_their_probabilities_temperature_seed_and_place() -> None:
    assert choose(ANSWER[1], Sampling(top_p=0.9, seed=3), 17) == 0
    expected = {40: 0.5, 7: 0.25, 9: 0.15, 3: 0.1}
    assert shares(Sampling(temperature=1.0)) == pytest.approx(expected, abs=0.025)
    cubed = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    expected = dict(zip([40, 7, 9, 3], cubed / cubed.sum(), strict=True))
    assert shares(Sampling(temperature=0.5)) == pytest.approx(expected, abs=0.025)
    once = [choose(ANSWER[1], Sampling(temperature=1.0, seed=5), place) for place in range(50)]
    again = [choose(ANSWER[1], Sampling(temperature=1.0, seed=5), place) for place in reversed(range(50))]
    other = [choose(ANSWER[1], Sampling(temperature=1.0, seed=6), place) for place in range(50)]
    assert once == again[::-1]
    assert once != other


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        pytest.param(Sampling(temperature=1.0, top_p=0.75), {40, 7}, id="the share is reached by two"),
        pytest.param(Sampling(temperature=1.0, top_p=0.76), {40, 7, 9}, id="just not"),
        pytest.param(Sampling(temperature=1.0, top_p=1e-9), {40}, id="there is always one"),
        pytest.param(Sampling(temperature=5e-324), {40}, id="nearly greedy"),
        pytest.param(Sampling(temperature=1.0, top_k=3), {40, 7, 9}, id="three likeliest"),
        pytest.param(Sampling(temperature=1.0, top_k=500), {40, 7, 9, 3}, id="more than there are"),
        pytest.param(Sampling(temperature=1.0, top_k=2, top_p=0.6), {40}, id="of the two likeliest one is two thirds"),
    ],
)
def test_only_the_most_probable_tokens_are_sampled(sampling: Sampling, left: set[int]) -> None:
    assert set(shares(sampling, 400)) == left


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "left"),
    [(1.0, 0.5, None, 1), (1.0, 0.8, None, 3), (0.5, 0.9, None, 3), (1.0, 0.8, 3, 2), (1.0, 0.8, 500, 3)],
)
def test_tokens_that_are_not_in_the_answer_count_for_top_p(
    temperature: float, top_p: float, top_k: int | None, left: int
) -> None:
    """The answer has 0.9 of the probability. Squared, its tokens have 0.25, 0.0625 and 0.0225, and the others 0.015."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    assert len(shares(sampling, 400, ANSWER[:, :3])) == left


SHAPE = (2, 1, 2)


def store(num_pages: int = 6) -> KvStore:
    return KvStore(SHAPE, num_pages, page_tokens=4)


def test_pages_for_a_whole_sequence_are_reserved_when_it_enters() -> None:
    kv = store()
    kv.enter(1, 9)
    kv.enter(1, 9)  # as every step of it does
    assert kv.free_pages == 3
    assert (kv.room_of(1), kv.room_of(2)) == (12, 0)
    kv.free(1)
    kv.free(1)
    assert kv.free_pages == 6
    assert kv.use.sequences == 0
    kv.enter(1, 16)
    with pytest.raises(OverloadedError, match="3 pages are needed for keys and values, 2 of 6 are free") as refused:
        kv.enter(2, 12)
    assert refused.value.retry_after_s > 0
    assert (kv.use.sequences, kv.room_of(1)) == (1, 16)
    kv.free(1)
    kv.enter(2, 12)
    assert kv.free_pages == 3


@pytest.mark.parametrize("scattered", [False, True])
def test_attention_does_not_depend_on_pages_or_other_rows(scattered: bool) -> None:
    torch.manual_seed(0)
    kv = KvStore((1, 2, 4), 64, page_tokens=16)
    for number in range(100, 164 if scattered else 100):
        kv.enter(number, 1)
    for number in range(100, 164, 2):
        kv.free(number)
    ends = {1: COPIED_TOKENS + 9, 2: 5, 3: 40, 4: 7, 5: FILLED_ROWS + 20, 6: COPIED_TOKENS + 1}
    written = {}
    for number, end in ends.items():
        kv.enter(number, end)
        written[number] = keys, values = torch.randn(end, 2, 4), torch.randn(end, 2, 4)
        kv.write(0, kv.places([Run(sequence=number, start=0, length=end)]).write_N, keys, values)
    lengths = {1: 1, 2: 5, 3: 1, 4: 3, 5: FILLED_ROWS + 1, 6: 2}
    runs = [Run(sequence=k, start=ends[k] - length, length=length) for k, length in lengths.items()]
    assert (np.diff(kv.place_of(1, ends[1])).max() > 1) == scattered
    queries_NHd = torch.randn(sum(lengths.values()), 6, 4)
    places = kv.places(runs)
    assert [len(range(*each.rows.indices(100))) for each in places.alone] == [1, FILLED_ROWS + 1, 2]
    found = kv.attend(0, places, queries_NHd)
    parts = (torch.split(each, [*lengths.values()]) for each in (found, queries_NHd))
    for run, own, queries in zip(runs, *parts, strict=True):
        keys, values = (each.repeat_interleave(3, dim=1).transpose(0, 1) for each in written[run.sequence])
        seen = torch.arange(run.end)[None] <= torch.arange(run.start, run.end)[:, None]
        expected = scaled_dot_product_attention(queries.transpose(0, 1), keys, values, attn_mask=seen)
        torch.testing.assert_close(own, expected.transpose(0, 1))


def test_two_thousand_sequences_leave_every_page_free() -> None:
    kv, rng, there = store(32), random.Random(0), dict[int, int]()
    for number in range(1, 2001):
        tokens = rng.randint(1, 40)
        while -(-tokens // 4) > kv.free_pages:
            kv.free(gone := rng.choice(list(there)))
            del there[gone]
        kv.enter(number, tokens)
        there[number] = -(-tokens // 4)
        assert kv.free_pages == 32 - sum(there.values())
        assert len(set(kv.place_of(number, tokens).tolist())) == tokens
    assert kv.use.peak_pages == 32
    for number in there:
        kv.free(number)
    assert kv.free_pages == 32


def test_nan_in_one_sequence_does_not_reach_another() -> None:
    """Rows that share a call are padded with their own places, because a weight of 0 times NaN is NaN."""
    kv = store()
    for number in (1, 2, 3):
        kv.enter(number, 8)
    runs = [Run(sequence=number, start=0, length=length) for number, length in ((1, 1), (2, 2), (3, 6))]
    places = kv.places(runs)
    values_NKd = torch.ones(9, 1, 2)
    values_NKd[0] = torch.nan
    kv.write(0, places.write_N, values_NKd, values_NKd)
    places = kv.places([Run(sequence=2, start=1, length=1), Run(sequence=3, start=5, length=1)])
    assert kv.attend(0, places, torch.ones(2, 1, 2)).isfinite().all()
