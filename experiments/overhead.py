"""Measures the processor time per request of each part of the service, around a model that costs nothing.

    python -m experiments.overhead [--rounds 5] [--fronts direct haproxy]

Measures at three rates and under saturation; figures are medians of rounds. The client shares the machine's cores with
the service. Minutes: 2 per round and front.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from deployments.choices import HttpFront
from deployments.settings import ServeSettings
from experiments.live.model import tiny_model
from experiments.peers.client import ClientOptions, run_client, write_inputs
from experiments.peers.offramp_server import OfframpOptions, offramp_process
from experiments.peers.sides import per_input
from experiments.turns import Figures, in_turns, print_figures
from optimizer.plans.plan import stock_plan

LOADS: Mapping[str, Mapping[str, float]] = {
    **{f"{rate:g}/s": {"rate_per_s": rate} for rate in (100.0, 450.0, 1000.0)},
    "saturated": {"concurrency": 64},
}
SLO_S = 0.25
WARM_S = 2.0
TEXTS = (
    "turn on the light",
    "what is the weather like tomorrow",
    "book a table for two at eight",
    "how much of my salary goes into taxes",
)


def main() -> None:
    """Measures and prints."""
    parser = ArgumentParser(prog="python -m experiments.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per load")
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch", help="backend of the model")
    parser.add_argument("--fronts", nargs="+", choices=get_args(HttpFront), default=["auto"])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder) / "inputs.jsonl", TEXTS)
        # With one tiny block, the measured costs are those of the service.
        model = tiny_model(Path(folder) / "model", name="costless", num_blocks=1, hidden_size=16)
        settings = ServeSettings(model=str(model), plan=stock_plan(1, batch=32), backend=options.backend)
        fronts = {front: OfframpOptions.of(settings, {}, port=options.port, front=front) for front in options.fronts}
        sides = {front: partial(cost_by_part, each, inputs, options.seconds) for front, each in fronts.items()}
        figures_by_side = in_turns(sides, options.rounds, warm_ups=0)
    if options.json:
        print(json.dumps(figures_by_side))
    else:
        print_figures(f"{options.rounds} rounds", figures_by_side)


def cost_by_part(options: OfframpOptions, inputs: Path, seconds: float) -> Figures:
    """Returns milliseconds of processor time per answer, by part and in total, at every rate and under saturation."""
    figures: Figures = {}
    with offramp_process(options) as remote:
        server = remote.server
        for name, load in LOADS.items():
            load_options = {"url": server.url, "inputs": inputs, "slo_s": SLO_S, **load}
            run_client(ClientOptions.model_validate(load_options | {"duration_s": WARM_S}))
            before = server.cpu_s_by_part()
            result = run_client(ClientOptions.model_validate(load_options | {"duration_s": seconds}))
            assert not result.lost_share, result
            parts_s = per_input(before, server.cpu_s_by_part(), result.num_sent)
            parts_s["beside the stages"] = sum(each_s for part, each_s in parts_s.items() if part != "stages")
            figures |= {f"{name}, ms, {part}": 1000 * each_s for part, each_s in parts_s.items()}
            figures[f"{name}, p50 ms"] = 1000 * (result.p50_s or 0.0)
            figures[f"{name}, answers/s"] = result.answered_per_s
    return figures


if __name__ == "__main__":
    main()
