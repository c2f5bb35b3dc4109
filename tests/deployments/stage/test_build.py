"""The runners of replicas: real and emulated devices, chains, and decoders with memory of sequences."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.emulated import PacedRunner
from deployments.replica.host import (
    StageHost,
    build_policy,
    build_runner,
    check_emulated,
    policy_for,
    raise_failures,
    warm_up,
)
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import MemoryUse
from earlyexit.errors import InputError, PlanError
from earlyexit.network.boundary import Encoded, Split, entry_piece
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel, TorchRunner
from earlyexit.network.store import (
    CARD_FILE,
    ModelFolder,
    chain_card,
    open_memory,
    read_card,
    save_model,
    tokens_that_fit,
)
from earlyexit.sequences.sequence import PAGE_TOKENS, run_of
from earlyexit.tasks.token import TokenTask
from optimizer.plans.plan import Plan, PolicySpec, Stage, early_exit_plan
from optimizer.plans.plan_file import plan_document
from profiles.records import ExitRecords
from tests.clock import ManualClock
from tests.deployments.control.control_fakes import problem
from tests.deployments.stage.small_model import save_records, save_small_model
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.cuts import answers_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import of_tokens, wire_of

ROOT = Path(__file__).parents[3]
V100, A100 = "emulated:V100", "emulated:A100"
RAMPS = (0, 1, 2)
PROFILE = {"batch": [1, 4], "block_s": [[1.0, 2.0]] * 4, "ramp_s": [[0.5, 0.5]] * 3, "time_scale": 10.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four blocks with ramps after 0, 1 and 2, and exit records of two inputs."""
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    save_records(folder, "entropy", [[0.1, 0.1, 0.1], [0.9, 0.9, 0.1]])
    return folder


def recorded_spec(folder: Path, thresholds: float = 0.4) -> PolicySpec:
    return PolicySpec(name="recorded", thresholds=thresholds, records=str(folder / "records.npz"))


def settings_of(folder: Path, policy: PolicySpec | None = None, **changed: Any) -> ServeSettings:
    plan = early_exit_plan(4, RAMPS, policy or recorded_spec(folder), batch=4, device=V100)
    emulated = {V100: PROFILE, A100: PROFILE | {"decisions": "computed"}}
    fields = {"model": str(folder), "plan": plan_document(plan), "emulated": emulated} | changed
    return ServeSettings.model_validate(fields)


def runner_of(settings: ServeSettings, device: str = V100) -> PacedRunner[Any]:
    runner = build_runner(settings, device, clock=ManualClock())
    assert isinstance(runner, PacedRunner)
    return runner


@pytest.mark.gpu
def test_a_gpu_answers_as_the_cpu_does_from_graphs(folder: Path) -> None:
    settings, policy = settings_of(folder), build_policy(PolicySpec(name="confidence", thresholds=0.6))
    wire = wire_of([of_tokens(list(range(length))) for length in (5, 8, 1, 3, 8, 2, 7)])
    splits = (Split(first=0, end=2, batch=4, ramps=(0, 1)), Split(first=2, end=4, batch=4, ramps=(2,)))
    found = []
    for device in ("cpu", "cuda"):
        runner = build_runner(settings, device, clock=MonotonicClock())
        runner.prepare(splits)
        runner.follow(policy)
        warm_up(runner, [splits], clock=MonotonicClock())
        found.append(answers_of(runner, splits, runner.from_wire(wire)))
    assert found[0] == found[1]


def test_settings_of_an_emulated_device_are_checked_before_a_replica_starts(folder: Path) -> None:
    card = read_card(folder)
    check_emulated(settings_of(folder), V100, card)
    check_emulated(settings_of(folder), "cpu", card)
    entropy = settings_of(folder, PolicySpec(name="entropy", thresholds=0.4))
    said = f"{V100} decides by exit records.* must be 'recorded', not"
    with pytest.raises(PlanError, match=f"{said} 'entropy'"):
        check_emulated(entropy, V100, card)
    with pytest.raises(PlanError, match=f"{said} 'entropy'"):
        runner_of(entropy)
    with pytest.raises(PlanError, match="emulated:T4 has no latency profile"):
        check_emulated(settings_of(folder), "emulated:T4", card)


def test_records_without_answers_are_refused_before_a_replica_starts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "losses.npz"
    replace(ExitRecords.load(folder / "records.npz"), answers_NE=None).save(path)
    spec = PolicySpec(name="recorded", thresholds=0.4, records=str(path))
    with pytest.raises(PlanError, match=f"{V100} answers from .*losses.npz: .* no answers.*; decisions: computed"):
        check_emulated(settings_of(folder, spec), V100, read_card(folder))


