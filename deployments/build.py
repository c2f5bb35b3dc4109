"""From a plan to what a replica runs: policy, cuts, engine, device."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from earlyexit.clock import Clock
from earlyexit.cut import SegmentRunner
from earlyexit.device import Deliver, Device, Lost, OnBatch, Release, RunnableCut, ignore_batch
from earlyexit.engine import BatchEngine, Dispatch, Member
from earlyexit.errors import PlanError
from earlyexit.model import EarlyExitModel
from earlyexit.policies import (
    ConfidencePolicy,
    EntropyPolicy,
    ExitPolicy,
    PatiencePolicy,
    RecordedAnswers,
    RecordedPolicy,
    ThresholdPolicy,
    VotingPolicy,
)
from earlyexit.split import Split
from earlyexit.times import ObservedTimes, Times
from earlyexit.wire import WirePiece
from optimizer.plan import PolicySpec
from profiles.records import ExitRecords

# Without active ramps nothing is ever decided; the policy then only concludes.
NO_RAMPS = PolicySpec(name="confidence", thresholds=1.0)
THRESHOLD_POLICIES: Mapping[str, type[ThresholdPolicy]] = {"entropy": EntropyPolicy, "confidence": ConfidencePolicy}


def build_policy(spec: PolicySpec | None) -> ExitPolicy:
    """The policy that a plan names; raises PlanError for an `own` that cannot be imported."""
    spec = spec or NO_RAMPS
    match spec.name:
        case "entropy" | "confidence":
            assert spec.thresholds is not None
            return THRESHOLD_POLICIES[spec.name](spec.thresholds)
        case "patience":
            assert spec.patience is not None
            return PatiencePolicy(spec.patience)
        case "voting":
            assert spec.votes is not None
            return VotingPolicy(spec.votes)
        case "recorded":
            assert spec.thresholds is not None
            assert spec.records is not None
            records = ExitRecords.load(Path(spec.records))
            return RecordedPolicy(recorded_answers(records), THRESHOLD_POLICIES[records.score](spec.thresholds))
        case "own":
            assert spec.own is not None
            return _own_policy(spec.own)


def recorded_answers(records: ExitRecords) -> RecordedAnswers:
    """Exit records in the form that the recorded policy looks up."""
    return RecordedAnswers(
        row_of={sample_id: row for row, sample_id in enumerate(records.sample_ids)},
        ramps=records.ramps,
        scores_NR=records.scores_NR,
        labels_NR=records.labels_NR,
        final_labels_N=records.final_labels_N,
    )


def build_segments(model: EarlyExitModel, backend: str, folder: Path, num_threads: int) -> SegmentRunner | None:
    """How segments are computed: None for torch, or ONNX Runtime with its cache beside the model."""
    if backend == "torch":
        return None
    from earlyexit.onnx_backend import OnnxSegments

    provider = "CUDAExecutionProvider" if model.device.type == "cuda" else "CPUExecutionProvider"
    return OnnxSegments(model, cache=folder / "onnx", providers=(provider,), num_threads=num_threads)


def build_device(
    model: EarlyExitModel,
    splits: tuple[Split, ...],
    policy: ExitPolicy,
    *,
    clock: Clock,
    deliver: Deliver,
    dispatch: Dispatch = "work-conserving",
    segments: SegmentRunner | None = None,
    times: Times | None = None,
    on_batch: OnBatch = ignore_batch,
) -> Device:
    """A device that runs the given splits of the model."""
    cuts: dict[int, RunnableCut] = {
        split.first: model.cut(split.first, split.end, split.ramps, policy, segments) for split in splits
    }
    return Device(BatchEngine(splits, times or ObservedTimes(), dispatch=dispatch), cuts, clock, deliver, on_batch)


def warm_up(device: Device, model: EarlyExitModel, policy: ExitPolicy) -> None:
    """Run every split alone and at its full batch, so that the first request pays for nothing but itself.

    It also teaches the device's engine how long batches take.
    """
    for split in device.engine.splits:
        for size in sorted({1, split.batch}):
            wire = _zeros(model, policy, split.first, size)
            singles = model.from_wire(wire, policy).singles()
            members = [Member(sample_id=single.sample_ids[0], payload=single) for single in singles]
            device.engine.submit(split.first, members, device.clock.now_s())
            device.run_until_idle()


def expect_no_loss(releases: list[Release]) -> None:
    """Take a warm-up's answers; raises whatever the model failed with."""
    for release in releases:
        if isinstance(release, Lost):
            raise release.error


def _own_policy(name: str) -> ExitPolicy:
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"exit policy {name!r} cannot be imported: {error}") from error
    if not isinstance(policy, ExitPolicy):
        raise PlanError(f"{name!r} is no exit policy; make one with earlyexit.policies.exit_wrapper")
    return policy


def _zeros(model: EarlyExitModel, policy: ExitPolicy, first: int, size: int) -> WirePiece:
    length = min(16, model.info.max_length)
    num_tokens = size * length
    if first == 0:
        values: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.zeros(num_tokens, dtype=np.int32)
    else:
        dtype = np.uint16 if model.dtype == torch.bfloat16 else np.float32
        values = np.zeros((num_tokens, model.backbone.hidden_size), dtype=dtype)
    return WirePiece(
        sample_ids=policy.warm_up_ids(size),
        next_block=first,
        lengths_B=np.full(size, length, dtype=np.int32),
        values=values,
        state_BS=None,
    )
