"""The host of a stage on an emulated device, and its callers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cluster.emulated import EmulatedPiece, PacedRunner, RecordedRunner
from deployments.choices import TracingSettings
from deployments.replica.host import BROKEN_AFTER, HUNG_S, NO_EPOCH, OpenCall, StageHost, build_runner, chunks_by_call
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment, Chunk, SplitRun, StageCall
from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Release, Step
from earlyexit.engine.engine import Batch, Dispatch
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split, WirePiece
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage, early_exit_plan
from optimizer.plans.plan_file import plan_document
from profiles.records import ExitRecords
from tests.clock import ManualClock
from tests.deployments.stage.small_model import save_records, save_small_model

V100 = "emulated:V100"


def policy_of(folder: Path, threshold: float) -> PolicySpec:
    return PolicySpec(name="recorded", thresholds=threshold, records=str(folder / "records.npz"))


def call_of(ids: Sequence[str], *, next_block: int = 0, lengths: Sequence[int] = ()) -> StageCall:
    """Returns a call without deadlines. Without `lengths`, each input has length 1."""
    lengths_B = np.array(lengths or [1] * len(ids), dtype=np.int32)
    piece = WirePiece(sample_ids=tuple(ids), next_block=next_block, lengths_B=lengths_B, tensors=(), state_BS=None)
    return StageCall(serial=1, piece=piece, remaining_s=(math.inf,) * len(ids), reserve_s=0.0)


class Replica:
    """A host and its callers."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        runner = build_runner(settings, V100, clock=MonotonicClock())
        assert isinstance(runner, PacedRunner)
        self.runner: PacedRunner[Any] = runner
        self.host = StageHost(settings, V100, runner, MonotonicClock(), self.deliver)

    def records(self) -> ExitRecords:
        return ExitRecords.load(Path(self.settings.model) / "records.npz")

    def deliver(self, releases: list[Release[Any]]) -> None:
        for opened, chunk in chunks_by_call(releases):
            opened.reply(chunk)

    def assignment(
        self, epoch: int, *splits: Split, threshold: float = 0.5, dispatch: Dispatch = "work-conserving"
    ) -> Assignment:
        stage = Stage(device=V100, replicas=1, splits=splits)
        policy = policy_of(Path(self.settings.model), threshold)
        return Assignment(epoch=epoch, slot="split-emulated-V100-0", stage=stage, policy=policy, dispatch=dispatch)

    async def call(
        self,
        ids: Sequence[str],
        assignment: Assignment,
        *,
        next_block: int = 0,
        probe: bool = False,
        lengths: Sequence[int] = (),
        traced: tuple[int, ...] = (),
    ) -> list[Chunk]:
        """Returns the reply's parts. Without `lengths`, each input has length 1. `traced`: positions of inputs."""
        call = structs.replace(call_of(ids, next_block=next_block, lengths=lengths), probe=probe)
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Chunk] = asyncio.Queue()

        def reply(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, chunk)

        begun: dict[str, list[SplitRun]] = {ids[position]: [] for position in traced}
        self.host.submit(call, assignment, OpenCall(len(ids), reply, begun))
        chunks: list[Chunk] = []
        while sum(len(chunk.settled) for chunk in chunks) < len(ids):
            chunks.append(await asyncio.wait_for(parts.get(), 10))
        return chunks

    async def told(self, ids: Sequence[str], assignment: Assignment, *, next_block: int = 0) -> tuple[str, str]:
        """Returns the inputs that were answered, and those that go on."""
        chunks = await self.call(ids, assignment, next_block=next_block)
        answered = "".join(answer.sample_id for chunk in chunks for answer, _ in chunk.answers)
        return answered, "".join("".join(c.survivors.sample_ids) for c in chunks if c.survivors is not None)


