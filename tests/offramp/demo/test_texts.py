from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError
from offramp.demo.texts import INTENTS, SLOT, SLOTS, Intent, _of_intent, add_noise, generate


@pytest.fixture(scope="module")
def rows() -> LabelledRows:
    return generate(seed=0)


def test_equal_seeds_give_equal_texts_enough_of_each_intent_and_none_twice(rows: LabelledRows) -> None:
    assert generate(seed=0).texts == rows.texts
    assert generate(seed=1, per_intent=20).texts != generate(seed=2, per_intent=20).texts
    per_label = Counter(rows.labels)
    assert len(per_label) == len(INTENTS) == 48
    assert set(per_label.values()) == {200}
    assert len({text.casefold() for text in rows.texts}) == len(rows)
    assert all(any(map(str.isalpha, text)) for text in rows.texts)
    assert not [text for text in rows.texts if set("[]{}|;") & set(text)]


def test_every_slot_of_a_template_has_words_and_noise_never_empties_a_text() -> None:
    used = {slot for intent in INTENTS for template in intent.plain + intent.hard for slot in SLOT.findall(template)}
    assert used == set(SLOTS)
    poor = Intent(label="greet", plain=("hello",), hard=("hello",))
    with pytest.raises(DataError, match="greet yields"):
        _of_intent(poor, seed=0, num_texts=5000, seen=set())
    for text in ("a", "ab", "go", "stop it", "turn on the light"):
        random = Random(0)
        assert all(add_noise(text, random).strip() for _ in range(2000))
