"""The plan and what it did, as a picture and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offramp.cli.plan_picture import draw_bands, load_pyplot, stage_label
from optimizer.plan import Plan

FULL = 24
"""Characters of a full bar."""


def plan_text(plan: Plan, stats: dict[str, Any]) -> str:
    """Stages, their splits and how full their batches were, drawn with characters."""
    lines = []
    for index, (stage, done) in enumerate(zip(plan.stages, fill_by_stage(stats), strict=True)):
        lines.append(f"{stage_label(index, stage)}, blocks {stage.first} to {stage.end - 1}")
        for split in stage.splits:
            batches, fill = done[split.first]
            bar = "#" * round(fill * FULL)
            ramps = f"ramps {', '.join(map(str, split.ramps))}" if split.ramps else "no ramps"
            lines.append(
                f"  blocks {split.first}-{split.end - 1}  batch {split.batch:>3}  {ramps:<12}"
                f"  fill [{bar:<{FULL}}] {fill:5.1%} over {batches} batches"
            )
    return "\n".join(lines)


def fill_by_stage(stats: dict[str, Any]) -> list[dict[int, tuple[int, float]]]:
    """Per stage, first block -> (batches, mean fill) over its replicas."""
    return [_fill(replicas) for replicas in stats["stages"]]


def _fill(replicas: list[dict[str, Any]]) -> dict[int, tuple[int, float]]:
    splits: dict[int, list[dict[str, Any]]] = {}
    for replica in replicas:
        for split in replica["splits"]:
            splits.setdefault(split["first"], []).append(split)
    return {first: _mean_fill(each) for first, each in splits.items()}


def _mean_fill(splits: list[dict[str, Any]]) -> tuple[int, float]:
    batches = sum(split["batches"] for split in splits)
    inputs = sum(split["inputs"] for split in splits)
    capacity = batches * splits[0]["batch"]
    return batches, inputs / capacity if capacity else 0.0


def draw(plan: Plan, stats: dict[str, Any], exits: dict[int, int], path: Path) -> None:
    """Two panels: who reaches every block, with the stages behind it; fill per split."""
    pyplot = load_pyplot()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), constrained_layout=True)
    total = sum(exits.values())
    reach = [sum(count for block, count in exits.items() if block >= at) / total for at in range(plan.num_blocks)]
    above.bar(range(plan.num_blocks), reach, width=0.7, color="#3b6ea5")
    draw_bands(above, plan.stages)
    for index, stage in enumerate(plan.stages):
        above.text(stage.first - 0.45, 1.03, stage_label(index, stage), fontsize=9)
    above.set(ylim=(0, 1.12), xlabel="block", ylabel="share of inputs that reach it", title="Plan and survival")
    labels, fills = [], []
    for stage, done in zip(plan.stages, fill_by_stage(stats), strict=True):
        for split in stage.splits:
            labels.append(f"{split.first}-{split.end - 1}\n(batch {split.batch})")
            fills.append(done[split.first][1])
    below.bar(labels, fills, width=0.6, color="#c05640")
    below.set(ylim=(0, 1.05), xlabel="split (blocks)", ylabel="mean batch fill", title="Batch fill under load")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
