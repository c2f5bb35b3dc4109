"""The texts of the demo: short requests with their intent, made from templates, slots, paraphrase and noise."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import yaml

from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError

HARD_SHARE = 0.45
"""Share of the texts from templates without clear key words; tuned so that a tenth to a third need the late blocks."""

PARAPHRASE_SHARE = 0.3
"""Share of the key words that are said in other words."""

MAX_DRAWS_PER_TEXT = 10
"""Draws before an intent counts as too poor for the number of texts asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One label and the ways to say it."""

    label: str
    plain: tuple[str, ...]
    hard: tuple[str, ...]


def _parts(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(separator))


def _intent(block: str) -> Intent:
    plain, hard = block.split("hard:")
    label, plain = plain.split(":")
    return Intent(label=label, plain=_parts(plain, ";"), hard=_parts(hard, ";"))


SAID = yaml.safe_load(Path(__file__).with_name("intents.yaml").read_text(encoding="utf-8"))
SLOTS = {slot: _parts(words) for slot, words in SAID["slots"].items()}
PARAPHRASES = {word: _parts(others) for word, others in SAID["paraphrases"].items()}
INTENTS = tuple(_intent(block) for block in re.split(r"\n(?=\w)", SAID["intents"].strip()))

CHOICE = re.compile(r"\[([^\[\]]*)\]")
KEY_WORD = re.compile(rf"(?<!{{)\b({'|'.join(PARAPHRASES)})\b")
SLOT = re.compile(r"\{(\w+)\}")

OPENERS, CLOSERS, ASIDES = (_parts(SAID[place], ";") for place in ("openers", "closers", "asides"))


def generate(seed: int = 0, per_intent: int = 200) -> LabelledRows:
    """`per_intent` texts of every intent, all distinct whatever their case; equal seeds give equal texts.

    Raises DataError where an intent's templates do not yield that many.
    """
    seen: set[str] = set()
    texts = [text for intent in INTENTS for text in _of_intent(intent, seed, per_intent, seen)]
    return LabelledRows.of_texts(texts, [intent.label for intent in INTENTS for _ in range(per_intent)])


def _of_intent(intent: Intent, seed: int, num_texts: int, seen: set[str]) -> list[str]:
    random = Random(f"{seed}/{intent.label}")
    made: list[str] = []
    for _ in range(num_texts * MAX_DRAWS_PER_TEXT):
        if len(made) == num_texts:
            break
        text = add_noise(_sentence(intent, random), random)
        if text.casefold() not in seen:
            seen.add(text.casefold())
            made.append(text)
    if len(made) < num_texts:
        raise DataError(f"{intent.label} yields {len(made)} distinct texts, {num_texts} are asked for")
    return made


def _sentence(intent: Intent, random: Random) -> str:
    if random.random() < HARD_SHARE:
        # Zipf's law: the tail is seen so seldom that a ramp has to understand it rather than remember it.
        [template] = random.choices(intent.hard, [1 / rank for rank in range(1, len(intent.hard) + 1)])
    else:
        template = random.choice(intent.plain)
    chosen = CHOICE.sub(lambda match: random.choice(match[1].split("|")), template)
    return " ".join(_fill(_paraphrase(chosen, random), random).split())


def _fill(template: str, random: Random) -> str:
    return SLOT.sub(lambda match: random.choice(SLOTS[match[1]]), template)


def _paraphrase(text: str, random: Random) -> str:
    def replace(match: re.Match[str]) -> str:
        return random.choice(PARAPHRASES[match[0]]) if random.random() < PARAPHRASE_SHARE else match[0]

    return KEY_WORD.sub(replace, text)


def add_noise(text: str, random: Random) -> str:
    """Do to a request what people do: fillers, asides, lost words, typos, capitals. Never empties a text."""
    for probability, change in CHANGES:
        if random.random() < probability:
            text = change(text, random)
    return text


def _add_aside(text: str, random: Random) -> str:
    aside = _fill(random.choice(ASIDES), random)
    return random.choice((f"{aside}, {text}", f"{aside} and anyway {text}", f"{text}, {aside}"))


def _lose_word(text: str, random: Random) -> str:
    words = text.split()
    if len(words) > 3:
        del words[random.randrange(len(words))]
    return " ".join(words)


def _mistype(text: str, random: Random) -> str:
    """Drop, double or swap a letter inside a word."""
    index = random.randrange(1, max(2, len(text) - 1))
    before, here, after = text[:index], text[index : index + 1], text[index + 1 :]
    return random.choice((before + after, before + here + here + after, before + after[:1] + here + after[1:])).strip()


CHANGES: tuple[tuple[float, Callable[[str, Random], str]], ...] = (
    (0.02, _lose_word),
    (0.15, lambda text, random: f"{random.choice(OPENERS)} {text}"),
    (0.10, lambda text, random: f"{text} {random.choice(CLOSERS)}"),
    (0.03, _add_aside),
    (0.04, _mistype),
    (0.30, lambda text, random: random.choice((text.capitalize, text.capitalize, text.title, text.upper))()),
    (0.20, lambda text, random: text + random.choice(("?", "?", ".", "!", "..."))),
)
"""In this order: the probability of each change and the change."""
