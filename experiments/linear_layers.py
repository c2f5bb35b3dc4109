"""Linear layers on a CPU: torch's own, and oneDNN's with weights laid out once (`earlyexit.reordered`).

    python -m experiments.linear_layers

One thread; medians of 15 runs, the sides in turn. Minutes: about 1.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from earlyexit.reordered import ReorderedLinear

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
    print(f"{'layer':>12} {'tokens':>6} {'dtype':>9} {'torch us':>9} {'packed us':>9}  ratio  packed Gflop/s")
    for wide_in, wide_out in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.Linear(wide_in, wide_out).to(dtype).requires_grad_(False)
            packed = ReorderedLinear(layer)
            for tokens in TOKENS:
                values = torch.randn(tokens, wide_in).to(dtype)
                plain_s, packed_s = _medians_s((layer, packed), values, options.repeats)
                gflops = 2 * tokens * wide_in * wide_out / packed_s / 1e9
                print(
                    f"{wide_in:>5} x {wide_out:<4} {tokens:>6} {str(dtype).removeprefix('torch.'):>9}"
                    f" {plain_s * 1e6:9.0f} {packed_s * 1e6:9.0f} {plain_s / packed_s:6.2f} {gflops:8.0f}"
                )


@torch.inference_mode()
def _medians_s(sides: tuple[Callable[[Tensor], Tensor], ...], values: Tensor, repeats: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(WARM_UP + repeats):
        for side, took in zip(sides, seconds, strict=True):
            started_s = time.perf_counter()
            side(values)
            if turn >= WARM_UP:
                took.append(time.perf_counter() - started_s)
    return [median(took) for took in seconds]


if __name__ == "__main__":
    main()
