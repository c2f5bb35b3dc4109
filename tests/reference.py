"""Writes the tables of the documents from the code: `python -m tests.reference`, or `make docs`.

A table stands between the line `<!-- NAME -->` and the next `<!-- end -->`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from click import Command
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from deployments.api.openapi import openapi_document
from deployments.api.operations import Signature
from deployments.choices import TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit import errors
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.codecs.text import TextCodec
from earlyexit.data.strict import FromFile
from earlyexit.policies import POLICIES
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask
from offramp.cli.app import COMMANDS, build
from offramp.spec import documents
from offramp.spec import file as service
from optimizer.problems.problem import MaximizeRate, MinimizeLatency, Slo
from optimizer.problems.problem_file import BudgetDocument

ANY_MODEL = Signature(TextCodec(max_length=1), LabelTask(("one", "another")))
"""A model for the routes and statuses that all models without generation share."""
THAT_GENERATES = Signature(PromptCodec(max_length=2), TokenTask(2))

Rows = Callable[[], Iterator[str]]
HEAD = ("| option | default | meaning |", "|---|---|---|")
SHARED = 2
"""Options that so many commands share stand once, before them; of several with one name, the most frequent."""


def routes() -> Iterator[str]:
    """Yields a Markdown table of routes and their summaries."""
    yield from ("| route | what it does |", "|---|---|")
    for method, path, operation in _operations():
        yield f"| `{method.upper()} {path}` | {operation['summary']} |"


def statuses() -> Iterator[str]:
    """Yields a Markdown table of statuses, their gRPC statuses, and their meanings."""
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
    """Yields a Markdown table of exit policies, their rules, and their fields."""
    yield from ("| exit policy | an input leaves when | takes |", "|---|---|---|")
    for name, kind in POLICIES.items():
        takes = [*sorted(kind.takes), *["weights"] * kind.mixes, *["decay"] * kind.decays]
        yield f"| `{name}` | {kind.leaves} | {', '.join(f'`{field}`' for field in takes)} |"


def commands() -> Iterator[str]:
    """Yields Markdown of every command of `offramp`: its help, and a table of its options."""
    commands = {name: build(name) for name in COMMANDS}
    rows = {name: [*_options(command)] for name, command in commands.items()}
    counted = Counter(row for of_one in rows.values() for row in of_one)
    shared = sorted({row.split(" ")[1]: row for row, n in counted.most_common()[::-1] if n >= SHARED}.values())
    yield from ("### Options of several commands", "", *HEAD, *shared, "")
    for name, command in commands.items():
        own = [row for row in rows[name] if row not in shared]
        also = ", ".join(row.split(" ")[1] for row in rows[name] if row in shared)
        yield from (f"### offramp {name}", "", _flat(command.help or "").partition(". ")[0].rstrip(".") + ".", "")
        yield from (*HEAD, *own, "") if own else ()
        yield from (f"Also {also}.", "") if also else ()


def _options(command: Command) -> Iterator[str]:
    for parameter in command.params:
        text = _flat(getattr(parameter, "help", None) or "")
        is_empty = callable(parameter.default) or parameter.default is None or parameter.default is False
        default = "" if is_empty else parameter.default
        names = "`, `".join([parameter.opts[0], *parameter.secondary_opts])  # --compare and --no-compare
        word = names if parameter.param_type_name == "option" else (parameter.metavar or "").upper()
        if word != "--help":
            yield f"| `{word}` | {_cell(default)} | {_cell(text)} |"


SECTIONS: Mapping[str, type[FromFile]] = {
    "the file": service.ServiceDocument,
    "model": service.ModelDocument,
    "slo": Slo,
    "accuracy": service.AccuracyDocument,
    "cluster": Inventory,
    "cluster.devices, by type": Accelerators,
    "cluster.link": ClusterLink,
    "planner": service.PlannerDocument,
    "planner.objective: the highest rate": MaximizeRate,
    "planner.objective: the least cost": service.CostDocument,
    "planner.objective: the least latency": MinimizeLatency,
    "planner.budget": BudgetDocument,
    "ingress": documents.IngressDocument,
    "access": AccessSettings,
    "tracing": TracingSettings,
    "repository": VersionSettings,
}


def fields() -> Iterator[str]:
    """Yields Markdown of every field of a service file, by section, with default and meaning."""
    for section, document in SECTIONS.items():
        yield from (f"### {section}", "", _flat(document.__doc__ or ""), "")
        yield from ("| field | default | meaning |", "|---|---|---|")
        meanings = _meanings(document)
        for name, field in _fields_of(document).items():
            yield f"| `{field.alias or name}` | {_cell(_default(field))} | {_cell(meanings.get(name, ''))} |"
        yield ""


def _fields_of(document: type[FromFile]) -> Mapping[str, FieldInfo]:
    if issubclass(document, BaseModel):
        return document.model_fields
    declared: Any = document
    hints = get_type_hints(declared, include_extras=True)
    each = {field.name: field for field in dataclass_fields(declared)}
    return {name: FieldInfo.from_annotated_attribute(hints[name], field) for name, field in each.items()}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is None:
        return ""
    return str(field.default)


def _meanings(document: type[FromFile]) -> dict[str, str]:
    """Returns the string below each field, of a model and of its base classes."""
    found: dict[str, str] = {}
    for model in reversed(document.__mro__):
        if model is BaseModel or not issubclass(model, (BaseModel, FromFile)):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, behind in pairwise(body.body):
            match statement, behind:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = _flat(text)
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


TABLES: Mapping[str, Mapping[str, Rows]] = {
    "docs/api.md": {"routes": routes, "statuses": statuses},
    "docs/planning.md": {"policies": policies},
    "docs/reference.md": {"commands": commands, "fields": fields},
}


def renewed(text: str, tables: Mapping[str, Rows]) -> str:
    """Returns a document with current tables; raises ValueError if one has no place."""
    for name, rows in tables.items():
        place = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
        if place is None:
            raise ValueError(f"no place for the table of {name}: lines <!-- {name} --> and <!-- end -->")
        text = text[: place.start(1)] + "\n".join(rows()) + text[place.end(1) :]
    return text


def _operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    paths = openapi_document(ANY_MODEL)["paths"] | openapi_document(THAT_GENERATES)["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            if method != "parameters":
                yield method, path, operation


if __name__ == "__main__":
    for name, tables in TABLES.items():
        document = Path(name)
        document.write_text(renewed(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
