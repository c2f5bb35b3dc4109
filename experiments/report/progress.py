"""How far a report is: a bar on a terminal, and one line per finished study there and elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.studies.record import Done, Record


class Watch:
    """A context in which studies start and finish; the bar's text names those that run."""

    def __init__(self, total: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.done = 0
        self._console = console
        self._running: list[str] = []
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("studies", total=total)

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line)

    def started(self, name: str) -> None:
        """A study runs."""
        self._running.append(name)
        self._show()

    def finished(self, record: Record) -> None:
        """A study gave a result, or said why not."""
        self._running.remove(record.about.name)
        self.done += 1
        self._bar.advance(self._task)
        self._show()
        self.say(f"{record.about.name:<28} {_words(record)}")

    def _show(self) -> None:
        self._bar.update(self._task, description=", ".join(self._running) or "studies")


def _words(record: Record) -> str:
    if isinstance(record.outcome, Done):
        return f"done in {record.outcome.took_s:.0f} s"
    return f"{record.outcome.state}: {record.outcome.reason}"
