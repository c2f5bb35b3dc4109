"""How `offramp serve` chooses plan, replicas and backend from the profile in the model folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from earlyexit.backends import BackendName
from earlyexit.network.store import read_card
from offramp.commands import profile as profiling
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import ASKED, KEPT_FILE, MOST_S, affordable, circumstances, kept_profile
from offramp.commands.serve import folder_settings
from offramp.spec.documents import ServeJob
from optimizer.plans.plan import Plan, PolicySpec, early_exit_plan, stock_plan
from optimizer.problems.problem import PlanProblem
from profiles.latency import LatencyProfile
from profiles.table import LatencyTable
from tests.latency_profile import latency_profile
from tests.offramp.service.service_folders import write_calibration, write_model

CORES = 4
BATCHES = (1, 2, 4, 8, 16)
BLOCK_S = 0.005


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "num_cores", lambda: CORES)
    monkeypatch.setattr(profiling, "machine_memory", lambda: (64e9, 64e9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A calibrated model of three blocks and its profile; a batch of any size takes 15 ms without exits."""
    made = write_model(tmp_path / "model")
    card = read_card(made)
    asked = circumstances(made, ProfileJob(backend="auto"))
    latency_profile(
        ramps=card.ramps,
        device="cpu",
        backend="onnx",
        dtype="float32",
        tables={16: LatencyTable.of_rows((1, 4), [[BLOCK_S, BLOCK_S]] * 3, [[0.0, 0.0]] * 2)},
        provenance={ASKED: asked, "created_at": "today"},
    ).save(made / KEPT_FILE)
    return made


def settings(folder: Path, said: list[str] | None = None, **options: Any) -> Any:
    job = ServeJob.model_validate({"model": folder, **options})
    return folder_settings(job, folder, (said if said is not None else []).append)


