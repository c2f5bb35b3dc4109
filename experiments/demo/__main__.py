"""`make demo` and `make serve`: train, serve, load, report, end. Minutes on two cores; CPU only."""

from __future__ import annotations

import asyncio
import json
import signal
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.store import read_card
from experiments.data import RUNS
from experiments.demo.picture import draw, plan_text
from experiments.demo.prepare import Prepared, demo_plan, prepare, save_plan
from offramp.load.report import LoadReport, render
from offramp.load.run import LoadConfig, run_load
from optimizer.plan import Plan
from optimizer.plan_file import plan_document

BATCH = 16
SLO_S = 0.250
SHARE_OF_CAPACITY = 0.8
"""The open loop's rate. Batches fill by themselves as load grows: far below capacity they stay small."""


def main() -> None:
    """Run the demo, or serve until told to stop."""
    options = _options()
    console = Console()
    runs = RUNS / ("demo" if options.data is None else f"demo-{options.data.stem}")
    console.rule("1. model")
    prepared = prepare(runs, options.data)
    plan = demo_plan(read_card(prepared.folder).num_blocks, prepared.calibration, batch=BATCH)
    console.print(f"model: {prepared.folder}   plan: {save_plan(plan, runs)}")
    settings = ServeSettings(model=str(prepared.folder.resolve()), plan=plan)
    console.rule("2. service")
    with serving(settings, LocalCluster(port=options.port)) as url:
        _wait_until_ready(url)
        console.print(f"serving at {url}")
        if options.keep:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            console.print(f"try: offramp predict 'play some music' --url {url}   API: {url}/docs   stop: Ctrl-C")
            _wait_for_the_end()
            return
        console.rule("3. load")
        report, stats = asyncio.run(_load(url, prepared, options.requests))
    console.print(render(report))
    console.rule("4. what happened")
    print(plan_text(plan, stats))
    _conclude(console, prepared, plan, report, stats, runs)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="your own labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json")
    parser.add_argument("--keep", action="store_true", help="serve until told to stop")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=4000)
    return parser.parse_args()


def _wait_until_ready(url: str) -> None:
    from offramp.client.client import Client

    with Client(url) as client:
        client.wait_until_ready(timeout_s=60)


def _wait_for_the_end() -> None:
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("stopped")


async def _load(url: str, prepared: Prepared, num_requests: int) -> tuple[LoadReport, dict[str, Any]]:
    """A short closed loop finds the capacity; the report is of an open loop below it."""
    probe = LoadConfig(
        url=url,
        inputs=prepared.test.texts,
        labels=prepared.test.labels,
        slo_s=SLO_S,
        num_requests=max(200, num_requests // 4),
        concurrency=64,
    )
    closed = await run_load(probe)
    rate_rps = SHARE_OF_CAPACITY * closed.achieved_rps
    print(f"capacity (64 clients, closed loop): {closed.achieved_rps:.0f}/s; open loop at {rate_rps:.0f}/s")
    before = await _stats(url)
    report = await run_load(replace(probe, num_requests=num_requests, concurrency=None, rate_rps=rate_rps))
    return report, _since(before, await _stats(url))


async def _stats(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        stats: dict[str, Any] = (await client.get(f"{url}/stats")).json()
        return stats


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The counts of `after` without those of `before`; one replica per stage, so that they match by place."""
    for stage_before, stage_after in zip(before["stages"], after["stages"], strict=True):
        for old, new in zip(stage_before[0]["splits"], stage_after[0]["splits"], strict=True):
            for name in ("batches", "inputs", "busy_s", "dropped"):
                new[name] -= old[name]
            new["fill"] = new["inputs"] / (new["batches"] * new["batch"]) if new["batches"] else None
    return after


def _conclude(
    console: Console, prepared: Prepared, plan: Plan, report: LoadReport, stats: dict[str, Any], runs: Path
) -> None:
    labels = read_card(prepared.folder).label_names
    full_N = prepared.expected.answers()[:, -1]
    answered = [record for record in report.records if record.predictions]
    agreed = sum(record.predictions[0].label == labels[full_N[record.input_indices[0]]] for record in answered)
    full_accuracy = prepared.expected.outcome({}).accuracy
    agreement = agreed / len(answered)
    console.print(
        f"blocks run: {report.mean_exit_blocks:.2f} of {plan.num_blocks} on average; "
        f"agreement with the full model: {agreement:.2%} "
        f"(promised: {1 - prepared.calibration.budget:.0%} with confidence {prepared.calibration.confidence:.0%}); "
        f"accuracy: {report.accuracy:.2%}, the full model's: {full_accuracy:.2%}"
    )
    draw(plan, stats, report.answers_by_exit, runs / "plan.png")
    figures = report.to_json() | {"agreement": agreement, "stats": stats, "plan": plan_document(plan)}
    (runs / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(f"picture: {runs / 'plan.png'}   figures: {runs / 'report.json'}")


if __name__ == "__main__":
    main()
