"""Both parts of the demo in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offramp.commands.plan_picture import FUSED, SHRINKING, load_pyplot
from offramp.demo.turns import Ran

COLORS = {"stock": "#888888", "early-exit": SHRINKING, "planned": FUSED}
LABELS = {
    "stock": "stock: no exits",
    "early-exit": "early-exit: a batch shrinks",
    "planned": "planned: survivors are fused",
}


def draw(processors: Mapping[str, Ran], emulated: Mapping[str, Ran], path: Path) -> None:
    """Above, the mean batch at every block of the emulated accelerators; below, what each part has to show."""
    pyplot = load_pyplot()
    figure = pyplot.figure(figsize=(9, 6), constrained_layout=True)
    above, left, right = (figure.add_subplot(*place) for place in ((2, 1, 1), (2, 2, 3), (2, 2, 4)))
    planned = emulated["planned"]
    blocks = range(planned.plan.num_blocks)
    above.bar(blocks, planned.batch_at_block, width=0.7, color=COLORS["planned"], label=LABELS["planned"])
    for name in ("early-exit", "stock"):
        above.plot(blocks, emulated[name].batch_at_block, color=COLORS[name], marker="o", label=LABELS[name])
    for split in planned.plan.splits[1:]:
        above.axvline(split.first - 0.5, color="#555555", linewidth=0.8, linestyle="--")
    highest = max(max(each.batch_at_block) for each in emulated.values())
    above.set(xlabel="block", ylabel="inputs in a batch", ylim=(0, 1.35 * highest))
    above.set_title("16 emulated V100: batch at every block, measured")
    above.legend(loc="upper right", ncols=3, fontsize=8)
    parts = (
        (left, emulated, "of the load answered in time (%)", "16 emulated V100, the same load", 100.0, "in_time"),
        (right, processors, "ms of processor time per answer", "This machine's processors", 1e3, "cpu_per_answer_s"),
    )
    for axes, ran, label, title, times, name in parts:
        values = [times * getattr(each, name) for each in ran.values()]
        bars = axes.barh(list(ran), values, color=[COLORS[side] for side in ran], height=0.6)
        axes.bar_label(bars, [f" {value:.3g}" for value in values])
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.3 * max(values)), xlabel=label, title=title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
