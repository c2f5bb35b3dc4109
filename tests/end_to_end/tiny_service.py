"""A model that is small enough to be served in a test, and its expected answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from deployments.choices import TracingSettings, VersionSettings
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.codecs import find_codec
from earlyexit.codecs.base import Codec
from earlyexit.network.boundary import Split, entry_piece
from earlyexit.network.checkpoint import random_model
from earlyexit.network.model import Cut, EarlyExitModel, from_wire
from earlyexit.network.store import save_model
from earlyexit.policies.base import ExitOutput
from earlyexit.policies.threshold import EntropyPolicy
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import parse_problem
from tests.answers import label_of
from tests.end_to_end.one_ray import COLLECTOR_PORT

WORDS = ("[UNK]", "pay", "my", "bill", "card", "lost", "when", "is", "the", "rain", "coming", "to", "town")
LABELS = ("bill", "card", "weather")
MAX_LENGTH = 12
NUM_BLOCKS = 4
RAMPS = (0, 1, 2)
MAX_BODY_BYTES = 20_000
NEVER_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected answer to an input."""

    label: str
    score: float
    exit: int


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model in its folder, texts, and the expected answers under any plan with these thresholds."""

    folder: Path
    thresholds: dict[int, float]
    texts: tuple[str, ...]
    answers: tuple[Expected, ...]

    def check(self, index: int, answer: dict[str, Any]) -> None:
        expected = self.answers[index]
        assert (answer["label"], answer["exit"]) == (expected.label, expected.exit)
        assert answer["score"] == pytest.approx(expected.score, abs=2e-5)


def make_tiny(folder: Path, *, seed: int = 3) -> Tiny:
    texts = some_texts(24)
    model, tokenizer = make_model(folder, seed=seed)
    thresholds = median_entropies(model, tokenizer, texts)
    answers = tuple(answer_alone(model, tokenizer, text, thresholds) for text in texts)
    assert len({answer.exit for answer in answers}) > 2, "the inputs should leave in several places"
    return Tiny(folder=folder, thresholds=thresholds, texts=texts, answers=answers)


def text_service(tiny: Tiny, **changes: Any) -> ServeSettings:
    """Returns a service of two stages, as version 1; it may load others, and traces requests with a traced parent."""
    return ServeSettings(
        model=str(tiny.folder),
        plan=two_stages(tiny.thresholds),
        max_queued=500,
        max_timeout_s=60.0,
        max_inputs_per_request=32,
        max_body_bytes=MAX_BODY_BYTES,
        tracing=TracingSettings(endpoint=f"http://127.0.0.1:{COLLECTOR_PORT}", ratio=0.0),
        repository=VersionSettings(control="explicit"),
    ).model_copy(update=changes)


def controlled_service(tiny: Tiny) -> ServeSettings:
    """Returns the settings of a service whose controller never plans by itself."""
    control = ControlSettings(
        problem=tiny_problem(RAMPS, [1.0, 0.7, 0.5, 0.3]),
        policy=PolicySpec(name="entropy", thresholds=tiny.thresholds),
        state=str(tiny.folder / "state.sqlite"),
        period_s=NEVER_S,
        watch_s=0.5,
        starts_at_once=1,
    )
    return text_service(tiny, app="controlled", control=control, probe_share=0.5)


def tiny_problem(ramps: Sequence[int], survival: Sequence[float], **changes: Any) -> PlanProblem:
    """Returns the problem of a model with one block per share, on four CPU devices."""
    table = {
        "batch": [1, 8],
        "block_s": [[0.001, 0.004]] * len(survival),
        "ramp_s": [[0.0001, 0.0001]] * len(ramps),
    }
    document = {
        "schema_version": 1,
        "blocks": len(survival),
        "ramps": list(ramps),
        "survival": list(survival),
        "latency": {"cpu": table},
        "devices": {"cpu": {"count": 4}},
        "link": {"bandwidth_bytes_per_s": 1e9},
        "bytes_per_sample": 1000,
        "slo": {"latency_s": 5.0},
        "objective": {"maximize": "rate"},
    }
    return parse_problem(document | changes).problem


def some_texts(count: int) -> tuple[str, ...]:
    rng = np.random.default_rng(5)
    return tuple(" ".join(rng.choice(WORDS[1:], size=rng.integers(1, MAX_LENGTH))) for _ in range(count))


def make_model(folder: Path, *, seed: int = 3) -> tuple[EarlyExitModel, Codec[str]]:
    model = random_text_model("tiny", NUM_BLOCKS, seed=seed)
    save_model(model, folder)
    save_words(folder)
    return model, find_codec(model.info.codec, folder)


def random_text_model(
    name: str, num_blocks: int, *, seed: int, hidden_size: int = 32, vocab_size: int = len(WORDS)
) -> EarlyExitModel:
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_blocks": num_blocks,
        "num_heads": 4,
        "intermediate_size": 64,
        "max_length": MAX_LENGTH,
    }
    return random_model(sizes, name=name, task=LabelTask(LABELS), seed=seed)


def save_words(folder: Path, words: Sequence[str] = WORDS) -> Tokenizer:
    """Writes a tokenizer of whole words, numbered in order."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def median_entropies(model: EarlyExitModel, codec: Codec[str], texts: tuple[str, ...]) -> dict[int, float]:
    """Returns thresholds at which about half of the inputs leaves at every ramp, none of them near a threshold."""
    logits = exit_outputs(model, codec.encode(texts))
    thresholds = {}
    for ramp in RAMPS:
        entropies = torch.sort(EntropyPolicy(0.0).score(ramp, ExitOutput(model.task, logits[ramp]))).values
        middle = len(texts) // 2
        thresholds[ramp] = float(entropies[middle - 1] + entropies[middle]) / 2
    return thresholds


def two_stages(thresholds: dict[int, float]) -> Plan:
    first = Split(first=0, end=2, batch=8, ramps=(0, 1))
    rest = (Split(first=2, end=3, batch=4, ramps=(2,)), Split(first=3, end=4, batch=4))
    stages = tuple(Stage(device="cpu", replicas=1, splits=splits) for splits in ((first,), rest))
    return Plan(stages=stages, policy=PolicySpec(name="entropy", thresholds=thresholds))


def one_stage(thresholds: dict[int, float]) -> Plan:
    split = Split(first=0, end=NUM_BLOCKS, batch=8, ramps=RAMPS)
    stage = Stage(device="cpu", replicas=1, splits=(split,))
    return Plan(stages=(stage,), policy=PolicySpec(name="entropy", thresholds=thresholds))


def answer_alone(model: EarlyExitModel, codec: Codec[str], text: str, thresholds: dict[int, float]) -> Expected:
    """Returns the uncut model's answer to one text."""
    policy = EntropyPolicy(thresholds)
    wire = entry_piece([""], codec.encode([text]))
    steps = Cut(model, 0, NUM_BLOCKS, RAMPS, policy).run(from_wire(model, wire, policy))
    [answer] = [answer for step in steps for answer in step.answers]
    return Expected(label=LABELS[label_of(answer)], score=answer.score, exit=answer.exit)
