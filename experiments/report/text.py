"""Builds REPORT.md from the studies' results, `head.md`, and the studies' Markdown files, as a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.kit import format_figure
from experiments.studies.__main__ import FIGURES
from experiments.studies.picture import Picture
from experiments.studies.study import SYSTEMS, Ratios, Record, StudyResult, Table

HOW = {
    "simulated": "the live batch engine, router and admission on a simulated clock",
    "computed": "from records, published times and the cost model, without a service or a simulation",
    "emulated": "the live service, with accelerators that take known times",
    "real": "measured on the machine above",
}
NONE = "-"
SHARED = ("figure", "claim", "how", "exits", "`python -m experiments.studies`")
"""Columns of every system's table; columns of figures are inserted after the claim."""
COLUMNS = {
    "E3": (
        *SHARED[:2],
        "E3's paper: e3 over stock / early-exit",
        "ours: e3 over stock / early-exit",
        "ours: best over stock / early-exit",
        *SHARED[2:],
    ),
    **{system: (*SHARED[:2], f"{system}'s paper", "ours", *SHARED[2:]) for system in SYSTEMS},
}
QUICK = (
    "**Quick runs have fewer points and shorter runs than the full report. Do not quote their figures. The "
    "explanations of differences are those of the full runs.**"
)


def report_text(records: Sequence[Record], *, pictures: bool = True) -> str:
    """Returns the report on these results, in their order, with or without the pictures in `figures/`."""
    quick = any(record.effort == "quick" for record in records)
    head = Path(__file__).with_name("head.md").read_text(encoding="utf-8").strip()
    parts = [
        "# The evaluations of E3, Apparate, PAME, TCB and Tabi, repeated",
        f"Written by `python -m experiments.report{' --quick' if quick else ''}`. {head}",
        *([QUICK] if quick else []),
        "\n".join(_facts(records)),
    ]
    for system, columns in COLUMNS.items():
        of_system = [record for record in records if record.about.system == system]
        if of_system:
            parts += [f"## Figures of {system}", "\n".join(_table(of_system, columns))]
    for record in records:
        parts += _section(record, record.pictures if pictures else {})
    return "\n\n".join(parts) + "\n"


def _facts(records: Sequence[Record]) -> Iterator[str]:
    """Yields machine, versions, commits, dates and minutes of the figures."""
    if not records:
        yield "No study ran."
        return
    where = [record.provenance for record in records]
    pythons = [f"Python {version}" for version in sorted({each["python"] for each in where})]
    versions = {f"{name} {version}" for each in where for name, version in each["versions"].items()}
    days = sorted({each["created_at"][:10] for each in where})
    yield f"- Machine: {'; '.join(sorted({each['machine'] for each in where}))}"
    yield f"- Versions: {', '.join([*pythons, *sorted(versions)])}"
    yield f"- Commit: {', '.join(sorted({str(each['commit'])[:8] for each in where}))}"
    yield f"- Date: {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")
    yield f"- Minutes: {sum(record.outcome.took_s for record in records) / 60:.1f} over all studies"
    used = {record.about.how for record in records if record.outcome.state != "failed"}
    yield from (f"- {how.capitalize()}: {words}" for how, words in HOW.items() if how in used)


def _table(records: Sequence[Record], columns: Sequence[str]) -> Iterator[str]:
    yield _row(columns)
    yield "|---" * len(columns) + "|"
    for record in records:
        about = record.about
        how = (NONE, NONE) if record.outcome.state == "failed" else (about.how, about.exits)
        figures = _figures(record)[: len(columns) - len(SHARED)]
        yield _row((f"[{about.figure}](#{about.name})", about.claim, *figures, *how, f"`{about.name}`"))


def _figures(record: Record) -> tuple[str, str, str]:
    """Returns the paper's figure, ours of e3 and ours of best; without ratios, the first comparison of the study."""
    paper, result = record.about.paper, record.outcome.result
    if result is None:
        return _pair(paper), f"**{record.outcome.state}**: {record.outcome.reason}", NONE
    if any(each != Ratios() for each in (paper, result.e3, result.best)):
        return _pair(paper), _pair(result.e3), _pair(result.best)
    if not result.comparisons:
        return NONE, NONE, NONE
    first = result.comparisons[0]
    return f"{first.name}: {format_figure(first.paper)}", format_figure(first.ours), NONE


def _pair(ratios: Ratios) -> str:
    if ratios == Ratios():
        return NONE
    return " / ".join(NONE if each is None else f"{each:.2f}" for each in (ratios.over_stock, ratios.over_early_exit))


def _section(record: Record, pictures: Mapping[str, Picture]) -> Iterator[str]:
    about, outcome = record.about, record.outcome
    yield f'<a id="{about.name}"></a>\n\n## {about.heading}: {about.title}'
    yield f"**{about.system}** (section {about.section}): {about.claim}.{' ' + about.detail if about.detail else ''}"
    took = ""
    if outcome.result is None:
        yield f"**{outcome.state.capitalize()}**: {outcome.reason}"
    else:
        took = f" (took {outcome.took_s / 60:.1f} min)"
        yield f"**Here**: {about.how}. Exits: {about.exits}. Hardware: {about.hardware}. Seed {about.seed}."
        yield from (f"![{picture.title}]({FIGURES}/{name})" for name, picture in pictures.items())
        yield from _tables(outcome.result, about.system)
        yield f"**Why ours differs**: {about.differs}"
    yield f"Command{took}: `{about.command}{' --quick' if record.effort == 'quick' else ''}`"


def _tables(result: StudyResult, system: str) -> Iterator[str]:
    compared = tuple((each.name, each.paper, each.ours) for each in result.comparisons)
    for table in (Table("", ("", f"{system}'s paper", "ours"), compared), *result.tables):
        if table.rows:
            yield from [f"{table.title}:"] if table.title else []
            rows = [_row([format_figure(cell) for cell in row]) for row in table.rows]
            yield "\n".join([_row(table.columns), "|---" + "|--:" * (len(table.columns) - 1) + "|", *rows])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
