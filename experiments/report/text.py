"""REPORT.md: a pure function of the studies' results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.studies.command import FIGURES, number
from experiments.studies.record import Done, Failed, Record
from experiments.studies.study import Comparison, Ratios

HOW = {
    "simulated": "the live batch engine, router and admission on a simulated clock",
    "computed": "from records, published times and the cost model; nothing is served or simulated",
    "emulated": "the live service, with accelerators that take known times",
    "real": "measured on the machine above",
}
NONE = "-"
COLUMNS = (
    "figure",
    "E3's claim",
    "E3's paper: e3 over stock / early-exit",
    "ours: e3 over stock / early-exit",
    "ours: best over stock / early-exit",
    "how",
    "exits",
    "`python -m experiments.studies.`…",
)


def report_text(records: Sequence[Record]) -> str:
    """The report on these results, in their order, with pictures beside it in `figures/`."""
    parts = [*_head(records), "## All figures", "\n".join(_table(records))]
    for record in records:
        parts += _section(record)
    return "\n\n".join(parts) + "\n"


def _head(records: Sequence[Record]) -> Iterator[str]:
    yield "# E3's evaluation, done again"
    flag = " --quick" if _quick(records) else ""
    yield (
        f"Written by `python -m experiments.report{flag}`; every figure comes from the command in its row. "
        "One study per figure of E3 (SOSP'24, sections 2 and 5), without figure 8 (vision), 10 to 12 (generation) and "
        "those that show no result. Goodput is the highest Poisson rate of single inputs of which 99 % are answered "
        "within the SLO, 100 ms unless said. E3's clients are closed loops whose batches are always full, except in "
        "figure 19. What is called E3's case, exits or circumstances is made up from the words of its paper. "
        "`stock` runs the whole model, `early-exit` the model with its ramps as one piece, `e3` plans as the paper "
        "does, and `best` has the whole space of Offramp's planner. A ratio says how many times better a strategy is "
        "(goodput, or cost where the goodput is fixed), at the point of the figure where it is largest, as the paper "
        "quotes its own."
    )
    if _quick(records):
        yield (
            "**Quick runs: fewer points and shorter runs than the full report; not for quoting. Why ours differ is "
            "told of the full runs.**"
        )
    yield "\n".join(_facts(records))


def _quick(records: Sequence[Record]) -> bool:
    return any(record.effort == "quick" for record in records)


def _facts(records: Sequence[Record]) -> Iterator[str]:
    """Where, with what and when; the commit is left out, as the report is part of one."""
    if not records:
        yield "No study ran."
        return
    where = [record.provenance for record in records]
    pythons = [f"Python {version}" for version in sorted({each.python for each in where})]
    minutes = sum(record.outcome.took_s for record in records if isinstance(record.outcome, Done)) / 60
    versions = {f"{name} {version}" for each in where for name, version in each.versions.items()}
    days = sorted({f"{each.created_at:%Y-%m-%d}" for each in where})
    yield f"- Machine: {'; '.join(sorted({each.machine for each in where}))}"
    yield f"- Versions: {', '.join([*pythons, *sorted(versions)])}"
    yield f"- Date: {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")
    yield f"- Minutes: {minutes:.1f} over all studies"
    used = {record.about.how for record in records if not isinstance(record.outcome, Failed)}
    yield from (f"- {how.capitalize()}: {words}" for how, words in HOW.items() if how in used)


def _table(records: Sequence[Record]) -> Iterator[str]:
    yield _row(COLUMNS)
    yield "|---" * len(COLUMNS) + "|"
    for record in records:
        about = record.about
        how = (NONE, NONE) if isinstance(record.outcome, Failed) else (about.how, about.exits)
        yield _row((f"[{about.figure}](#{about.name})", about.claim, *_figures(record), *how, f"`{about.name}`"))


def _figures(record: Record) -> tuple[str, str, str]:
    """The paper's, ours of e3 and ours of best; the first comparison where a study has no ratios."""
    if not isinstance(record.outcome, Done):
        return _pair(record.about.paper), f"**{record.outcome.state}**: {record.outcome.reason}", NONE
    result = record.outcome.result
    if any(each != Ratios() for each in (record.about.paper, result.e3, result.best)):
        return _pair(record.about.paper), _pair(result.e3), _pair(result.best)
    if not result.comparisons:
        return NONE, NONE, NONE
    first = result.comparisons[0]
    return f"{first.name}: {_number(first.paper)}", _number(first.ours), NONE


def _pair(ratios: Ratios) -> str:
    if ratios == Ratios():
        return NONE
    return " / ".join(NONE if each is None else f"{each:.2f}" for each in (ratios.over_stock, ratios.over_early_exit))


def _number(value: float | None) -> str:
    return NONE if value is None else number(value)


def _section(record: Record) -> Iterator[str]:
    about = record.about
    yield f'<a id="{about.name}"></a>\n\n## Figure {about.figure}: {about.title}'
    yield f"**E3** (section {about.section}): {about.claim}.{' ' + about.detail if about.detail else ''}"
    if isinstance(record.outcome, Done):
        yield f"**Here**: {about.how}. Exits: {about.exits}. Hardware: {about.hardware}. Seed {about.seed}."
        yield from _outcome(record, record.outcome)
        yield f"**Why ours differs**: {about.differs}"
    else:
        yield f"**{record.outcome.state.capitalize()}**: {record.outcome.reason}"
    quick = " --quick" if record.effort == "quick" else ""
    took = f" (took {record.outcome.took_s / 60:.1f} min)" if isinstance(record.outcome, Done) else ""
    yield f"Command{took}: `{about.command}{quick}`"


def _outcome(record: Record, done: Done) -> Iterator[str]:
    for name, picture in record.pictures.items():
        yield f"![{picture.title}]({FIGURES}/{name})"
    if done.result.comparisons:
        yield "\n".join(_comparisons(done.result.comparisons))
    if done.result.notes:
        yield "\n".join(f"- {note}" for note in done.result.notes)


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield _row(("", "E3's paper", "ours"))
    yield "|---|--:|--:|"
    for each in comparisons:
        yield _row((each.name, _number(each.paper), _number(each.ours)))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
