from __future__ import annotations

import csv
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from earlyexit.errors import DataError
from offramp.demo.texts import (
    INTENTS,
    SLOT,
    SLOTS,
    Divided,
    Intent,
    LabelledText,
    _of_intent,
    add_noise,
    divide,
    generate,
    write_csv,
)


@pytest.fixture(scope="module")
def texts() -> list[LabelledText]:
    return generate(seed=0)


@pytest.fixture(scope="module")
def divided(texts: list[LabelledText]) -> Divided:
    return divide(texts, seed=0)


def test_equal_seeds_give_equal_texts_and_another_seed_others(texts: list[LabelledText], divided: Divided) -> None:
    assert generate(seed=0) == texts
    assert divide(texts, seed=0) == divided
    assert generate(seed=1, per_intent=20) != generate(seed=2, per_intent=20)


def test_there_are_enough_intents_and_texts_and_none_twice_whatever_its_case(texts: list[LabelledText]) -> None:
    per_label = Counter(example.label for example in texts)
    assert len(per_label) == len(INTENTS) == 48
    assert set(per_label.values()) == {200}
    assert len({example.text.casefold() for example in texts}) == len(texts)


def test_every_text_has_words_and_no_template_marks(texts: list[LabelledText]) -> None:
    assert all(any(map(str.isalpha, example.text)) for example in texts)
    assert not [example for example in texts if set("[]{}|;") & set(example.text)]


def test_every_slot_of_a_template_has_words() -> None:
    used = {slot for intent in INTENTS for template in intent.plain + intent.hard for slot in SLOT.findall(template)}
    assert used == set(SLOTS)


def test_an_intent_with_too_little_to_say_is_an_error() -> None:
    poor = Intent(label="greet", plain=("hello",), hard=("hello",))
    with pytest.raises(DataError, match="greet yields"):
        _of_intent(poor, seed=0, num_texts=5000, seen=set())


def test_the_parts_hold_every_text_once_and_every_label_in_its_share(
    texts: list[LabelledText], divided: Divided
) -> None:
    parts = [{example.text for example in part} for part in (divided.train, divided.validation, divided.test)]
    assert sum(map(len, parts)) == len(texts)
    assert all(one.isdisjoint(other) for one, other in combinations(parts, 2))
    for part, share in ((divided.train, 120), (divided.validation, 40), (divided.test, 40)):
        assert set(Counter(example.label for example in part).values()) == {share}


def test_a_text_in_two_parts_is_refused() -> None:
    train, test = LabelledText(text="Hello", label="a"), LabelledText(text="hello", label="a")
    with pytest.raises(DataError, match="two of"):
        Divided(train=[train], validation=[], test=[test])


def test_noise_never_empties_a_text() -> None:
    for text in ("a", "ab", "go", "stop it", "turn on the light"):
        random = Random(0)
        assert all(add_noise(text, random).strip() for _ in range(2000))


def test_csv_has_a_header_and_one_row_per_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "texts.csv", [LabelledText(text='um, "stop"', label="stop_music")])
    with (tmp_path / "texts.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["text", "label"], ['um, "stop"', "stop_music"]]
