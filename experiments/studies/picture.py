"""Pictures as plain data, and their SVG files; equal pictures give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from earlyexit.errors import InputError
from offramp.commands.plan import load_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Mapping[str, tuple[float | None, ...]]
"""A value per place, by series name; None is a gap. Each strategy has its own colour."""


@dataclass(frozen=True, slots=True)
class _Axes:
    title: str
    x_label: str
    """Label with unit, such as "input batch" or "SLO (ms)"."""
    y_label: str
    """Label with unit, such as "goodput (inputs/s)"."""
    log_y: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Bars(_Axes):
    """A group of bars per label, with one bar per series; a gap shows "none"."""

    labels: tuple[str, ...]
    """Labels of the groups, from left to right."""
    series: Values
    paper: Values = field(default_factory=dict)
    """The paper's values of the same series, drawn as diamonds over ours; None without a value."""
    kind: Literal["bars"] = "bars"

    def __post_init__(self) -> None:
        _check(self.title, len(self.labels), self.series, self.paper)


@dataclass(frozen=True, slots=True)
class Lines(_Axes):
    """Series over a common, rising x; a gap interrupts its line."""

    x: tuple[float, ...]
    series: Values
    paper: Values = field(default_factory=dict)
    """The paper's values, as in `Bars`."""
    log_x: bool = False
    kind: Literal["lines"] = "lines"

    def __post_init__(self) -> None:
        if list(self.x) != sorted(set(self.x)):
            raise InputError(f"{self.title}: x must rise")
        _check(self.title, len(self.x), self.series, self.paper)


@dataclass(frozen=True, slots=True)
class Box:
    """The distribution of values."""

    minimum: float
    quartile: float
    median: float
    third_quartile: float
    maximum: float

    def __post_init__(self) -> None:
        values = (self.minimum, self.quartile, self.median, self.third_quartile, self.maximum)
        if not all(map(math.isfinite, values)) or list(values) != sorted(values):
            raise InputError(f"a box must be finite and rise from minimum to maximum: {values}")


@dataclass(frozen=True, slots=True)
class Boxes(_Axes):
    """A group of boxes per label, with one box per series; whiskers end at minimum and maximum."""

    labels: tuple[str, ...]
    series: Mapping[str, tuple[Box | None, ...]]
    limit: float | None = None
    """A horizontal line, such as the SLO; None for no line."""
    kind: Literal["boxes"] = "boxes"

    def __post_init__(self) -> None:
        _check_lengths(self.title, len(self.labels), self.series)


Picture = Bars | Lines | Boxes


def _check(title: str, length: int, series: Values, paper: Values) -> None:
    _check_lengths(title, length, series)
    alone = paper.keys() - series.keys()
    if alone:
        raise InputError(f"{title}: the paper's series {', '.join(alone)} is not among ours")
    for values in (*series.values(), *paper.values()):
        if len(values) != length or not all(value is None or math.isfinite(value) for value in values):
            raise InputError(f"{title}: a series needs {length} finite values or None, not {values}")


def _check_lengths(title: str, length: int, series: Mapping[str, tuple[object, ...]]) -> None:
    if not series or not length:
        raise InputError(f"{title}: nothing to show")
    for name, values in series.items():
        if len(values) != length:
            raise InputError(f"{title}: {name} has {len(values)} values for {length} places")


# Pictures as SVG.

COLORS = {"stock": "#7a7a7a", "early-exit": "#e69f00", "e3": "#0072b2", "serial": "#cc79a7", "best": "#009e73"}
"""Each strategy has the same colour in all pictures (Okabe and Ito's palette, which suits colour-blind readers)."""
OTHER_COLORS = ("#d55e00", "#56b4e9", "#8c6d1f", "#000000", "#b58fd6", "#8fb339")
"""Colours of series that are not strategies, in order."""
MARKERS = ("o", "s", "^", "v", "P", "X", "*")
PAPER = "the paper"
SETTINGS = {
    "svg.hashsalt": "offramp",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}
WIDTH = 0.8
"""Width of a group of bars; the distance of labels is 1."""
BOX = ("whislo", "q1", "med", "q3", "whishi")
"""Matplotlib's names of the figures of a box, in order."""
MOST_MARKED = 30
"""Largest number of points of a line with markers."""


