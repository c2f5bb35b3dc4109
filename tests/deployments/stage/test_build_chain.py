"""What a replica of a chain runs: every network, warm at each one's start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cluster.emulated import PacedRunner
from deployments.replica.build import build_runner, check_emulated, warm_up
from deployments.settings import ServeSettings
from earlyexit.clock import ManualClock, MonotonicClock
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from earlyexit.network.cut import TorchRunner
from earlyexit.network.store import CARD_FILE, ModelFolder, chain_card, read_card, save_model
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import plan_document
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.models import small

V100 = "emulated:V100"
NEVER = PolicySpec(name="confidence", thresholds=2.0)
SPLITS = (
    Split(first=0, end=2, batch=4, ramps=(1,)),
    Split(first=2, end=4, batch=2, ramps=(2,)),
    Split(first=4, end=5, batch=2),
)
PROFILE = {
    "batch": [1, 4],
    "block_s": [[1.0, 2.0]] * 2 + [[3.0, 6.0]] * 3,
    "ramp_s": [[0.5, 0.5]] * 4,
    "decisions": "computed",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks before three."""
    base = tmp_path_factory.mktemp("models")
    members = []
    for name, num_blocks in (("small", 2), ("large", 3)):
        save_model(renamed(small(num_blocks=num_blocks), name), base / name)
        members.append(ModelFolder(folder=base / name, card=read_card(base / name)))
    chain = base / "chain"
    chain.mkdir()
    card = chain_card("large", chain, members, provenance={})
    (chain / CARD_FILE).write_text(card.model_dump_json(), encoding="utf-8")
    return chain


def settings_of(folder: Path, device: str, **changed: Any) -> ServeSettings:
    plan = Plan(stages=(Stage(device=device, replicas=1, splits=SPLITS),), policy=NEVER, networks=(2, 5))
    fields = {"model": str(folder), "plan": plan_document(plan), "emulated": {V100: PROFILE}} | changed
    return ServeSettings.model_validate(fields)


def test_every_split_of_every_network_is_warmed_and_none_crosses(folder: Path) -> None:
    settings = settings_of(folder, "cpu", attention="padded")
    runner = build_runner(settings, "cpu", NEVER, clock=MonotonicClock())
    assert isinstance(runner, TorchRunner)
    times = warm_up(runner, [SPLITS], clock=MonotonicClock(), starts=read_card(folder).chain.starts)
    assert all(0 < times.batch_s(split, 4) < math.inf for split in SPLITS)


def test_an_emulated_accelerator_takes_the_rows_of_the_whole_chain(folder: Path) -> None:
    settings, card = settings_of(folder, V100), read_card(folder)
    check_emulated(settings, V100, card)
    runner = build_runner(settings, V100, NEVER, clock=ManualClock())
    assert isinstance(runner, PacedRunner)
    assert [runner.pace.split_s(split, 1) for split in SPLITS] == [(2.5, 2.5), (3.5, 6.5), (3.0, 3.0)]
    with pytest.raises(PlanError, match="has 3 rows of block_s and 4 of ramp_s; large has 5 blocks and 4 ramps"):
        check_emulated(settings_of(folder, V100, emulated={V100: PROFILE | {"block_s": [[1.0, 2.0]] * 3}}), V100, card)