def test_plan_replicas_and_backend_follow_from_profile_and_options(folder: Path) -> None:
    said: list[str] = []
    found = settings(folder, said)
    plan: Plan = found.plan
    assert (plan.dispatch, plan.ramps, {split.batch for split in plan.splits}) == ("work-conserving", (0, 1), {4})
    assert [(stage.device, stage.replicas) for stage in plan.stages] == [("cpu", CORES // 2)]
    assert plan.overlap_below == 5, "every replica runs two batches at once"
    assert (found.backend, found.threads_per_replica) == ("onnx", 1)
    assert said[0] == f"profile: {folder / KEPT_FILE}, of today"
    blocks = ", ".join(f"block {block} in batches of 4" for block in range(3))
    assert said[1] == f"plan: {blocks}, exits after 0, 1; 457 inputs/s by a thread, without exits 267"
    start = "replicas: 2 with two batches at once, 1 thread for each batch by onnx, work-conserving, for 4 cores"
    assert said[2].startswith(start)
    given = settings(folder, batch=1, replicas=3, threads=2, dispatch="deferred", order="arrival")
    assert {split.batch for split in given.plan.splits} == {1}
    assert (given.plan.stages[0].replicas, given.threads_per_replica) == (3, 2)
    assert (given.plan.dispatch, given.plan.order.name, given.plan.overlap_below) == ("deferred", "arrival", None)
    for thresholds in ({1: 0.5}, {}):  # of a calibration of some ramps, and of one that found none
        write_calibration(folder, thresholds)
        assert settings(folder).plan.ramps == tuple(thresholds)
    named = settings(folder, plan="stock")
    assert (named.plan.stages[0].replicas, named.plan.splits[0].batch, named.backend) == (1, 32, "torch")
    assert named.plan.dispatch == "work-conserving"
    affordable_of = {0.01: (BATCHES, 5), 0.2: (BATCHES, 2), 0.5: (BATCHES[:4], 1), MOST_S: (BATCHES[:1], 1)}
    assert {round_s: affordable(round_s, BATCHES) for round_s in affordable_of} == affordable_of


def test_on_a_gpu_one_batch_is_prepared_while_the_other_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = LatencyProfile.load(folder / KEPT_FILE)
    asked = circumstances(folder, ProfileJob(device="cuda"))
    replace(kept, device="cuda", backend="torch", provenance={ASKED: asked, "created_at": "today"}).save(
        folder / KEPT_FILE
    )
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    said: list[str] = []
    plan: Plan = settings(folder, said, device="cuda", replicas=2).plan
    assert [(stage.device, stage.replicas) for stage in plan.stages] == [("cuda", 2)]
    assert (plan.dispatch, plan.overlap_below) == ("work-conserving", 5)
    assert said[1].endswith(" inputs/s by a GPU, without exits 267")
    assert said[2].startswith(
        "replicas: 2 with two batches at once, 1 thread for each batch by torch, work-conserving, for a GPU each;"
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert settings(folder, device="cuda").plan.overlap_below is None, "a GPU elsewhere cannot be measured here"


def test_a_plan_without_exits_is_one_split_with_its_own_rate(folder: Path) -> None:
    first, others = [0.001, 0.02], [BLOCK_S, BLOCK_S]  # block 0 is cheaper for single inputs, and ramps take a second
    table = LatencyTable.of_rows((1, 4), [first, others, others], [[1.0, 1.0]] * 2)
    replace(LatencyProfile.load(folder / KEPT_FILE), tables={16: table}).save(folder / KEPT_FILE)
    said: list[str] = []
    assert (len(settings(folder, said).plan.splits), "no exits; 133 inputs/s" in said[1]) == (1, True), said[1]


@pytest.mark.parametrize(
    ("bytes_free", "rate_per_s", "backend", "chosen"),
    [
        (64e9, 100.0, "onnx", (4, 1)),
        (64e9, 4000.0, "onnx", (2, 1)),
        (0.7e9, 100.0, "torch", (2, 2)),
        (0.7e9, 1700.0, "torch", (1, 4)),  # memory for one process, which runs one batch at a time
    ],
)
def test_concurrent_batches_are_limited_by_cores_memory_and_ingress(
    bytes_free: float,
    rate_per_s: float,
    backend: BackendName,
    chosen: tuple[int, int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "machine_memory", lambda: (64e9, bytes_free))
    assert profiling._workers(folder, rate_per_s, backend) == chosen


@pytest.mark.parametrize(
    ("cores", "workers", "rate_per_s", "backend", "in_pairs", "chosen"),
    [
        (2, 2, 600.0, "onnx", True, (1, "filling", 9)),  # 1.25 batches and their requests keep two cores busy
        (2, 2, 300.0, "torch", True, (1, "work-conserving", 9)),  # 1.54
        (2, 2, 600.0, "torch", True, (2, "filling", None)),
        (2, 2, 600.0, "onnx", False, (2, "filling", None)),
        (2, 1, 600.0, "onnx", True, (1, "work-conserving", None)),
        (5, 5, 600.0, "onnx", True, (2, "work-conserving", 9)),
    ],
)
def test_dispatch_is_filling_if_one_batch_and_the_ingress_keep_the_cores_busy(
    cores: int,
    workers: int,
    rate_per_s: float,
    backend: BackendName,
    in_pairs: bool,
    chosen: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "num_cores", lambda: cores)
    plan = replace(stock_plan(3, batch=8), predicted={"rate_per_s": rate_per_s})
    found = profiling.on_cores(plan, full_model_problem(slo_s=0.01), workers, backend, in_pairs=in_pairs)
    assert (found.stages[0].replicas, found.dispatch, found.overlap_below) == chosen


def full_model_problem(*, slo_s: float) -> PlanProblem:
    """Batches of 1, 4 and 16 take 3, 6 and 15 ms."""
    table = LatencyTable.of_rows((1, 4, 16), [[0.001, 0.002, 0.005]] * 3, [])
    profile = latency_profile(ramps=(), device="cpu", dtype="float32", tables={16: table})
    return profiling.processor_problem(profile, None, 1, slo_s)


@pytest.mark.parametrize(("slo_s", "batch"), [(0.038, 16), (0.037, 4), (0.001, 2)])
def test_two_full_batches_of_the_model_without_exits_keep_the_slo(slo_s: float, batch: int) -> None:
    problem, policy = full_model_problem(slo_s=slo_s), PolicySpec(name="entropy", thresholds={0: 0.4})
    for plan, largest in ((stock_plan(3, batch=2), batch), (early_exit_plan(3, (0,), policy, batch=2), 2)):
        plan = replace(plan, predicted={"rate_per_s": 300.0})
        assert profiling.on_cores(plan, problem, 1, "onnx").splits[0].batch == largest


def test_a_profile_is_measured_once_per_machine_in_another_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from pathlib import Path; from offramp.commands.jobs import ProfileJob; "
        "from offramp.commands.profile import kept_profile; "
        "kept_profile(Path(sys.argv[1]), ProfileJob(), print); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True, timeout=300)
    told, measured, loaded = done.stdout.splitlines()
    assert told == f"profile: measuring {model}, once on this machine; usually less than a minute"
    assert measured.startswith("profile: measured in ")
    assert loaded == "False"
    said, path = list[str](), model / KEPT_FILE
    monkeypatch.setattr(profiling, "num_cores", lambda: 99)
    monkeypatch.setattr(profiling, "run_in_subprocess", lambda work, *given: work(*given))
    first, again = (kept_profile(model, ProfileJob(), said.append) for _ in range(2))
    assert (first.lengths, first.ramps) == ((16,), (0, 1))
    assert first.tables[16].batches == BATCHES
    assert again.provenance == first.provenance
    assert said[1].endswith(f" s of processor time, since {path} differs in cores; kept in {path}")
    assert said[2] == f"profile: {path}, of {first.provenance['created_at']}"


def test_a_profile_that_cannot_be_read_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, said = folder / KEPT_FILE, LatencyProfile.load(folder / KEPT_FILE), list[str]()
    monkeypatch.setattr(profiling, "run_in_subprocess", lambda *_: (whole, 1.0))
    path.write_text("{")
    assert kept_profile(folder, ProfileJob(), said.append).lengths == LatencyProfile.load(path).lengths == (16,)
    assert said[0].startswith(f"profile: {path}:1: not JSON: ")


@pytest.mark.parametrize("has_begun", [True, False])
def test_processes_of_a_command_end_with_it(has_begun: bool) -> None:
    sleeps = "import time; print('on', flush=True); time.sleep(60)"
    code = f"from offramp.commands import output, serve; output.run_in_subprocess(exec, {sleeps!r}, {{'s': serve.run}})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert not has_begun or command.stdout.readline() == b"on\n"
        while not (started := psutil.Process(command.pid).children(recursive=True)):
            time.sleep(0.5)
        command.kill()
        assert psutil.wait_procs(started, timeout=10.0)[1] == []
