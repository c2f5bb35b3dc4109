"""`offramp profile`: measures a model on this machine, keeps the profile, and chooses how to serve the model."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from cluster.devices import find_device
from cluster.memory import machine_memory
from earlyexit.backends import BackendName, computed_by
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.engine.cpu import first_processor
from earlyexit.errors import DataError, InputError
from earlyexit.network.boundary import FLOAT_BYTES
from earlyexit.network.store import WEIGHTS_FILE, ModelCard, read_card
from offramp.commands.folders import model_records, read_calibration
from offramp.commands.jobs import ProfileJob, ProfileOptions
from offramp.commands.output import make_table, num_cores, print_result, progress_bars, provenance, run_in_subprocess
from offramp.commands.plan import answer
from offramp.spec.documents import ServeJob
from optimizer.calibration.calibration_file import RECORDS_FILE, CalibrationCard
from optimizer.plans.plan import Plan, PolicySpec
from optimizer.problems.entries import Recorded, with_rows
from optimizer.problems.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.problems.problem_file import ProblemFile
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Strategy
from profiles.latency import LatencyProfile
from profiles.measure import LiveSplits, Point, TimedSplit, latency_tables, profile_splits, room_for, time_splits

if TYPE_CHECKING:
    from earlyexit.network.model import Network
    from earlyexit.training.ramps import Progress


USUAL_LENGTHS = (16, 32, 64)
STEPS_AND_PROMPTS = (1, 16)
"""Default lengths for decoders: a decode step of each sequence, and prompts of 16 x batch tokens."""
FURTHER = 7
"""Decode steps are also timed with this many times more context tokens."""


def splits_of(job: ProfileJob, model: Network) -> tuple[TimedSplit, ...]:
    """Returns the splits to time for a profile; raises InputError for lengths that the model does not support."""
    keeps = model.members[0].backbone.kept_bytes > 0
    usual = STEPS_AND_PROMPTS if keeps else USUAL_LENGTHS
    lengths = job.lengths or tuple(each for each in usual if each <= model.max_length) or (model.max_length,)
    if lengths[-1] > model.max_length:
        raise InputError(f"length {lengths[-1]}; the model takes at most {model.max_length} tokens")
    further = 0
    if keeps:
        prompt = job.batches[-1] * lengths[-1] if lengths[-1] > 1 else 1
        if prompt > model.max_length:
            prompts = f"a prompt of batch {job.batches[-1]} x length {lengths[-1]} has {prompt} tokens"
            raise InputError(f"{prompts}; the model takes at most {model.max_length}")
        if job.context >= model.max_length:
            raise InputError(f"a step after {job.context} tokens; the model takes at most {model.max_length}")
        # Additional context tokens, enough to measure the cost of context.
        further = max(0, min(FURTHER * job.context, model.max_length - 1 - job.context))
    elif "context" in job.model_fields_set:
        raise InputError("--context is only for decoders, whose steps read the keys and values of earlier tokens")
    return profile_splits(model.num_blocks, model.ramp_indices, job.batches, lengths, model.chain.starts, further)


def profile_model(
    folder: Path,
    job: ProfileJob,
    *,
    one_of_each: bool = False,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> tuple[LatencyProfile, tuple[Point, ...]]:
    """Measures a model on this machine, with the device and the backend of a replica.

    Returns the profile and the measured points. `one_of_each`: inner blocks with the same structure are measured only
    once. Changes torch's number of threads during the measurement. Raises InputError for an unavailable device or
    backend, or an impossible length.
    """
    import torch

    from earlyexit.network.store import load_network, open_network

    torch_device = find_device(job.device).torch_device
    if torch_device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {job.device!r} needs CUDA, which torch does not find on this machine")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        model = load_network(folder, device=torch_device, dtype=getattr(torch, job.dtype))
        rng = np.random.default_rng(job.seed)
        segments = open_network(job.backend, model, folder)
        live, splits = LiveSplits(model, rng, segments, _context(job, model)), splits_of(job, model)
        stand_ins = _same_times(splits, model) if one_of_each else {each: each for each in splits}
        measured = tuple(dict.fromkeys(stand_ins.values()))
        live.make_ready(measured)
        clock = clock or MonotonicClock()
        points = time_splits(measured, live.prepare, clock=clock, rng=rng, repeats=job.repeats, progress=progress)
    finally:
        torch.set_num_threads(threads_before)
    point_of = {point.timed: point for point in points}
    every = [replace(point_of[stand_in], timed=timed) for timed, stand_in in stand_ins.items()]
    starts, ramps = model.chain.starts, model.ramp_indices
    profile = LatencyProfile(
        model=read_card(folder).name,
        num_blocks=model.num_blocks,
        ramps=ramps,
        device=job.device,
        backend=computed_by(segments) or job.backend,
        dtype=job.dtype,
        kind="measured",
        tables=latency_tables(every, model.num_blocks, ramps, starts, context=live.context),
        provenance=_provenance(job, model, points, live.context),
    )
    return profile, points


def _same_times(splits: Sequence[TimedSplit], model: Network) -> dict[TimedSplit, TimedSplit]:
    """Maps each split to the first one with the same times, whose block has equal modules, inputs and outputs.

    No block equals the first or the last one, because these also embed the input and end the model.
    """
    from torch import nn

    modules = getattr(getattr(model, "backbone", None), "blocks", None)
    kinds_N: list[Hashable] = list(range(model.num_blocks))
    if isinstance(modules, nn.ModuleList):
        for block in range(1, model.num_blocks - 1):
            kinds_N[block] = repr(modules[block]), model.takes(block), model.takes(block + 1)
    first, found = dict[Hashable, TimedSplit](), dict[TimedSplit, TimedSplit]()
    for timed in splits:
        split = timed.split
        blocks = kinds_N[split.first] if split.end == split.first + 1 else (split.first, split.end)
        kind = blocks, split.batch, bool(split.ramps), timed.length, timed.further
        found[timed] = first.setdefault(kind, timed)
    return found


def _context(job: ProfileJob, model: Network) -> int | None:
    """Allocates the KV cache of a decoder, and returns its number of context tokens; None for other models."""
    from earlyexit.families.seq2seq import Seq2SeqBackbone
    from earlyexit.network.store import open_memory

    backbone = model.members[0].backbone
    if not backbone.kept_bytes:
        return None
    if isinstance(backbone, Seq2SeqBackbone):
        raise InputError("encoder-decoders cannot be profiled yet, because profiles have no cost of the source text")
    open_memory(model, room_for(splits_of(job, model), job.context), "compute", 0)
    return job.context


def profile_figures(profile: LatencyProfile) -> dict[str, Any]:
    """Returns a summary of a profile: times of the full model, a mean block and a mean ramp for each length and batch.

    `spread` is the median of `Point.spread`. Above a few percent, other programs used the machine.
    """
    return {
        **{name: getattr(profile, name) for name in ("model", "device", "backend", "dtype")},
        **{name: profile.provenance[name] for name in ("device_name", "timings", "outliers", "spread")},
        "rows": [
            {
                "length": length,
                "batch": batch,
                "model_s": float(table.block_s_NB[:, column].sum()),
                "block_s": float(table.block_s_NB[:, column].mean()),
                "ramp_s": float(table.ramp_s_EB[:, column].mean()) if profile.ramps else None,
            }
            for length, table in profile.tables.items()
            for column, batch in enumerate(table.batches)
        ],
    }


def _provenance(job: ProfileJob, model: Network, points: Sequence[Point], context: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"device_name": cpu_name()}
    if model.device.type == "cuda":
        import torch
        from torch.utils import collect_env

        facts = {
            "device_name": torch.cuda.get_device_name(model.device),
            "cuda": torch.version.cuda,
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # type: ignore[no-untyped-call]
        }
    return provenance(
        **facts,
        **({} if context is None else {"context": context}),
        **job.model_dump(include={"threads", "seed", "repeats"}),
        timings=sum(len(point.seconds) for point in points),
        outliers=sum(point.outliers for point in points),
        spread=float(np.median([point.spread for point in points])),
    )


def cpu_name() -> str:
    """Returns the name of the processor."""
    return first_processor().get("model name") or platform.processor() or platform.machine()


NOISY = 0.05
"""Spread above which other programs probably used the machine."""


def run(job: ProfileOptions) -> None:
    """Measures a model, writes the profile, and prints a summary."""
    with progress_bars() as progress:
        profile, points = profile_model(job.model, job, progress=progress)
    profile.save(job.out)
    if job.jsonl is not None:
        job.jsonl.write_text("".join(f"{json.dumps(each.to_json())}\n" for each in points), encoding="utf-8")
    figures = profile_figures(profile)
    lines = (noise_text(figures), f"latency profile: {job.out}")
    print_result(figures, lambda: [profile_table(figures)], lines, as_json=job.as_json)


def profile_table(figures: dict[str, Any]) -> Table:
    """Returns a table with a row per length and batch size, from the result of `profile_figures`."""
    title = f"{figures['model']} on {figures['device']} ({figures['device_name']}), {figures['backend']}"
    table = make_table("length", "batch", "model ms", "inputs/s", "block ms", "ramp ms", title=title)
    for length, batch, model_s, block_s, ramp_s in map(dict.values, figures["rows"]):
        times = f"{model_s * 1e3:.2f}", f"{batch / model_s:.0f}", f"{block_s * 1e3:.3f}"
        table.add_row(str(length), str(batch), *times, "-" if ramp_s is None else f"{ramp_s * 1e3:.3f}")
    return table


def noise_text(figures: dict[str, Any]) -> str:
    """Returns a line about the noise of the measurement, with a warning if it is too large."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    warning = f"\nwarning: a spread above {NOISY:.0%}: other programs used the machine; measure again when it is idle"
    return text + warning if figures["spread"] > NOISY else text