def test_a_profile_that_does_not_fit_is_refused(folder: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_s": [[1.0, 2.0]]}, "block_s has 1 rows; 4 are needed, one per block"),
        ({"block_s": [[1.0, 2.0]] * 3 + [[1.0]]}, "inhomogeneous"),
        ({"batch": [1]}, "cannot reshape|block_s needs 1 values a row"),
    ]
    for changed, said in wrong:
        with pytest.raises(PlanError, match=f"the profile of {V100}.*{said}"):
            runner_of(settings_of(folder, emulated={V100: PROFILE | changed}))


def test_a_running_replica_keeps_its_exit_records(folder: Path) -> None:
    others = PolicySpec(name="recorded", thresholds=0.4, records="others.npz")
    with pytest.raises(PlanError, match=r"cannot change its exit records \(to .*others\.npz\)"):
        policy_for(settings_of(folder), V100, others)


def test_without_ramps_in_its_plan_an_application_begins_with_its_controllers_policy(folder: Path) -> None:
    plan = plan_document(early_exit_plan(4, (), recorded_spec(folder), batch=4, device=V100)) | {"policy": None}
    policy = {"name": "recorded", "thresholds": {"0": 0.25}, "records": "records.npz"}
    control = {"problem": problem(), "policy": policy, "state": "state.sqlite"}
    settings = settings_of(folder, plan=plan, control=control)
    assert settings.starting_policy == PolicySpec(name="recorded", thresholds={0: 0.25}, records="records.npz")
    with pytest.raises(PlanError, match=f"{V100} decides by exit records.* must be 'recorded', not none"):
        runner_of(settings_of(folder, plan=plan))


def test_warming_an_emulated_device_takes_the_times_of_the_profile(folder: Path) -> None:
    slept: list[float] = []
    settings = settings_of(folder)
    runner = build_runner(settings, V100, clock=ManualClock(), sleep=slept.append)
    runner.follow(0.4)
    split = Split(first=0, end=2, batch=4, ramps=(0,))
    times = warm_up(runner, [(split, Split(first=2, end=4, batch=4))], clock=ManualClock())
    assert slept == []
    # Times ten: one input takes 1 s per block and 0.5 s for the ramp; four inputs take 2 s per block.
    assert (times.first_s(split, 1), times.batch_s(split, 1), times.batch_s(split, 4 * 16)) == (15.0, 25.0, 45.0)


@pytest.mark.parametrize("device", [V100, A100], ids=["recorded", "computed"])
def test_warming_an_emulated_device_learns_times_of_inputs_without_tokens(
    folder: Path, tmp_path: Path, device: str
) -> None:
    without = shutil.copytree(folder, tmp_path / "model")
    written = json.loads((without / "model.json").read_text())
    written["codec"]["max_length"] = 1
    written["inputs"] = [each | {"per_token": False} for each in written["inputs"]]
    (without / "model.json").write_text(json.dumps(written))
    runner = build_runner(settings_of(without), device, clock=ManualClock())
    split = Split(first=0, end=2, batch=4)
    times = warm_up(runner, [(split,)], clock=ManualClock())
    assert times.mean_tokens(split) == 1.0
    assert [times.batch_s(split, size) for size in (1, 4)] == [20.0, 40.0]


class SteppingClock:
    """A clock that advances by a second at every reading, so that times are not noisy."""

    def __init__(self) -> None:
        self._looks = 0

    def now_s(self) -> float:
        self._looks += 1
        return float(self._looks)


def test_warming_a_real_device_measures_its_splits(folder: Path) -> None:
    settings = settings_of(folder, PolicySpec(name="entropy", thresholds=0.4))
    clock = SteppingClock()
    runner = build_runner(settings, "cpu", clock=clock)
    splits = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=4, batch=2, ramps=(1, 2)))
    times = warm_up(runner, [splits], clock=clock)
    assert all(0 < times.first_s(split, 2) <= times.batch_s(split, 2) for split in splits)


def test_a_recorded_replica_loads_no_torch(folder: Path) -> None:
    settings = settings_of(folder)
    code = f"""
import sys
import deployments.replica.replica
from deployments.replica.host import build_runner, policy_for, warm_up
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from earlyexit.network.boundary import Split

settings = ServeSettings.model_validate({settings.model_dump()!r})
spec = settings.starting_policy
runner = build_runner(settings, {V100!r}, clock=MonotonicClock())
runner.follow(policy_for(settings, {V100!r}, spec))
warm_up(runner, [(Split(first=0, end=4, batch=4, ramps=(0, 1)),)], clock=MonotonicClock())
assert not {{"torch", "transformers", "scipy"}} & set(sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


NEVER = PolicySpec(name="confidence", thresholds=2.0)
SPLITS = (
    Split(first=0, end=2, batch=4, ramps=(1,)),
    Split(first=2, end=4, batch=2, ramps=(2,)),
    Split(first=4, end=5, batch=2),
)
CHAIN_PROFILE = {
    "batch": [1, 4],
    "block_s": [[1.0, 2.0]] * 2 + [[3.0, 6.0]] * 3,
    "ramp_s": [[0.5, 0.5]] * 4,
    "decisions": "computed",
}


@pytest.fixture(scope="module")
def chain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of a network of two blocks and one of three."""
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


