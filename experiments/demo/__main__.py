"""`make demo` and `make serve`: train, plan, serve, load, report, end. Minutes on two cores; CPU only."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from experiments.data import RUNS
from experiments.demo.load import MACHINE, SLO_FACTOR, Ran, loaded, tell
from experiments.demo.picture import draw, plan_text
from experiments.demo.prepare import Prepared, prepare, save_plan
from experiments.peers.plans import prepare as plan_sides
from experiments.peers.workloads import calibrated
from optimizer.plan import Plan
from optimizer.plan_file import plan_document

SIDE_OF = {"offramp": "planned"}
"""What is called otherwise where Offramp is compared with other servers."""


def main() -> None:
    """Run the demo, or serve until told to stop."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended
    console = Console()
    runs = RUNS / ("demo" if options.data is None else f"demo-{options.data.stem}")
    console.rule("1. model")
    prepared = prepare(runs, options.data)
    console.rule("2. plan")
    workload = calibrated("demo", prepared.folder, prepared.test, truncate=True)
    planned = plan_sides(workload, "float32", MACHINE, slo_factor=SLO_FACTOR)
    filling = {name: replace(plan, dispatch="filling") for name, plan in planned.plans.items()}  # processors are shared
    planned = replace(planned, plans={SIDE_OF.get(name, name): plan for name, plan in filling.items()})
    plan = planned.plans["planned"]
    console.print(f"model: {prepared.folder}   plan, of latencies measured just now: {save_plan(plan, runs)}")
    if options.keep:
        _keep(console, prepared, plan, options.port)
        return
    console.rule("3. service and load")
    ran = loaded(workload, prepared, planned, port=options.port)
    console.rule("4. what happened")
    tell(ran, planned.slo_s)
    print(plan_text(plan, ran["planned"].fill))
    _conclude(console, prepared, ran, runs)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="your own labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json")
    parser.add_argument("--keep", action="store_true", help="serve until told to stop")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def _keep(console: Console, prepared: Prepared, plan: Plan, port: int) -> None:
    console.rule("3. service")
    with serving(ServeSettings(model=str(prepared.folder.resolve()), plan=plan), LocalCluster(port=port)) as url:
        from offramp.client.client import Client

        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        console.print(f"serving at {url}")
        console.print(f"try: offramp predict 'play some music' --url {url}   API: {url}/docs   stop: Ctrl-C")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopped")


def _conclude(console: Console, prepared: Prepared, ran: Mapping[str, Ran], runs: Path) -> None:
    planned, stock = ran["planned"], ran["stock"]
    console.print(
        f"blocks run: {planned.mean_blocks:.2f} of {planned.plan.num_blocks} on average; "
        f"processor time per answer: {planned.cpu_per_answer_s / stock.cpu_per_answer_s:.2f} x stock's; "
        f"promised: {1 - prepared.calibration.budget:.0%} of the answers are the full model's, "
        f"with confidence {prepared.calibration.confidence:.0%}"
    )
    draw(ran, runs / "plan.png")
    figures = {name: _document(each) for name, each in ran.items()}
    (runs / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(f"picture: {runs / 'plan.png'}   figures: {runs / 'report.json'}")


def _document(ran: Ran) -> dict[str, object]:
    return {
        "plan": plan_document(ran.plan),
        "load": ran.result.model_dump(mode="json"),
        "in_time": ran.in_time,
        "cpu_per_answer_s": ran.cpu_per_answer_s,
        "batch_at_block": ran.batch_at_block,
        "fill": ran.fill,
        "mean_blocks": ran.mean_blocks,
        "agreement": ran.agreement,
    }


if __name__ == "__main__":
    main()
