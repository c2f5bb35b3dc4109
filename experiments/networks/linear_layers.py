"""Feed-forward layers on a CPU: torch's own, and oneDNN's with weights laid out once (`earlyexit.reordered`).

    python -m experiments.networks.linear_layers

A layer, its activation, another layer, and the sum behind it; *apart* each in an operation of its own, *at once* the
activation and the sum in those of the layers. One thread's processor time, medians of 15 runs, the sides in turn.
Minutes: about 1.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.linear import ActivatedLinear, SummedLinear
from earlyexit.reordered import ReorderedLinear
from experiments.kit import show
from experiments.turns import Figures, in_turns

SHAPES = ((384, 1536), (768, 3072))
"""Of MiniLM and of BERT-base."""
TOKENS = (10, 25, 80, 320, 800)
WARM_UP = 3


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.networks.linear_layers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size, wide in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            sides = _sides(size, wide, dtype)
            for tokens in TOKENS:
                values = torch.randn(tokens, size).to(dtype)
                turns = {name: partial(_run, side, values) for name, side in sides.items()}
                found = in_turns(turns, options.repeats, warm_ups=WARM_UP)
                torch_us, apart_us, at_once_us = (median(found[name]["us"]) for name in sides)
                gflops = 4 * tokens * size * wide / at_once_us / 1e3
                name = f"{size} x {wide}, {tokens} tokens, {str(dtype).removeprefix('torch.')}"
                rows.append((name, torch_us, apart_us, at_once_us, torch_us / apart_us, apart_us / at_once_us, gflops))
    columns = ("layers", "torch us", "apart us", "at once us", "torch / apart", "apart / at once", "at once, Gflop/s")
    show("", columns, rows)


def _sides(size: int, wide: int, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    up = ActivatedLinear(size, wide, "gelu").to(dtype).requires_grad_(False)
    down = SummedLinear(wide, size).to(dtype).requires_grad_(False)
    up_at_once, down_at_once = ReorderedLinear(up), ReorderedLinear(down)
    up_apart, down_apart = (ReorderedLinear(_plain(layer)) for layer in (up, down))
    return {
        "torch": lambda values: down(up(values), values),
        "apart": lambda values: down_apart(F.gelu(up_apart(values))) + values,
        "at once": lambda values: down_at_once(up_at_once(values), values),
    }


def _plain(layer: nn.Linear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
    plain.load_state_dict(layer.state_dict(), assign=True)
    return plain.requires_grad_(False)


@torch.inference_mode()
def _run(side: Callable[[Tensor], Tensor], values: Tensor) -> Figures:
    started_s = time.thread_time()
    side(values)
    return {"us": 1e6 * (time.thread_time() - started_s)}


if __name__ == "__main__":
    main()
