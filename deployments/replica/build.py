"""Builds and warms up the exit policy and the runner of a replica. Imports torch only if the model is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.devices import find_device
from cluster.emulated import PacedRunner, RecordedRunner
from cluster.memory import machine_memory
from deployments.settings import EmulatedSettings, ServeSettings
from earlyexit.clock import Clock
from earlyexit.engine.device import WARM_UP_TOKENS, Device, Failed, Release, Runner
from earlyexit.engine.engine import BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.errors import DataError, PlanError
from earlyexit.network.boundary import Split
from earlyexit.network.store import ModelCard, read_card
from earlyexit.policies import kind_of, make_policy
from optimizer.plan import NO_RAMPS, PolicySpec
from profiles.records import ExitRecords
from profiles.table import LatencyTable

if TYPE_CHECKING:
    from earlyexit.network.cut import TorchRunner
    from earlyexit.policies.base import ExitPolicy


def build_runner(
    settings: ServeSettings,
    device: str,
    *,
    clock: Clock,
    sleep: Callable[[float], None] = time.sleep,
) -> Runner[Any]:
    """Returns the runner of a device: the model or, on an emulated device, records or the model at a profile's pace.

    Raises PlanError if the settings contradict the device, and ModelFolderError if the model cannot be read.
    """
    if not find_device(device).emulated:
        return _torch_runner(settings, device)
    emulated = _emulation_of(settings, device)
    card = read_card(Path(settings.model))
    if is_recorded(settings, device):
        records = ExitRecords.load(Path(_records_of(device, settings.starting_policy)))
        inner: Runner[Any] = RecordedRunner(records, card.num_blocks, has_tokens=card.has_tokens)
    else:
        inner = _torch_runner(settings, device)
    return PacedRunner(
        inner,
        _table_of(device, emulated, card),
        card.ramps,
        time_scale=emulated.time_scale,
        length=emulated.length,
        clock=clock,
        sleep=sleep,
    )


def check_emulated(settings: ServeSettings, device: str, card: ModelCard) -> None:
    """Raises PlanError if a replica on an emulated device could not start."""
    if find_device(device).emulated:
        _table_of(device, _emulation_of(settings, device), card)
        if is_recorded(settings, device):
            path = Path(_records_of(device, settings.starting_policy))
            try:
                ExitRecords.load(path).answers()
            except DataError as error:
                raise PlanError(f"{device} answers from {path}: {error}; decisions: computed runs the model") from error


def is_recorded(settings: ServeSettings, device: str) -> bool:
    """Whether the exits of a device follow exit records, without torch."""
    emulated = settings.emulated.get(device)
    return emulated is not None and emulated.decisions == "recorded" and find_device(device).emulated


def policy_for(settings: ServeSettings, device: str, spec: PolicySpec | None, splits: Sequence[Split] = ()) -> Any:
    """Returns the policy of a device's runner: an ExitPolicy or, if decisions are recorded, the thresholds.

    Raises PlanError for an `own` policy that cannot be imported, for a policy that cannot decide at the splits' ramps,
    and for recorded decisions with any policy but `recorded`.
    """
    if not is_recorded(settings, device):
        policy = build_policy(spec)
        for split in splits:
            policy.check_ramps(split.ramps)
        return policy
    if spec is None:
        return None
    if _records_of(device, spec) != _records_of(device, settings.starting_policy):
        raise PlanError(f"a running replica cannot change its exit records (to {spec.records})")
    return spec.thresholds


def build_policy(spec: PolicySpec | None) -> ExitPolicy:
    """Returns the policy of a plan. Raises PlanError for an `own` policy that cannot be imported."""
    spec = spec or NO_RAMPS
    if spec.records is None:
        return make_policy(spec.name, **spec.settings)
    records = ExitRecords.load(Path(spec.records))
    # Recorded scores are shares already, so no confidences are needed to compute them.
    takes_confidences = "confidences" in kind_of(records.score).takes
    extra: dict[str, Any] = {"confidences": 0.0} if takes_confidences else {}
    judge = make_policy(records.score, thresholds=spec.thresholds, **extra)
    from earlyexit.policies.ensemble import RecordedAnswers

    answers = RecordedAnswers(
        row_of={sample_id: row for row, sample_id in enumerate(records.sample_ids)},
        ramps=records.ramps,
        scores_NR=records.scores_NR,
        answers_NE=records.answers(),
    )
    return make_policy(spec.name, answers=answers, judge=judge)


def warm_up(
    runner: Runner[Any], stages: Sequence[Sequence[Split]], *, clock: Clock, starts: Collection[int] = ()
) -> ObservedTimes:
    """Runs every split of some stages with one input and with a full batch, so that the first request is not slow.

    `starts`: the first blocks of the networks of a cascade; survivors of one network are not run by the next. Returns
    the measured times of batches or, for an emulated device, those of its profile.
    """
    computing = runner.inner if isinstance(runner, PacedRunner) else runner
    times = ObservedTimes()
    for splits in stages:
        _run_splits(computing, splits, ObservedTimes(), clock, starts)  # the times of this cold run are discarded
        if isinstance(runner, PacedRunner):
            _observe_profile(runner, splits, times)
        else:
            _run_splits(computing, splits, times, clock, starts)
    return times


def raise_failures(releases: list[Release[Any]]) -> None:
    """Raises the error of a batch that failed in the warm-up; ignores all other releases."""
    for release in releases:
        if isinstance(release, Failed):
            raise release.error


def _run_splits(
    runner: Runner[Any], splits: Sequence[Split], times: ObservedTimes, clock: Clock, starts: Collection[int]
) -> None:
    device = Device(BatchEngine(splits, times, starts=starts), runner, clock, raise_failures)
    for split in splits:
        for size in _sizes(split):
            singles = runner.warm_up_pieces(split, size).singles()
            members = [
                Member(sample_id=single.sample_ids[0], payload=single, tokens=int(single.lengths_B[0]))
                for single in singles
            ]
            device.engine.submit(split.first, members, clock.now_s())
            device.run_until_idle()


def _observe_profile(runner: PacedRunner[Any], splits: Sequence[Split], times: ObservedTimes) -> None:
    for split in splits:
        for size in _sizes(split):
            tokens = int(runner.warm_up_pieces(split, size).lengths_B.sum())
            first_s, total_s = runner.pace.split_s(split, runner.pace.size_of(size, tokens))
            times.observe(split, size, tokens, first_s, total_s)


def _sizes(split: Split) -> list[int]:
    """Returns the batch sizes of the warm-up: one input, and a full batch. Under a token budget, of short texts."""
    full = split.batch if split.tokens is None else max(1, min(split.batch, split.tokens // WARM_UP_TOKENS))
    return sorted({1, full})


def _torch_runner(settings: ServeSettings, device: str) -> TorchRunner:
    import torch

    from earlyexit.network.cut import TorchRunner
    from earlyexit.network.store import load_network, open_memory, open_network

    torch.set_num_threads(settings.threads_per_replica)
    folder = Path(settings.model)
    torch_device = find_device(device).torch_device
    dtype = getattr(torch, settings.dtype)
    network = load_network(folder, device=torch_device, dtype=dtype, attention=settings.attention)
    segments = open_network(settings.backend, network, folder, settings.threads_per_replica)
    free_bytes = torch.cuda.mem_get_info()[0] if torch_device == "cuda" else machine_memory()[1]
    memory = open_memory(network, settings.kv_tokens, settings.kv_fill, free_bytes)
    return TorchRunner(network, build_policy(settings.starting_policy), segments, memory)


def _records_of(device: str, spec: PolicySpec | None) -> str:
    if spec is None or spec.records is None:
        name = "none" if spec is None else repr(spec.name)
        raise PlanError(f"{device} decides by exit records, so its exit policy must be 'recorded', not {name}")
    return spec.records


def _emulation_of(settings: ServeSettings, device: str) -> EmulatedSettings:
    emulated = settings.emulated.get(device)
    if emulated is None:
        raise PlanError(f"{device} has no latency profile; the settings have profiles of {sorted(settings.emulated)}")
    return emulated


def _table_of(device: str, emulated: EmulatedSettings, card: ModelCard) -> LatencyTable:
    rows = len(emulated.block_s), len(emulated.ramp_s)
    if rows != (card.num_blocks, len(card.ramps)):
        raise PlanError(
            f"the profile of {device} has {rows[0]} rows of block_s and {rows[1]} of ramp_s; "
            f"{card.name} has {card.num_blocks} blocks and {len(card.ramps)} ramps"
        )
    try:
        return LatencyTable(
            batches=tuple(emulated.batch),
            block_s_NB=np.array(emulated.block_s, dtype=np.float64),
            ramp_s_EB=np.array(emulated.ramp_s, dtype=np.float64).reshape(rows[1], len(emulated.batch)),
        )
    except (DataError, ValueError) as error:  # rows of different lengths cannot be an array
        raise PlanError(f"the profile of {device}: {error}") from error
