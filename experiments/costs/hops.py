"""What a convolutional hop costs in processor time: ResNet-20 in two stages beside the same network uncut, at one rate.

    OFFRAMP_DATA=... python -m experiments.costs.hops [--rate 20] [--seconds 30] [--inputs 4]

Nobody leaves early, so every image crosses: 65.5 kB after block 2, 32.8 in float16. Told are milliseconds of processor
time per image, of the ingress and of all replicas together; a stage has one replica. Requests of `--inputs` images at
constant intervals. Sides one after the other, each a service of its own: processor time hardly wavers with the machine,
but caches that others use cost all sides something. Writes runs/hop_cost.json. Minutes: 4.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace

import psutil

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.boundary import HopDtype
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.image_model import ImageModel, image_model
from experiments.live.meter import replica_pids
from experiments.overhead import cpu_s
from offramp.client.client import Client
from offramp.load.run import LoadConfig, run_load
from optimizer.plan import Plan, PolicySpec, Stage

CUT, BATCH = 3, 8
NUM_IMAGES = 200
WARM_UP = 20
SIDES: Mapping[str, tuple[tuple[int, ...], HopDtype]] = {
    "uncut": ((), "same"),
    "cut after block 2": ((CUT,), "same"),
    "cut, hops in float16": ((CUT,), "float16"),
}
"""Where the stages begin, and in what hidden states travel."""
Figures = dict[str, float]


def main() -> None:
    """Measure, print and write."""
    parser = ArgumentParser(prog="python -m experiments.costs.hops", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="images per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--inputs", type=int, default=4, help="images per request")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    options = parser.parse_args()
    model = image_model(NUM_IMAGES)
    found = {name: measured(options, model, *side) for name, side in SIDES.items()}
    rows = [(name, *figures.values()) for name, figures in found.items()]
    title = f"{options.rate:g} images/s, {options.inputs} a request"
    show(title, ("", *next(iter(found.values()))), rows)
    print(f"written: {keep(found, RUNS / 'hop_cost.json')}")


def measured(options: Namespace, model: ImageModel, bounds: tuple[int, ...], hop_dtype: HopDtype) -> Figures:
    """Milliseconds of processor time per image."""
    settings = ServeSettings(model=str(model.folder.resolve()), plan=stay(model.plan(*bounds)), hop_dtype=hop_dtype)
    with serving(settings, LocalCluster(port=options.port, front=options.front)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=120)
        load = LoadConfig(
            url=url,
            inputs=model.images,
            num_requests=max(1, int(options.rate * options.seconds / options.inputs)),
            rate_rps=options.rate / options.inputs,
            arrivals="constant",
            inputs_per_request=options.inputs,
            slo_s=30.0,
        )
        asyncio.run(run_load(replace(load, num_requests=WARM_UP)))
        before_s = dict(spent_s(settings.app))
        report = asyncio.run(run_load(load))
        assert not report.errors, report.errors
        after_s = dict(spent_s(settings.app))
    spent_ms = {name: 1000 * (after_s[name] - before_s[name]) / report.num_answers for name in after_s}
    assert report.latency is not None
    return {
        "ingress ms": spent_ms["ingress"],
        "replicas ms": sum(each for name, each in spent_ms.items() if name.startswith("split-")),
        "p50 ms": 1000 * report.latency.p50_s,
        "images": report.num_answers,
    }


def stay(plan: Plan) -> Plan:
    """The stages with one replica each, and no exit before the end."""
    stages = tuple(
        Stage(device=stage.device, replicas=1, splits=tuple(replace(s, ramps=(), batch=BATCH) for s in stage.splits))
        for stage in plan.stages
    )
    return Plan(stages=stages, policy=PolicySpec(name="confidence", thresholds=1.0))


def spent_s(app: str) -> Iterator[tuple[str, float]]:
    """Processor seconds since its processes began, by deployment."""
    for deployment, pids in replica_pids(app).items():
        yield deployment, sum(cpu_s(psutil.Process(pid)) for pid in pids)


if __name__ == "__main__":
    main()
