"""Tables of the documents, written from what the code says of itself: `python -m offramp.commands.reference`.

A table stands between the line `<!-- NAME -->` and the next `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deployments.api.openapi import openapi_document
from deployments.api.parsing import Signature
from earlyexit import errors
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.codecs.text import TextCodec
from earlyexit.policies import POLICIES
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask

ANY_MODEL = Signature(TextCodec(max_length=1), LabelTask(("one", "another")))
"""Routes and statuses are those of every model that does not generate."""
THAT_GENERATES = Signature(PromptCodec(max_length=2), TokenTask(2))

Rows = Callable[[], Iterator[str]]


def routes() -> Iterator[str]:
    """Rows of Markdown: a route and what it does."""
    yield from ("| route | what it does |", "|---|---|")
    for method, path, operation in _operations():
        yield f"| `{method.upper()} {path}` | {operation['summary']} |"


def statuses() -> Iterator[str]:
    """Rows of Markdown: a status, what gRPC says in its place, and what it means."""
    grpc: dict[str, set[str]] = defaultdict(set)
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.OfframpError):
            grpc[str(error.http_status)].add(f"`{error.grpc_status}`")
    meanings = {
        status: response["description"]
        for _, _, operation in _operations()
        for status, response in operation["responses"].items()
        if status >= "400"
    }
    yield from ("| status | over gRPC | meaning |", "|---|---|---|")
    for status in sorted(meanings):
        yield f"| {status} | {', '.join(sorted(grpc[status])) or '-'} | {meanings[status]} |"


def policies() -> Iterator[str]:
    """Rows of Markdown: an exit policy, when an input leaves, and which fields it takes."""
    yield from ("| exit policy | an input leaves when | takes |", "|---|---|---|")
    for name, kind in POLICIES.items():
        takes = [*sorted(kind.takes), *kind.may_take]
        yield f"| `{name}` | {kind.leaves} | {', '.join(f'`{field}`' for field in takes)} |"


TABLES: Mapping[str, Mapping[str, Rows]] = {
    "docs/api.md": {"routes": routes, "statuses": statuses},
    "docs/plans.md": {"policies": policies},
}


def renewed(text: str, tables: Mapping[str, Rows]) -> str:
    """A document with its tables as they are now; raises ValueError where one has no place."""
    for name, rows in tables.items():
        place = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
        if place is None:
            raise ValueError(f"no place for the table of {name}: lines <!-- {name} --> and <!-- end -->")
        text = text[: place.start(1)] + "\n".join(rows()) + text[place.end(1) :]
    return text


def _operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    paths = {path: of_path for each in (ANY_MODEL, THAT_GENERATES) for path, of_path in _paths(each).items()}
    for path, operations in paths.items():
        for method, operation in operations.items():
            if method != "parameters":
                yield method, path, operation


def _paths(signature: Signature) -> dict[str, Any]:
    found: dict[str, Any] = openapi_document(signature)["paths"]
    return found


if __name__ == "__main__":
    for name, tables in TABLES.items():
        document = Path(name)
        document.write_text(renewed(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