Notify = Callable[[str], None]
KEPT_FILE = "profile.json"
MOST_S = 20.0
"""Approximate limit of the processor time of measuring, without loading the model."""
BATCHES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 4, 16, 64)}
"""Batch sizes that are measured, by torch's device."""
MOST_REPEATS, WARM_UPS = 5, 3
"""Maximum number of measured rounds, and approximate number of warm-up rounds."""
TYPICAL_TOKENS = 16
"""Length of an input in tokens if there are no exit records from which to compute the mean."""
ASKED = "asked"
"""Key of the `circumstances` in the provenance of a kept profile."""


def kept_profile(folder: Path, job: ProfileJob, notify: Notify) -> LatencyProfile:
    """Returns the profile in the model folder; measures it if there is none for these circumstances.

    Batch sizes and repeats are chosen by `MOST_S`, not by the job. Lengths default to the mean input length.
    """
    path, current = folder / KEPT_FILE, circumstances(folder, job)
    try:
        kept = LatencyProfile.load(path) if path.is_file() else None
    except DataError as error:  # only half was written, or another version wrote it
        notify(f"profile: {error}")
        kept = None
    before = {} if kept is None else kept.provenance.get(ASKED, {})
    changed = [name for name, value in current.items() if before.get(name) != value]
    if kept is not None and job.lengths not in (None, kept.lengths):
        changed.append("length")
    if kept is not None and not changed:
        notify(f"profile: {path}, of {kept.provenance['created_at']}")
        return kept
    notify(f"profile: measuring {folder}, once on this machine; usually less than a minute")
    lengths = job.lengths or (mean_tokens(folder, read_card(folder)),)
    profile, took_s = run_in_subprocess(_measured, folder, job.model_copy(update={"lengths": lengths}))
    profile = replace(profile, provenance={**profile.provenance, ASKED: current})
    why = "" if kept is None else f", since {path} differs in {' and '.join(changed)}"
    text = f"profile: measured in {took_s:.0f} s of processor time{why}"
    try:
        profile.save(path)
    except OSError as error:  # the model folder may be read-only
        notify(f"{text}; not kept: {path} cannot be written ({error.strerror})")
    else:
        notify(f"{text}; kept in {path}")
    return profile