RAMPS = (0, 1, 2)
FIRST = Split(first=0, end=2, batch=4, ramps=(0, 1))
LAST = Split(first=2, end=4, batch=4, ramps=(2,))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    """Returns settings of an emulated device that takes no time. Inputs a, b and c leave at ramps 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    save_records(folder, "confidence", [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    plan = early_exit_plan(4, RAMPS, policy_of(folder, 0.5), batch=4, device=V100)
    emulated = {V100: {"batch": [1, 4], "block_s": [[0.0, 0.0]] * 4, "ramp_s": [[0.0, 0.0]] * 3}}
    return ServeSettings.model_validate({"model": str(folder), "plan": plan_document(plan), "emulated": emulated})


@pytest.fixture
async def replica(settings: ServeSettings) -> AsyncIterator[Replica]:
    replica = Replica(settings)
    replica.host.threads.start()
    yield replica
    replica.host.threads.stop()


class OneThreshold(RecordedRunner):
    """Uses the same threshold for every policy."""

    def follow(self, policy: object) -> None:
        super().follow(0.5)


async def test_inputs_stop_or_stay_as_the_plan_of_the_moment_says(replica: Replica) -> None:
    staying = [replace(split, after_answer="stay") for split in (FIRST, LAST)]
    assert await replica.told("abcd", replica.assignment(1, FIRST)) == ("ab", "cd")
    chunks = await replica.call("abcd", replica.assignment(2, *staying))
    early = [(answer.sample_id, answer.exit) for chunk in chunks for answer, _ in chunk.early]
    assert early == [("a", 0), ("b", 1), ("c", 2)]
    assert "".join(answer.sample_id for chunk in chunks for answer, _ in chunk.answers) == "abcd"
    seen = [(seen.sample_id, seen.exit) for chunk in chunks for seen in chunk.seen]
    assert sorted(seen) == [(name, block) for name in "abcd" for block in range(4)]
    assert await replica.told("abcd", replica.assignment(3, FIRST)) == ("ab", "cd")
    # A late call of the earlier plan runs in the current split if there is one, and else in its own.
    assert await replica.told("abcd", replica.assignment(2, *staying)) == ("ab", "cd")
    chunks = await replica.call("c", replica.assignment(2, *staying), next_block=2)
    assert [[answer.exit for answer, _ in chunk.early] for chunk in chunks] == [[2], []]


async def test_a_replica_follows_plans_with_and_without_token_budgets(replica: Replica) -> None:
    bounded = replace(FIRST, tokens=8)
    counted = []
    for epoch, split in enumerate([bounded, FIRST, bounded], start=1):
        chunks = await replica.call("abcd", replica.assignment(epoch, split, LAST), lengths=(4, 4, 4, 9))
        assert sorted(answer.sample_id for chunk in chunks for answer, _ in chunk.answers) == list("abcd")
        first = replica.host.report(replica="r", node="n").splits[0]
        counted.append((first["batches"], first["tokens"], first["token_fill"]))
    # 4 + 4, then 4, then 9 alone; or all at once.
    assert counted == [(3, 21, 21 / 24), (1, 21, None), (3, 21, 21 / 24)]


async def test_replicas_take_thresholds_from_the_plan(replica: Replica) -> None:
    assert await replica.told("abcd", replica.assignment(1, FIRST, LAST)) == ("abcd", "")
    [*_, last] = await replica.call("ab", replica.assignment(2, FIRST, LAST, threshold=2.0))
    assert [answer.exit for answer, _ in last.answers] == [3, 3]


def plan_of(policy: PolicySpec, epoch: int, *splits: Split) -> PlacedPlan:
    """Returns a plan with one stage per split."""
    stages = tuple(Stage(device=V100, replicas=1, splits=(split,)) for split in splits)
    return PlacedPlan(plan=Plan(stages=stages, policy=policy, epoch=epoch))


async def test_a_replica_warms_up_all_stages_of_a_plan_before_it_is_assigned_one(replica: Replica) -> None:
    warmed: list[Split] = []

    class Warmed(RecordedRunner):
        def warm_up_pieces(self, split: Split, size: int) -> Any:
            warmed.append(split)
            return super().warm_up_pieces(split, size)

    replica.runner.inner = Warmed(replica.records(), 4)
    await replica.host.prepare([plan_of(policy_of(Path(replica.settings.model), 0.5), 7, FIRST, LAST)])
    assert set(warmed) == {FIRST, LAST}
    assert (replica.host.epoch, replica.host.slot) == (NO_EPOCH, "")
    assert replica.host.report(replica="r", node="n").times == ()  # the warm-up does not count
    assert await replica.told("abcd", replica.assignment(7, FIRST)) == ("ab", "cd")


async def test_a_replica_that_starts_during_a_change_to_a_plan_with_fewer_thresholds_is_warm_for_both_plans(
    settings: ServeSettings, replica: Replica
) -> None:
    emulated = settings.emulated[V100].model_copy(update={"decisions": "computed"})
    computed = settings.model_copy(update={"emulated": {V100: emulated}})
    runner = OneThreshold(replica.records(), 4)
    host = StageHost(computed, V100, runner, ManualClock(), replica.deliver)
    few, all_ramps = (PolicySpec(name="confidence", thresholds=dict.fromkeys(ramps, 0.5)) for ramps in ((2,), RAMPS))
    await host.prepare([plan_of(few, 8, replace(FIRST, ramps=()), LAST), plan_of(all_ramps, 7, FIRST, LAST)])
    assert host.report(replica="r", node="n").splits == ()


async def test_a_replica_starts_for_the_followed_plan_where_it_cannot_run_the_coming_one(replica: Replica) -> None:
    policy = policy_of(Path(replica.settings.model), 0.5)
    plans = [
        PlacedPlan(plan=replace(early_exit_plan(4, RAMPS, policy, batch=batch, device=V100), epoch=epoch))
        for epoch, batch in ((8, 5), (7, 4))
    ]
    await replica.host.prepare_first(plans)
    assert replica.host.epoch == NO_EPOCH
    with pytest.raises(PlanError, match="the profile has no batch of 5"):
        await replica.host.prepare_first([plans[0], plans[0]])


async def test_a_call_that_comes_while_the_first_assignment_is_prepared_wins(replica: Replica) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(RecordedRunner):
        def warm_up_pieces(self, split: Split, size: int) -> Any:
            asked.set()
            assert go_on.wait(10)
            return super().warm_up_pieces(split, size)

    replica.runner.inner = Slow(replica.records(), 4)
    coming = plan_of(policy_of(Path(replica.settings.model), 0.5), 5, FIRST, LAST)
    preparing = asyncio.create_task(replica.host.prepare([coming]))
    await asyncio.to_thread(asked.wait, 10)
    assert await replica.told("cd", replica.assignment(6, LAST), next_block=2) == ("cd", "")
    go_on.set()
    await preparing
    report = replica.host.report(replica="r", node="n")
    assert (report.epoch, [(split["first"], split["end"]) for split in report.splits]) == (6, [(2, 4)])


async def test_a_plan_is_prepared_once_at_a_time_although_the_controller_asks_again(replica: Replica) -> None:
    steps: list[str] = []

    class Slow(RecordedRunner):
        def prepare(self, splits: Sequence[Split]) -> None:
            steps.append("begins")
            time.sleep(0.05)
            steps.append("ends")

    replica.runner.inner = Slow(replica.records(), 4)
    plans = [plan_of(policy_of(Path(replica.settings.model), 0.5), 5, FIRST, LAST)]
    await asyncio.gather(*(replica.host.prepare(plans) for _ in range(2)))
    assert steps == ["begins", "ends"] * 2


async def test_a_report_counts_batches_without_probes(replica: Replica) -> None:
    first = replica.assignment(2, FIRST)
    await replica.call("abcd", first)
    await replica.call("abcd", first, probe=True)
    await replica.call("cd", first)
    report = replica.host.report(replica="r1", node="n1")
    assert (report.slot, report.replica, report.node) == ("split-emulated-V100-0", "r1", "n1")
    assert (report.device, report.epoch, report.waiting) == (V100, 2, 0)
    assert {(each.first, each.end, each.ramps) for each in report.times} == {(0, 2, (0, 1))}
    assert [(each.size, each.batches) for each in report.times] == [(4, 1), (2, 1)]


async def test_a_traced_input_whose_batch_fails_shows_both_runs(settings: ServeSettings) -> None:
    class FailsTogether(RecordedRunner):
        def run(self, batch: Batch[EmulatedPiece]) -> Iterator[Step[EmulatedPiece]]:
            if len(batch.members) > 1:
                raise ValueError("too many")
            return super().run(batch)

    tracing = TracingSettings(endpoint="http://127.0.0.1:1")
    replica = Replica(settings.model_copy(update={"tracing": tracing}))
    replica.runner.inner = FailsTogether(replica.records(), 4)
    replica.host.threads.start()
    chunks = await replica.call("ab", replica.assignment(1, FIRST), traced=(1,))
    replica.host.threads.stop()
    runs = {answer.sample_id: [run.batch for run in each.runs] for chunk in chunks for answer, each in chunk.answers}
    assert runs == {"a": [], "b": [2, 1]}


async def test_a_replica_is_unhealthy_if_its_device_always_fails_hangs_or_has_ended(settings: ServeSettings) -> None:
    class Broken(RecordedRunner):
        def run(self, batch: Batch[EmulatedPiece]) -> Iterator[Step[EmulatedPiece]]:
            raise MemoryError("no device")

    replica = Replica(settings)
    replica.host.threads.start()
    replica.host.check()
    replica.runner.inner = Broken(replica.records(), 4)
    for _ in range(BROKEN_AFTER):
        await replica.call("a", replica.assignment(1, FIRST))
    with pytest.raises(RuntimeError, match="the model failed on 20 inputs in a row"):
        replica.host.check()
    replica.host.threads.stop()
    host = StageHost(settings, V100, replica.runner, clock := ManualClock(0.0), replica.deliver)
    call = structs.replace(call_of("a"), remaining_s=(5.0,))
    host.submit(call, replica.assignment(1, FIRST), OpenCall(1, lambda _: None))
    assert isinstance(host.device.start_next(), Batch), "it does not end"
    host.threads.start()
    clock.advance(5.0 + HUNG_S)
    host.check()
    clock.advance(0.1)
    with pytest.raises(RuntimeError, match="a batch still runs 300 s after the last deadline"):
        host.check()
    host.threads.stop()
    with pytest.raises(RuntimeError, match="the device thread has ended"):
        host.check()


# Batches that overlap

BLOCK_S = 0.1


def test_a_call_that_counts_as_full_begins_beside_a_running_batch(settings: ServeSettings) -> None:
    replica = Replica(settings)  # its device threads do not run
    assignment = replica.assignment(1, Split(first=0, end=4, batch=4, overlap_below=5), dispatch="filling")
    sizes = []
    for sample_id, counts_as_full in (("d#1", False), ("d#2", False), ("d#3", True)):
        call = structs.replace(call_of([sample_id]), counts_as_full=counts_as_full)
        replica.host.submit(call, assignment, OpenCall(1, lambda _: None))
        batch = replica.host.device.start_next()
        sizes.append(len(batch.members) if isinstance(batch, Batch) else 0)
    assert sizes == [1, 0, 2]


async def test_a_replica_runs_the_next_batch_beside_one_of_few_inputs(settings: ServeSettings) -> None:
    """With a flat profile, neither batch becomes slower, and the device's seconds count once."""
    (emulated,) = settings.emulated.values()
    flat = emulated.model_copy(update={"block_s": [[BLOCK_S, BLOCK_S]] * 4})
    replica = Replica(settings.model_copy(update={"emulated": {V100: flat}}))
    whole = Split(first=0, end=4, batch=4, ramps=(0,), overlap_below=2)
    assignment = replica.assignment(1, whole)
    replica.host.threads.start()
    first = asyncio.create_task(replica.call(("d#1", "a#1", "a#2", "a#3"), assignment))
    await asyncio.sleep(BLOCK_S / 2)
    await asyncio.gather(first, replica.call(("d#2",), assignment))
    replica.host.threads.stop()  # seconds are counted once answers are out
    (split,) = replica.host.report(replica="r", node="n").splits
    assert (split["batches"], split["inputs"]) == (2, 5)
    assert split["busy_s"] >= 5 * BLOCK_S - 0.01
    assert {run.shared for run in replica.host.report(replica="r", node="n").times} == {True}
