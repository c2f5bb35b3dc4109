"""The plan and what it did, as a picture and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experiments.demo.load import Ran
from offramp.cli.plan_picture import FUSED, SHRINKING, draw_bands, load_pyplot, stage_label
from optimizer.plan import Plan

FULL = 24
"""Characters of a full bar."""
COLORS = {"stock": "#888888", "early-exit": SHRINKING, "planned": FUSED}


def plan_text(plan: Plan, fill: Mapping[int, tuple[int, float]]) -> str:
    """Stages, their splits and how full their batches were, drawn with characters."""
    lines = []
    for index, stage in enumerate(plan.stages):
        lines.append(f"{stage_label(index, stage)}, blocks {stage.first} to {stage.end - 1}")
        for split in stage.splits:
            batches, share = fill[split.first]
            bar = "#" * round(share * FULL)
            ramps = f"ramps {', '.join(map(str, split.ramps))}" if split.ramps else "no ramps"
            lines.append(
                f"  blocks {split.first}-{split.end - 1}  batch {split.batch:>3}  {ramps:<12}"
                f"  fill [{bar:<{FULL}}] {share:5.1%} over {batches} batches"
            )
    return "\n".join(lines)


def draw(ran: Mapping[str, Ran], path: Path) -> None:
    """Two panels: the mean batch at every block, under each plan; answers in time and what one costs."""
    pyplot = load_pyplot()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), constrained_layout=True)
    planned = ran["planned"]
    draw_bands(above, planned.plan.stages)
    blocks = range(planned.plan.num_blocks)
    above.bar(blocks, planned.batch_at_block, width=0.7, color=COLORS["planned"], label="planned: survivors are fused")
    for name, label in (("early-exit", "early-exit: one batch shrinks"), ("stock", "stock: nobody leaves")):
        above.plot(blocks, ran[name].batch_at_block, color=COLORS[name], marker="o", label=label)
    for split in planned.plan.splits[1:]:
        above.axvline(split.first - 0.5, color="#555555", linewidth=0.8, linestyle="--")
    highest = max(max(each.batch_at_block) for each in ran.values())
    above.set(
        xlabel="block", ylabel="inputs in a batch", ylim=(0, 1.35 * highest), title="Batch at every block, measured"
    )
    above.legend(loc="upper right", ncols=3, fontsize=8)
    spent_ms = [1e3 * each.cpu_per_answer_s for each in ran.values()]
    bars = below.barh(list(ran), spent_ms, color=[COLORS[name] for name in ran], height=0.6)
    below.bar_label(
        bars, [f" {ms:.1f} ms; {each.in_time:.0%} in time" for ms, each in zip(spent_ms, ran.values(), strict=True)]
    )
    below.invert_yaxis()
    below.set(xlim=(0, 1.3 * max(spent_ms)), xlabel="processor time per answer, ms", title="The same load on all three")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