def circumstances(folder: Path, job: ProfileJob) -> dict[str, Any]:
    """Returns what a kept profile depends on: the machine, and the properties of model and job that change times.

    Models with the same blocks, ramps and size of weights have the same times, whatever the values of the weights.
    """
    card = read_card(folder)
    machine = {"processor": cpu_name(), "cores": num_cores(), "device": job.device}
    model = {"blocks": card.num_blocks, "ramps": list(card.ramps), "size": weights_bytes(folder, card)}
    return machine | model | {"backend": job.backend, "dtype": job.dtype}


def weights_bytes(folder: Path, card: ModelCard) -> int:
    """Returns the size of a model's weights, including those in the files of a foreign network."""
    return sum((folder / name).stat().st_size for name in (WEIGHTS_FILE, *card.network_files))


class ProcessorClock:
    """A clock of this process's processor time, on which other programs have little influence."""

    now_s = staticmethod(time.process_time)


def _measured(folder: Path, job: ProfileJob) -> tuple[LatencyProfile, float]:
    """Measures as many batch sizes and rounds as `MOST_S` allows, estimated from a round of single inputs.

    Returns the profile, and the seconds that this took: of processor time, or of time on a GPU.
    """
    torch_device = find_device(job.device).torch_device
    clock = ProcessorClock() if torch_device == "cpu" else MonotonicClock()
    began_s = clock.now_s()
    backend = "torch" if job.backend == "auto" else job.backend  # the backend is chosen by the second measurement
    single = job.model_copy(update={"batches": (1,), "repeats": 1, "backend": backend})
    _, points = profile_model(folder, single, one_of_each=True, clock=clock)
    sizes, repeats = affordable(sum(sum(point.seconds) for point in points), BATCHES[torch_device])
    full = job.model_copy(update={"batches": sizes, "repeats": repeats})
    profile, _ = profile_model(folder, full, one_of_each=True, clock=clock)
    return profile, clock.now_s() - began_s


