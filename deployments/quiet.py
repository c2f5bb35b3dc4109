"""What a log may have of an unexpected error: its type and its way, not its words, which may quote a request."""

from __future__ import annotations

import logging
import traceback


class WithoutWords(logging.Filter):
    """Of a logger: tracebacks are written without the messages of their exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Formatters take the text of a traceback that is there already."""
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = traceback_without_words(record.exc_info[1])
        return True


def traceback_without_words(error: BaseException) -> str:
    """Where it came from and what it is."""
    lines = traceback.format_tb(error.__traceback__)
    return "".join([*lines, f"{type(error).__name__} (its message is left out: it may quote the request)"])