def draw(picture: Picture, path: Path) -> None:
    """Writes one SVG; raises InputError without matplotlib."""
    pyplot = load_pyplot()
    with pyplot.rc_context(SETTINGS):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), constrained_layout=True)
        try:
            _draw_on(axes, picture)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
        finally:
            pyplot.close(figure)


def colors(names: Iterable[str]) -> dict[str, str]:
    """Returns every series' colour."""
    others = [name for name in names if name not in COLORS]
    return COLORS | {name: OTHER_COLORS[index % len(OTHER_COLORS)] for index, name in enumerate(others)}


def _draw_on(axes: Axes, picture: Picture) -> None:
    DRAW[type(picture)](axes, picture)
    axes.set(xlabel=picture.x_label, ylabel=picture.y_label)
    axes.set_title(picture.title, fontsize=10, loc="left")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if picture.log_y:
        axes.set_yscale("log")
    else:  # from 0, so that the length of a bar is proportional to its value
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _explain(axes)


def _explain(axes: Axes) -> None:
    """Puts the legend beside the axes, with every name once and the paper's last."""
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    ordered = sorted(once, key=PAPER.__eq__)
    beside = {"bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0, "frameon": False}
    axes.legend([once[name] for name in ordered], ordered, loc="upper left", **beside)


def _draw_bars(axes: Axes, picture: Bars) -> None:
    color_of = colors(picture.series)
    for name, places in _places(picture.series, len(picture.labels)).items():
        values = picture.series[name]
        width = 0.94 * WIDTH / len(picture.series)
        shown = [(at, value) for at, value in zip(places, values, strict=True) if value is not None]
        axes.bar([at for at, _ in shown], [value for _, value in shown], width, color=color_of[name], label=name)
        for at, value in zip(places, values, strict=True):
            if value is None:
                axes.annotate("none", (at, 0), xytext=(0, 2), textcoords="offset points", ha="center", rotation=90)
        _mark_paper(axes, places, picture.paper.get(name, ()))
    _label_groups(axes, picture.labels)


def _draw_lines(axes: Axes, picture: Lines) -> None:
    color_of = colors(picture.series)
    marked = len(picture.x) <= MOST_MARKED
    for index, (name, values) in enumerate(picture.series.items()):
        heights = [float("nan") if value is None else value for value in values]
        marker = MARKERS[index % len(MARKERS)] if marked else None
        axes.plot(picture.x, heights, color=color_of[name], marker=marker, markersize=4, linewidth=1.5, label=name)
        _mark_paper(axes, picture.x, picture.paper.get(name, ()), color_of[name])
    if picture.log_x:
        axes.set_xscale("log")
    if picture.log_x and marked:  # few points are their own ticks: 25, 50, 100 instead of powers of ten
        axes.set_xticks(picture.x, [f"{value:g}" for value in picture.x])
        axes.minorticks_off()


def _draw_boxes(axes: Axes, picture: Boxes) -> None:
    color_of = colors(picture.series)
    for name, places in _places(picture.series, len(picture.labels)).items():
        shown = [(at, box) for at, box in zip(places, picture.series[name], strict=True) if box is not None]
        axes.bxp(
            [dict(zip(BOX, astuple(box), strict=True)) for _, box in shown],
            positions=[at for at, _ in shown],
            widths=0.8 * WIDTH / len(picture.series),
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": color_of[name], "label": name},
            medianprops={"color": "black"},
        )
    if picture.limit is not None:
        axes.axhline(picture.limit, color="#b00020", linewidth=1.0, linestyle="--", label="limit")
    _label_groups(axes, picture.labels)


def _places(series: Mapping[str, object], groups: int) -> dict[str, list[float]]:
    """Returns the x positions of every series in every group."""
    step = WIDTH / len(series)
    left = -WIDTH / 2 + step / 2
    return {name: [group + left + index * step for group in range(groups)] for index, name in enumerate(series)}


def _label_groups(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_xticks(range(len(labels)), list(labels))
    axes.tick_params(axis="x", length=0)


def _mark_paper(axes: Axes, places: Sequence[float], values: Sequence[float | None], color: str = "white") -> None:
    shown = [(at, value) for at, value in zip(places, values, strict=bool(values)) if value is not None]
    if shown:
        at, heights = zip(*shown, strict=True)
        axes.plot(at, heights, "D", markersize=5, markerfacecolor=color, markeredgecolor="black", label=PAPER)


DRAW: dict[type, Callable[[Axes, Any], None]] = {Bars: _draw_bars, Lines: _draw_lines, Boxes: _draw_boxes}