def affordable(round_s: float, batches: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Returns which of the batch sizes, and the repeats, for `MOST_S`, if a round of single inputs takes `round_s`.

    Assumes that a batch of n takes (n + 1) / 2 times as long as one input.
    """
    for count in range(len(batches), 0, -1):
        all_s = max(1e-6, round_s) * sum((batch + 1) / 2 for batch in batches[:count])
        repeats = min(MOST_REPEATS, int(MOST_S / all_s) - WARM_UPS)
        if repeats >= 1:
            return batches[:count], repeats
    return batches[:1], 1


SLACK = 0.5
"""Share of the SLO that plans for processors reserve for queues. An input may wait for a running batch and then for its
own, so both must fit into the SLO (so in Nexus, SOSP'19, batches take half the SLO). E3 reserves 0.2 (section 4)."""
SLO_FACTOR = 30.0
"""The SLO of plans divided by the full model's time for one text. A batch of 16 takes half of it on processors."""
INGRESS_PER_S = 3000
"""Approximate number of requests per second that one ingress can handle, at .3 ms each near saturation."""
REQUEST_S = 1e-3
"""Approximate processor seconds of a request outside its batches at moderate load, at ingress and replica."""
REPLICA_BYTES = 340e6
"""Resident memory of a process that has imported torch and Ray Serve, without weights."""


def choose(folder: Path, options: ServeJob, notify: Notify) -> tuple[Plan, BackendName, int]:
    """Returns the plan with the highest rate on this machine, the backend, and the threads of each batch.

    Options that are set are kept. `notify` gets a description of the choice. Raises ModelFolderError for a
    model with ramps that is not calibrated.
    """
    card, model = read_card(folder), options.document.model
    torch_device = find_device(options.device).torch_device
    largest = BATCHES[torch_device][-1]
    if options.batch is not None and options.batch > largest:
        raise InputError(
            f"--batch {options.batch}: batches of at most {largest} are measured and planned; choose one of these, "
            "or a plan without this limit: --plan serial"
        )
    calibration = read_calibration(folder) if card.ramps else None
    either = torch_device == "cpu" and "backend" not in model.model_fields_set and model.attention != "apart"
    job = ProfileJob(device=options.device, backend="auto" if either else model.backend, dtype=model.dtype)
    profile = kept_profile(folder, job, notify)
    plan, stock_per_s, problem = _best_plan(folder, profile, calibration, options.batch or largest)
    rate_per_s = plan.predicted["rate_per_s"]
    workers, threads = _workers(folder, rate_per_s, profile.backend) if torch_device == "cpu" else (1, 1)
    workers = options.replicas or workers
    threads = model.threads_per_replica if "threads_per_replica" in model.model_fields_set else threads
    if torch_device == "cpu":
        unit, room = "thread", f"{num_cores()} {'core' if num_cores() == 1 else 'cores'} and the free memory"
        plan = on_cores(plan, problem, workers, profile.backend, in_pairs=options.replicas is None)
    else:  # the host prepares one batch while the GPU computes the other
        unit, room = "GPU", "a GPU each"
        plan = replace(plan, stages=tuple(replace(stage, replicas=workers) for stage in plan.stages)).in_pairs()
    beside = f", without exits {stock_per_s:.0f}" if plan.ramps else ""
    notify(f"plan: {_plan_text(plan)}; {rate_per_s:.0f} inputs/s by a {unit}{beside}")
    notify(
        f"replicas: {plan.stages[0].replicas}{' with two batches at once' if plan.overlap_below else ''}, "
        f"{threads} {'thread' if threads == 1 else 'threads'} for each batch by {profile.backend}, "
        f"{options.dispatch or plan.dispatch}, for {room}; "
        "--plan, --batch, --replicas, --threads, --dispatch and --backend override this"
    )
    return plan, profile.backend, threads


def _best_plan(
    folder: Path, profile: LatencyProfile, calibration: CalibrationCard | None, batch: int
) -> tuple[Plan, float, PlanProblem]:
    """Returns the best plan of one replica, the rate of a replica that runs the full model, and the problem."""
    recorded, policy = None, None
    if calibration is not None:
        recorded = Recorded(records=model_records(folder / RECORDS_FILE, folder), thresholds=calibration.thresholds)
        policy = calibration.policy_spec()
    problem = with_batch_limit(processor_problem(profile, recorded, 1), batch)
    stock = plan_for(problem, "stock", None)
    best = plan_for(problem, "serial", policy, recorded) if problem.ramps else stock
    return best if best.ramps else stock, stock.predicted["rate_per_s"], problem


def _workers(folder: Path, rate_per_s: float, backend: BackendName) -> tuple[int, int]:
    """Returns the number of batches to compute at once and the threads of each; `rate_per_s` is that of one thread.

    Each core gets a batch, unless fewer handle the rate of an ingress. If memory allows fewer, each has more threads.
    """
    cores, each_bytes = num_cores(), REPLICA_BYTES + 2 * weights_bytes(folder, read_card(folder))
    fitting = max(1, int(machine_memory()[1] / 2 / each_bytes)) * _batches_of_replica(rate_per_s, backend)
    needed = min(cores, math.ceil(INGRESS_PER_S / (1 - SLACK) / rate_per_s))
    return (fitting, cores // fitting) if fitting < needed else (needed, 1)


def _fills(rate_per_s: float) -> bool:
    """Returns whether one batch at a time and what surrounds it keep the cores busy (see `on_cores`)."""
    return num_cores() / (1 + REQUEST_S * rate_per_s) < 1.5


def _batches_of_replica(rate_per_s: float, backend: BackendName) -> int:
    """Returns 1 for small models with torch, whose two threads would wait for the GIL, else 2."""
    return 1 if backend == "torch" and _fills(rate_per_s) else 2


def on_cores(plan: Plan, problem: PlanProblem, workers: int, backend: BackendName, *, in_pairs: bool = True) -> Plan:
    """Returns the problem's plan with replicas for `workers` concurrent batches on this machine.

    A request takes `REQUEST_S` seconds of a core, and its batch 1 / `rate_per_s`. If this leaves cores for one batch
    rather than two, a second batch only starts when it is full (`filling`).

    `in_pairs`: a replica runs two batches at once if possible. They share queues, which therefore fill sooner, and the
    memory for weights and libraries.
    """
    rate_per_s = plan.predicted["rate_per_s"] / sum(supply.count for supply in problem.devices.values())
    fills = workers > 1 and _fills(rate_per_s)
    in_pairs = in_pairs and workers > 1 and _batches_of_replica(rate_per_s, backend) == 2
    stages = tuple(replace(stage, replicas=workers // 2 if in_pairs else workers) for stage in plan.stages)
    plan = replace(plan, stages=stages, dispatch="filling" if fills else "work-conserving")
    if not plan.ramps:
        # A running batch and an input's own batch must keep the SLO, less E3's slack for bursts. Plans also count the
        # time in which a batch fills. Replicas that do not wait for full batches do not spend it.
        limit_s = Slo(latency_s=problem.slo.latency_s).limit_s / 2
        [table] = problem.latency.values()
        fitting = (batch for batch in table.batches if stock_s(problem, batch) <= limit_s)
        plan = plan.with_splits(batch=max([plan.splits[0].batch, *fitting]))
    return plan.in_pairs() if in_pairs else plan


def _plan_text(plan: Plan) -> str:
    splits = (
        f"block {each.first}" if each.end == each.first + 1 else f"blocks {each.first} to {each.end - 1}"
        for each in plan.splits
    )
    batches = [f"{blocks} in batches of {each.batch}" for blocks, each in zip(splits, plan.splits, strict=True)]
    exits = f"exits after {', '.join(map(str, plan.ramps))}" if plan.ramps else "no exits"
    return f"{', '.join(batches)}, {exits}"


def processor_problem(
    profile: LatencyProfile, recorded: Recorded | None, workers: int, slo_s: float | None = None
) -> PlanProblem:
    """Returns the problem of the highest rate of `workers` processes with the times of the profile.

    `recorded`: exit records with the thresholds that a plan may use; None for plans without exits. `slo_s`: None for
    `SLO_FACTOR` times the full model's time for one text.
    """
    [length], ramps = profile.lengths, () if recorded is None else tuple(sorted(recorded.thresholds))
    full_N = (1.0,) * profile.num_blocks
    problem = PlanProblem(
        num_blocks=profile.num_blocks,
        ramps=ramps,
        survival_N=full_N if recorded is None else recorded.records.outcome(recorded.thresholds).survival,
        latency={profile.device: with_rows(profile.at(length), profile.ramps, ramps)},
        devices={profile.device: Supply(count=workers, usd_per_hour=0.0)},
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=0.002),
        bytes_per_sample_N=(float(FLOAT_BYTES[profile.dtype] * length),) * profile.num_blocks,
        slo=Slo(latency_s=1.0, slack=SLACK),
        objective=MaximizeRate(),
    )
    return replace(problem, slo=replace(problem.slo, latency_s=slo_s or SLO_FACTOR * stock_s(problem)))


def stock_s(problem: PlanProblem, batch: int = 1) -> float:
    """Returns the time of the full model for a batch on the first accelerator type, in seconds."""
    return float(next(iter(problem.latency.values())).blocks_at(np.array(float(batch))).sum())


def plan_for(
    problem: PlanProblem, strategy: Strategy, policy: PolicySpec | None, recorded: Recorded | None = None
) -> Plan:
    """Returns the best plan of a strategy, by the exit records if given; raises PlanError if there is none."""
    file = ProblemFile(problem=problem, recorded=recorded)
    plan = answer(file, strategy, compared=()).plan(policy)
    return replace(plan, predicted={name: plan.predicted[name] for name in ("rate_per_s", "latency_s")})


def mean_tokens(folder: Path, card: ModelCard) -> int:
    """Returns the mean number of tokens of an input, by the calibration's exit records if there are any."""
    path = folder / RECORDS_FILE
    tokens_N = model_records(path, folder).tokens_N if path.is_file() else None
    mean = TYPICAL_TOKENS if tokens_N is None else round(float(tokens_N.mean()))
    return max(1, min(mean, card.max_length))
