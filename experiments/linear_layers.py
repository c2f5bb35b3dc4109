"""Linear layers on a CPU: torch's own, and oneDNN's with weights laid out once (`earlyexit.reordered`).

    python -m experiments.linear_layers

One thread; medians of 15 runs, the sides in turn. Minutes: about 1.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from earlyexit.reordered import ReorderedLinear
from experiments.kit import show
from experiments.turns import Figures, in_turns

SHAPES = ((384, 1536), (768, 3072))
"""Feed-forward layers of MiniLM and of BERT-base."""
TOKENS = (10, 25, 80, 320, 800)
WARM_UP = 3


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.linear_layers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for wide_in, wide_out in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.Linear(wide_in, wide_out).to(dtype).requires_grad_(False)
            sides = {"torch": layer, "reordered": ReorderedLinear(layer)}
            for tokens in TOKENS:
                values = torch.randn(tokens, wide_in).to(dtype)
                turns = {name: partial(_run, side, values) for name, side in sides.items()}
                found = in_turns(turns, options.repeats, warm_ups=WARM_UP)
                plain_us, reordered_us = (median(found[name]["us"]) for name in sides)
                gflops = 2 * tokens * wide_in * wide_out / reordered_us / 1e3
                name = f"{wide_in} x {wide_out}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"
                rows.append((name, plain_us, reordered_us, plain_us / reordered_us, gflops))
    show("", ("layer", "torch us", "reordered us", "ratio", "reordered Gflop/s"), rows)


@torch.inference_mode()
def _run(side: Callable[[Tensor], Tensor], values: Tensor) -> Figures:
    started_s = time.perf_counter()
    side(values)
    return {"us": 1e6 * (time.perf_counter() - started_s)}


if __name__ == "__main__":
    main()
