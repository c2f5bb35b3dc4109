"""Compares three plans for one model, on this machine's processors and on emulated accelerators."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console

from deployments.local_ray.cluster import LocalCluster
from deployments.settings import EmulatedSettings, ServeSettings
from earlyexit.data.rows import LabelledRows, read_labelled, write_labelled
from earlyexit.network.store import read_card
from offramp.commands.folders import read_calibration, resolve_backbone
from offramp.commands.jobs import CalibrateJob, ProfileJob, TrainJob
from offramp.commands.options import DemoJob
from offramp.commands.output import progress_bars, run_in_subprocess
from offramp.commands.plan import FUSED, SHRINKING, load_pyplot
from offramp.commands.profile import kept_profile, on_cores, plan_for, processor_problem, stock_s
from offramp.demo.turns import Load, PlanRun, compare_plans, manual_control, results_table, served
from optimizer.calibration.calibration_file import CALIBRATION_FILE, RECORDS_FILE, CalibrationCard
from optimizer.plans.plan import Plan, PolicySpec
from optimizer.plans.plan_file import plan_document, write_plan
from optimizer.problems.entries import Recorded
from optimizer.problems.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.search.decision import Strategy
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

TEXTS = Path(__file__).with_name("texts.csv")
"""9,600 short requests with 48 intents, generated from templates (`offramp/demo/texts.py@343bb79a`)."""
SEED = 0
BUDGET = 0.02
"""The error that E3 tolerates (section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A trained model with its calibration, and its answers to the test texts."""

    folder: Path
    test: LabelledRows
    calibration: CalibrationCard
    expected: Recorded
    """Exit records of the test texts: the answers of the full model and of every ramp."""


def prepare(runs: Path, data: Path | None) -> Prepared:
    """Trains and calibrates a model, unless an earlier run has made it from the same data."""
    from offramp.commands.calibrate import calibrate, record_exits  # imports torch
    from offramp.commands.train import train

    runs.mkdir(parents=True, exist_ok=True)
    if data is not None and data.suffix.lower() == ".json":  # CLINC150 has these parts
        learn, validate, test = (read_labelled(data, part=part) for part in ("train", "val", "test"))
    else:  # 60, 20 and 20 % of the rows of each label
        learn, rest = read_labelled(data or TEXTS).divide(0.4, SEED)
        validate, test = rest.divide(0.5, SEED)
    if data is None:
        for name, part in (("train", learn), ("validation", validate), ("test", test)):
            write_labelled(part, runs, name)
    folder = runs / "model"
    source = str(data.resolve()) if data else "generated"
    if not (folder / CALIBRATION_FILE).is_file() or read_card(folder).provenance.get("data") != source:
        shutil.rmtree(folder, ignore_errors=True)
        job = TrainJob(backbone=resolve_backbone("minilm"), name="demo", max_length=128, seed=SEED, source=source)
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
        calibrate(folder, validate, CalibrateJob(budget=BUDGET, seed=SEED, source=source))
    calibration = read_calibration(folder)
    order = Random(SEED).sample(range(len(test)), len(test))  # files are often sorted by label, but requests are not
    test = test.select(order)
    expected = Recorded(records=record_exits(folder, test, calibration), thresholds=calibration.thresholds)
    return Prepared(folder=folder, test=test, calibration=calibration, expected=expected)


COLORS = {"stock": "#888888", "early-exit": SHRINKING, "planned": FUSED}
LABELS = {
    "stock": "stock: no exits",
    "early-exit": "early-exit: a batch shrinks",
    "planned": "planned: survivors are fused",
}


def draw(processors: Mapping[str, PlanRun], emulated: Mapping[str, PlanRun], path: Path) -> None:
    """Draws the mean batch at every block on emulated accelerators, and below it the main result of each part."""
    pyplot = load_pyplot()
    layout = [["above", "above"], ["left", "right"]]
    figure, axes_by_name = pyplot.subplot_mosaic(layout, figsize=(9, 6), layout="constrained")
    above, left, right = (axes_by_name[name] for name in ("above", "left", "right"))
    planned = emulated["planned"]
    blocks = range(planned.plan.num_blocks)
    above.bar(blocks, planned.batch_at_block, width=0.7, color=COLORS["planned"], label=LABELS["planned"])
    for name in ("early-exit", "stock"):
        above.plot(blocks, emulated[name].batch_at_block, color=COLORS[name], marker="o", label=LABELS[name])
    for split in planned.plan.splits[1:]:
        above.axvline(split.first - 0.5, color="#555555", linewidth=0.8, linestyle="--")
    highest = max(max(each.batch_at_block) for each in emulated.values())
    above.set(xlabel="block", ylabel="inputs in a batch", ylim=(0, 1.35 * highest))
    above.set_title("16 emulated V100: batch at every block, measured")
    above.legend(loc="upper right", ncols=3, fontsize=8)
    parts = (
        (left, emulated, "of the load answered in time (%)", "16 emulated V100, the same load", 100.0, "in_time"),
        (right, processors, "ms of processor time per answer", "This machine's processors", 1e3, "cpu_per_answer_s"),
    )
    for axes, ran, label, title, times, name in parts:
        values = [times * getattr(each, name) for each in ran.values()]
        bars = axes.barh(list(ran), values, color=[COLORS[side] for side in ran], height=0.6)
        axes.bar_label(bars, [f" {value:.3g}" for value in values])
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.3 * max(values)), xlabel=label, title=title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


V100 = "emulated:V100"
NUM_V100, V100_BATCH, TIME_SCALE = 16, 8, 40.0
"""E3's cluster and largest batch (section 5.1.1), and the real seconds of an emulated second."""
SLOWER = 6.5
"""Factor on the published times: BERT-base takes 1.23 ms with TensorRT on a V100, and about 8 ms in E3 (estimated)."""
V100_SLO_S = 0.05
"""In emulated seconds."""
LENGTH = 128


def v100_table(num_blocks: int, num_ramps: int) -> LatencyTable:
    """Returns the latencies of a model with `num_blocks` of BERT-base's blocks on a V100, in emulated seconds."""
    table = published_profile("bert-base", "V100").at(LENGTH)
    known = table.batches.index(V100_BATCH) + 1
    return LatencyTable(
        batches=table.batches[:known],
        block_s_NB=SLOWER * np.resize(table.block_s_NB[:, :known], (num_blocks, known)),
        ramp_s_EB=SLOWER * np.resize(table.ramp_s_EB[:, :known], (num_ramps, known)),
    )


def emulated_problem(recorded: Recorded) -> PlanProblem:
    """Returns the problem of the highest rate on 16 V100, in real seconds."""
    records, thresholds = recorded.records, recorded.thresholds
    table = v100_table(records.num_blocks, len(thresholds))
    return PlanProblem(
        num_blocks=records.num_blocks,
        ramps=tuple(sorted(thresholds)),
        survival_N=records.outcome(thresholds).survival,
        latency={V100: table.times(TIME_SCALE)},
        devices={V100: Supply(count=NUM_V100)},
        link=Link(bandwidth_bytes_per_s=1e15, delay_s=0.01),
        bytes_per_sample_N=(0.0,) * records.num_blocks,
        slo=Slo(latency_s=TIME_SCALE * V100_SLO_S),
        objective=MaximizeRate(),
    )


SPACES: Mapping[str, Strategy] = {"stock": "stock", "early-exit": "early-exit", "planned": "serial"}
"""The planner's search space of each plan. `serial` has one stage, so a new plan moves no replicas."""
WORKERS, LARGEST_BATCH = 2, 16
"""Number of batches that the processors compute at once, and their largest size."""
PROCESSORS_SHARE = 0.38
"""Share of the predicted rate at which the search for a load starts on processors, which the load generator shares."""


def run(job: DemoJob) -> None:
    """Trains, plans and compares, or with `--keep` serves the model."""
    runs = job.out or Path("runs") / ("demo" if job.data is None else f"demo-{job.data.stem}")
    if job.keep:
        folder = run_in_subprocess(prepare, runs, job.data).folder
        serve = [sys.executable, "-P", "-m", "offramp", "serve", str(folder), "--port", str(job.port)]
        os.execv(sys.executable, serve)  # a new program without the modules that only training needs
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is stopped too
        demo(runs, job.data, job.port, Console(highlight=False))


def demo(runs: Path, data: Path | None, port: int, console: Console) -> None:
    """Trains a model if necessary, and runs both comparisons; writes a picture and figures into `runs`."""
    load_pyplot()  # fails now rather than after minutes of work
    console.rule("1. model: trained, calibrated")
    prepared = prepare(runs, data)
    card = prepared.calibration
    console.print(f"promised: {1 - card.budget:.0%} of the answers are the full model's ({card.confidence:.0%} sure)")
    console.rule("2. this machine's processors")
    processors = on_processors(prepared, runs, port, console)
    console.rule("3. 16 emulated V100")
    emulated = on_accelerators(prepared, runs, port, console)
    draw(processors, emulated, runs / "plan.png")
    parts = {"processors": processors, "emulated": emulated}
    figures = {
        part: {name: {**asdict(each), "plan": plan_document(each.plan)} for name, each in ran.items()}
        for part, ran in parts.items()
    }
    (runs / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(f"picture: {runs / 'plan.png'}   figures: {runs / 'report.json'}   plan: {runs / 'plan.yaml'}")


def on_processors(prepared: Prepared, runs: Path, port: int, console: Console) -> dict[str, PlanRun]:
    """Compares the plans on processors, where a batch takes almost as long as its inputs one by one."""
    policy = prepared.calibration.policy_spec()
    profile = kept_profile(prepared.folder, ProfileJob(backend="auto"), console.print)
    problem = processor_problem(profile, prepared.expected, WORKERS)
    plans = _plans(problem, policy, prepared)
    plans = {name: on_cores(plan, problem, WORKERS, profile.backend) for name, plan in plans.items()}
    write_plan(plans["planned"], runs / "plan.yaml")
    control = manual_control(problem, policy, runs / "processors.sqlite")
    settings = _settings(prepared, problem, plans, control=control, backend=profile.backend)
    load = _load(prepared, problem, keys=None, seconds=5.0, warm_s=2.0)
    start_per_s = PROCESSORS_SHARE * plans["planned"].predicted["rate_per_s"]
    with served(settings, plans["stock"], LocalCluster(port=port)) as url:
        rate_per_s, ran = compare_plans(url, plans, load, start_per_s, console)
    console.print(results_table(f"{rate_per_s:.0f} texts/s for each plan, within {1e3 * load.slo_s:.0f} ms", ran))
    spent = ran["planned"].cpu_per_answer_s / ran["stock"].cpu_per_answer_s
    slower = stock_s(problem, LARGEST_BATCH) / stock_s(problem)
    console.print(
        f"Exits save processor time: an answer takes {spent:.2f} x stock's. Fusing hardly matters on processors, "
        f"where a batch of {LARGEST_BATCH} takes {slower:.1f} times as long as one text."
    )
    return ran


def on_accelerators(prepared: Prepared, runs: Path, port: int, console: Console) -> dict[str, PlanRun]:
    """Compares the plans on emulated accelerators, where a batch takes little longer than one input."""
    card, records = read_card(prepared.folder), (runs / RECORDS_FILE).resolve()
    prepared.expected.records.save(records)
    policy = PolicySpec(name="recorded", thresholds=prepared.calibration.thresholds, records=str(records))
    problem = emulated_problem(prepared.expected)
    plans, table = _plans(problem, policy, prepared), v100_table(card.num_blocks, len(card.ramps))
    emulated = {V100: EmulatedSettings(**table.document(as_measured=False), time_scale=TIME_SCALE)}
    control = manual_control(problem, policy, runs / "emulated.sqlite")
    settings = _settings(prepared, problem, plans, control=control, emulated=emulated)
    keys, warm_s = prepared.expected.records.sample_ids, 2 * problem.slo.latency_s
    load = _load(prepared, problem, keys=keys, seconds=6.0, warm_s=warm_s, inputs_per_request=V100_BATCH)
    start_per_s = plans["planned"].predicted["rate_per_s"]
    with served(settings, plans["stock"], LocalCluster(port=port)) as url:
        rate_per_s, ran = compare_plans(url, plans, load, start_per_s, console)
    slo_ms = 1e3 * load.slo_s / TIME_SCALE
    title = f"{TIME_SCALE * rate_per_s:,.0f} texts/s for each plan, within {slo_ms:.0f} ms; emulated seconds"
    console.print(results_table(title, ran, time_scale=TIME_SCALE))
    slower = stock_s(problem, V100_BATCH) / stock_s(problem)
    over = {name: ran["planned"].in_time_per_s / max(1e-9, ran[name].in_time_per_s) for name in ("early-exit", "stock")}
    console.print(
        f"A batch of {V100_BATCH} takes a V100 {slower:.1f} times as long as one text, so one that shrinks wastes it. "
        f"Planned answers {over['early-exit']:.2f} x early-exit's and {over['stock']:.2f} x stock's texts in time."
    )
    return ran


def _plans(problem: PlanProblem, policy: PolicySpec, prepared: Prepared) -> dict[str, Plan]:
    return {name: plan_for(problem, space, policy, prepared.expected) for name, space in SPACES.items()}


def _settings(prepared: Prepared, problem: PlanProblem, plans: Mapping[str, Plan], **fields: Any) -> ServeSettings:
    """Returns the settings of a service of the model, with the first plan."""
    model = str(prepared.folder.resolve())
    return ServeSettings(model=model, plan=plans["stock"], slo_s=problem.slo.latency_s, **fields)


def _load(prepared: Prepared, problem: PlanProblem, **fields: Any) -> Load:
    """Returns the load of the test texts, with the full model's answers to them."""
    names = read_card(prepared.folder).label_names
    full_model = [names[label] for label in prepared.expected.records.answers()[:, -1].tolist()]
    return Load(texts=prepared.test.texts, full_model=full_model, slo_s=problem.slo.latency_s, **fields)
