"""Two small text models with their own tokenizers as one chain, and the expected answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deployments.settings import ServeSettings
from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.model import ChainNetwork
from earlyexit.network.store import load_network, read_card, save_model
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import EntropyPolicy
from offramp.commands.train import chain_models
from optimizer.calibration.calibration_file import CALIBRATION_FILE
from optimizer.plans.plan import Plan, PolicySpec, Stage
from tests.earlyexit.network.chains import Inputs, offline, spread
from tests.end_to_end.tiny_service import (
    LABELS,
    NEVER_S,
    WORDS,
    Tiny,
    controlled_service,
    random_text_model,
    save_words,
    some_texts,
    tiny_problem,
)
from tests.exit_records import calibration_card

BLOCKS = (2, 4)
NETWORKS = (2, 6)
TIMEOUT_S = 250.0
RAMPS = (0, 1, 3)
"""Ramps of the plans: one inside each model, and the end of the small one."""
WEIGHTS = {1: 0.4}


@dataclass(frozen=True, kw_only=True)
class TinyCascade:
    """A chain's folder, texts, and the expected answers for each set of networks."""

    folder: Path
    thresholds: dict[int, float]
    texts: tuple[str, ...]
    both: tuple[Answer, ...]
    """Answers of the cascade."""
    alone: tuple[Answer, ...]
    """Answers of the large model alone."""
    mixed: tuple[Answer, ...]
    """Answers of the cascade as an ensemble."""

    @property
    def policy(self) -> PolicySpec:
        return PolicySpec(name="entropy", thresholds=self.thresholds)

    def check(self, index: int, answer: dict[str, Any], networks: str = "either") -> None:
        """Checks an answer by its path: the small model answers as in the cascade, the large one as alone."""
        expected = self.mixed if networks == "mixed" else self.both if networks == "both" else self.alone
        expected = self.both if answer["exit"] < NETWORKS[0] else expected
        label = expected[index].value
        assert (answer["label"], answer["exit"]) == (LABELS[int(label)], expected[index].exit)  # type: ignore[arg-type] # a label
        # Probabilities are sent in half precision.
        assert answer["score"] == pytest.approx(expected[index].score, abs=5e-4 if networks == "mixed" else 2e-5)

    def plan(self, *stages: tuple[Split, ...]) -> Plan:
        """Returns a plan with each stage on one replica."""
        made = tuple(Stage(device="cpu", replicas=1, splits=splits) for splits in stages)
        return Plan(stages=made, policy=self.policy, networks=NETWORKS)

    @property
    def cascade(self) -> Plan:
        """Returns a plan with a stage for each model."""
        return self.plan((Split(first=0, end=2, batch=4, ramps=(0, 1)),), (self.large,))

    @property
    def ensemble(self) -> Plan:
        """Returns the cascade's plan with an ensemble of both models."""
        return replace(self.cascade, policy=replace(self.policy, weights=WEIGHTS))

    @property
    def single(self) -> Plan:
        """Returns a plan of the large model alone."""
        return self.plan((self.large,))

    @property
    def together(self) -> Plan:
        """Returns a plan with both models on the same replicas, each cut in two."""
        small = Split(first=0, end=1, batch=8, ramps=(0,)), Split(first=1, end=2, batch=2, ramps=(1,))
        return self.plan((*small, Split(first=2, end=4, batch=2, ramps=(3,)), Split(first=4, end=6, batch=4)))

    @property
    def large(self) -> Split:
        return Split(first=2, end=6, batch=4, ramps=(3,))

    def settings(self) -> ServeSettings:
        """Returns the settings of a service whose controller never plans by itself."""
        of_one = Tiny(folder=self.folder, thresholds={**self.thresholds, 2: 0.0}, texts=(), answers=())
        as_of_one = controlled_service(of_one)
        problem = tiny_problem(RAMPS, [1.0, 0.8, 0.6, 0.6, 0.4, 0.4], networks=list(NETWORKS))
        assert as_of_one.control is not None
        control = as_of_one.control.model_copy(update={"problem": problem, "policy": self.policy, "period_s": NEVER_S})
        changes = {"app": "cascade", "plan": self.cascade, "control": control, "probe_share": 0.0}
        return as_of_one.model_copy(update={**changes, "max_timeout_s": TIMEOUT_S})


def make_cascade(root: Path) -> TinyCascade:
    """Makes untrained models, with thresholds at which inputs leave everywhere."""
    folders = [_member(root / f"m{place}", place, blocks) for place, blocks in enumerate(BLOCKS)]
    chain_models(folders, root / "cascade", name="tiny-cascade")
    return _expected(root / "cascade", some_texts(24))


def _member(folder: Path, place: int, num_blocks: int) -> Path:
    """Makes a model of the chain; each maps the same words to other ids."""
    model = random_text_model(f"m{place}", num_blocks, seed=5 + place, hidden_size=32 + 16 * place, vocab_size=128)
    save_model(spread(model.requires_grad_(False)), folder)
    save_words(folder, WORDS if place == 0 else (WORDS[0], *reversed(WORDS[1:])))
    (folder / CALIBRATION_FILE).write_text(calibration_card({0: 0.5}).model_dump_json(), encoding="utf-8")
    return folder


def _expected(folder: Path, texts: tuple[str, ...]) -> TinyCascade:
    network = load_network(folder)
    assert isinstance(network, ChainNetwork)
    codec = find_codec(read_card(folder).codec, folder)
    assert isinstance(codec, ChainCodec)
    inputs = Inputs(tuple(tuple(codec.of(place).encode(texts)) for place in range(len(BLOCKS))))
    thresholds = _middle_entropies(network, inputs)
    policy = EntropyPolicy(thresholds)
    both, _ = offline(network, policy, inputs, RAMPS, (0, 1))
    alone, _ = offline(network, policy, inputs, [ramp for ramp in RAMPS if ramp >= NETWORKS[0]], (1,))
    exits = {answer.exit for answer in both.values()}
    assert exits == {*RAMPS, NETWORKS[-1] - 1}, f"the inputs should leave everywhere, not after {sorted(exits)}"
    mixed, _ = offline(network, EnsemblePolicy(policy, WEIGHTS), inputs, RAMPS, (0, 1))
    assert any(mixed[name].score != both[name].score for name in inputs.ids)
    both_N, alone_N, mixed_N = (tuple(each[name] for name in inputs.ids) for each in (both, alone, mixed))
    return TinyCascade(folder=folder, thresholds=thresholds, texts=texts, both=both_N, alone=alone_N, mixed=mixed_N)


def _middle_entropies(network: ChainNetwork, inputs: Inputs) -> dict[int, float]:
    """Returns thresholds at which a third of the inputs leaves at every ramp, each halfway between two inputs."""
    unsure = EntropyPolicy(dict.fromkeys(RAMPS, 0.0))
    _, outcomes = offline(network, unsure, inputs, (), (0, 1))
    thresholds = {}
    for ramp in RAMPS:
        scores = sorted(score for (_, block), (score, _) in outcomes.items() if block == ramp)
        third = len(scores) // 3
        thresholds[ramp] = (scores[third - 1] + scores[third]) / 2
    return thresholds
