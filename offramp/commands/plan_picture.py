"""Draws a plan: stages and replicas along the blocks, and the batch with and without fusing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.errors import InputError
from earlyexit.network.boundary import Split
from optimizer.decision import Planned
from optimizer.plan import Stage, chains_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".svg", ".png", ".pdf")
BANDS = ("#9ccc9c", "#f2a65a")
"""Alternating colours of stages."""
FUSED, SHRINKING, RAMP = "#3b6ea5", "#c05640", "#555555"


def check_picture(path: Path) -> Any:
    """Returns the result of `load_pyplot`; raises InputError for an unknown ending, or if matplotlib is missing."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--plot {path}; allowed endings: {', '.join(ENDINGS)}")
    return load_pyplot()


def draw_plan(planned: Planned, path: Path) -> None:
    """Draws a plan in the format of the path's ending. The same plan gives the same file.

    Raises the errors of `check_picture`, and InputError if the file cannot be written.
    """
    pyplot = check_picture(path)
    kind = path.suffix.lower().removeprefix(".")
    with pyplot.rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none"}):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, constrained_layout=True)
        try:
            _draw_devices(above, planned)
            _draw_batches(below, planned)
            figures = planned.figures
            figure.suptitle(
                f"{planned.strategy}: {figures.rate_per_s:.0f}/s, worst case {figures.latency_s * 1e3:.1f} ms, "
                f"{figures.usd_per_hour:.2f} USD/h"
            )
            figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise InputError(f"--plot {path}: cannot be written: {error.strerror}") from error
        finally:
            pyplot.close(figure)


def load_pyplot() -> Any:
    """Returns pyplot, set to draw without a display; raises InputError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("pictures need matplotlib; install the extra `demo`: pip install -e '.[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_bands(axes: Axes, stages: Sequence[Stage]) -> None:
    """Draws each stage as a coloured band over its blocks."""
    for index, stage in enumerate(stages):
        color = BANDS[index % len(BANDS)]
        for first, end in stage.ranges:
            axes.axvspan(first - 0.5, end - 0.5, color=color, alpha=0.25, zorder=0)


def _draw_devices(axes: Axes, planned: Planned) -> None:
    """Draws a bar per split, in a row per stage, and active ramps as dashed lines."""
    if len(planned.figures.shares) == 1:
        draw_bands(axes, planned.stages)
    for index, stage in enumerate(planned.stages):
        for split in stage.splits:
            left, width = split.first - 0.42, split.end - split.first - 0.16
            axes.barh(index, width, left=left, height=0.55, color=FUSED, zorder=2)
            middle = (split.first + split.end - 1) / 2
            axes.text(middle, index, str(_counted(split)), color="white", ha="center", va="center", zorder=3)
            for ramp in split.ramps:
                axes.axvline(ramp + 0.5, color=RAMP, linewidth=0.8, linestyle="--", zorder=1)
    labels = [f"stage {index}:\n{stage.replicas} x {stage.device}" for index, stage in enumerate(planned.stages)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_title("Splits, with their batch sizes; active ramps dashed", fontsize=10)


def _counted(split: Split) -> int:
    """Returns a split's token budget if it has one, else its batch size."""
    return split.tokens or split.batch


def _draw_batches(axes: Axes, planned: Planned) -> None:
    figures = planned.figures
    axes.set(xlabel="block", ylabel="expected batch")
    axes.set_title("Batch at every block", fontsize=10)
    if len(figures.shares) > 1:
        _draw_chains(axes, planned)
        return
    fused = [batch for each in figures.splits for batch in each.batch_at_block]
    entry = _counted(figures.splits[0].split)  # without fusing, the first batch shrinks (E3 section 2.3)
    without = [
        entry * each.reached_by * batch / _counted(each.split)
        for each in figures.splits
        for batch in each.batch_at_block
    ]
    draw_bands(axes, planned.stages)
    blocks = [block for each in figures.splits for block in range(each.split.first, each.split.end)]
    axes.bar(blocks, fused, width=0.7, color=FUSED, label="with fusing")
    axes.plot(blocks, without, color=SHRINKING, marker="o", label=f"one batch of {entry} shrinks")
    axes.set(xticks=list(blocks), ylim=(0, 1.25 * max(fused)))
    axes.legend(loc="upper right", ncols=2, fontsize=9)


def _draw_chains(axes: Axes, planned: Planned) -> None:
    """Draws the batch at every block, with a line per chain."""
    figures, first = planned.figures, 0
    for chain, stages in enumerate(chains_of(planned.stages, planned.stages[-1].end)):
        stage_range = range(first, first + len(stages))
        splits = [each for each in figures.splits if each.stage_index in stage_range]
        blocks = [block for each in splits for block in range(each.split.first, each.split.end)]
        batches = [batch for each in splits for batch in each.batch_at_block]
        label = f"{figures.shares[chain]:.0%} by stages {stage_range.start} to {stage_range.stop - 1}"
        axes.step(blocks, batches, where="mid", marker="o", label=label)
        axes.set_xticks(blocks)
        first = stage_range.stop
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=9)