def chain_settings(chain_folder: Path, device: str, **changed: Any) -> ServeSettings:
    plan = Plan(stages=(Stage(device=device, replicas=1, splits=SPLITS),), policy=NEVER, networks=(2, 5))
    fields = {"model": str(chain_folder), "plan": plan_document(plan), "emulated": {V100: CHAIN_PROFILE}} | changed
    return ServeSettings.model_validate(fields)


def test_every_split_of_every_network_is_warmed_and_none_crosses(chain_folder: Path) -> None:
    settings = chain_settings(chain_folder, "cpu", attention="padded")
    runner = build_runner(settings, "cpu", clock=MonotonicClock())
    assert isinstance(runner, TorchRunner)
    times = warm_up(runner, [SPLITS], clock=MonotonicClock(), starts=read_card(chain_folder).chain.starts)
    assert all(0 < times.batch_s(split, 4) < math.inf for split in SPLITS)


def test_an_emulated_accelerator_takes_the_rows_of_the_whole_chain(chain_folder: Path) -> None:
    settings, card = chain_settings(chain_folder, V100), read_card(chain_folder)
    check_emulated(settings, V100, card)
    runner = build_runner(settings, V100, clock=ManualClock())
    assert isinstance(runner, PacedRunner)
    assert [runner.pace.split_s(split, 1) for split in SPLITS] == [(2.5, 2.5), (3.5, 6.5), (3.0, 3.0)]
    with pytest.raises(PlanError, match="block_s has 3 rows; 5 are needed, one per block"):
        check_emulated(
            chain_settings(chain_folder, V100, emulated={V100: CHAIN_PROFILE | {"block_s": [[1.0, 2.0]] * 3}}),
            V100,
            card,
        )


VOCABULARY, NUM_BLOCKS = 32, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_blocks": NUM_BLOCKS,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 8,
    "intermediate_size": 16,
    "max_length": 4096,
}
STAGE = Stage(
    device="cpu",
    replicas=1,
    splits=(Split(first=0, end=1, batch=32, ramps=(0,)), Split(first=1, end=NUM_BLOCKS, batch=32, ramps=(1,))),
)
PLAN = Plan(stages=(STAGE,), policy=PolicySpec(name="confidence", thresholds=0.04))


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    ramps = RampOptions(at=(0, 1), pooling="last")
    return random_model(SIZES, family="llama", task=TokenTask(VOCABULARY), ramps=ramps).requires_grad_(False)


def test_a_replica_of_a_decoder_warms_up_and_reports_its_free_pages(model: EarlyExitModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    settings = ServeSettings(model=str(tmp_path), plan=PLAN, kv_tokens=100, kv_fill="copy")
    clock = MonotonicClock()
    runner = build_runner(settings, "cpu", clock=clock)
    times = warm_up(runner, [STAGE.splits], clock=clock)
    assert all(times.batch_s(split, 16.0) > 0 for split in STAGE.splits)
    host = StageHost(settings, "cpu", runner, clock, raise_failures)
    kept = MemoryUse(num_pages=100 // PAGE_TOKENS, page_tokens=PAGE_TOKENS)
    assert host.report(replica="r", node="n").memory == kept, "warming up leaves no pages in use"
    assert kept.num_pages == 6


def test_by_default_free_memory_limits_the_kept_tokens() -> None:
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=True) == 80
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=False) == 25
    assert tokens_that_fit(1 << 40, 1 << 20, 1 << 40, on_gpu=False) == 4 << 10
    assert tokens_that_fit(1 << 40, 1, 128, on_gpu=False) == 256 * 128
    assert tokens_that_fit(0, 100, 1000, on_gpu=False) == PAGE_TOKENS


def test_an_input_without_a_sequence_is_refused_with_advice(model: EarlyExitModel) -> None:
    memory = open_memory(model, 1024, "compute", 0)
    assert memory is not None
    ids, run = np.arange(2, dtype=np.int32), np.array([run_of(0, 0, 4, 2)], np.int32)
    [error] = memory.admit(entry_piece(["a"], [Encoded(2, (ids, run))]), [0])
    assert isinstance(error, InputError)
    assert "send a request for generation" in str(error)
