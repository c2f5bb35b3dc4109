from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ON_RAY

ROOT = Path(__file__).parents[1]
FOLDERS = ("earlyexit", "profiles", "cluster", "optimizer", "deployments", "simulator", "offramp", "experiments")
MAY_IMPORT = {
    "earlyexit": set(),
    "cluster": {"earlyexit", "profiles"},
    "profiles": {"earlyexit"},
    "optimizer": {"earlyexit", "profiles", "cluster"},
    "deployments": {"earlyexit", "profiles", "cluster", "optimizer"},
    "simulator": {"earlyexit", "profiles", "cluster", "optimizer", "deployments"},
    "offramp": {"earlyexit", "profiles", "cluster", "optimizer", "deployments", "simulator"},
    "experiments": set(FOLDERS),
}
FOR_EVERYONE = {"earlyexit.errors"}
"""Imports nothing, so that every folder can raise the same errors."""
NO_RAY = ("earlyexit", "profiles", "cluster", "optimizer", "simulator", "offramp", "deployments/ingress/core")
NO_TORCH = ("optimizer", "simulator", "deployments/ingress/core")
NO_ASYNCIO = ("earlyexit", "profiles", "optimizer", "deployments/ingress/core")
PURE = "deployments/ingress/core"
MAY_IMPORT_FROM_DEPLOYMENTS = {"deployments.wire.messages", "deployments.settings"}
"""The modules of `deployments` that the core of the ingress may import: messages and settings."""
MOST_LINES_OF_A_FUNCTION = 60

BODIES = ("body", "orelse", "handlers", "finalbody", "cases")
"""Fields of a statement that hold statements."""
Graph = Mapping[str, set[str]]


@cache
def sources() -> Mapping[str, Path]:
    """Returns the path of every module of the project, by its dotted name."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


class Module(NamedTuple):
    """Facts about a module. Its syntax tree is not kept, because garbage collection of all trees takes seconds."""

    imports: frozenset[str]
    """Dotted names of the imported modules, anywhere in the module, including imports for types."""
    functions: dict[str, int]
    """Number of lines by function."""
    classes: list[str]
    """Classes at the top level."""


@cache
def read(module: str) -> Module:
    syntax = ast.parse(sources()[module].read_text(encoding="utf-8"))
    imports, functions, statements = set[str](), dict[str, int](), list[ast.AST]([syntax])
    for node in statements:  # the list grows meanwhile
        statements += (part for name in BODIES for part in getattr(node, name, ()))
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imports |= {name if name in sources() else node.module for name in names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[f"{module}.{node.name}:{node.lineno}"] = (node.end_lineno or 0) - node.lineno + 1
    return Module(frozenset(imports), functions, [node.name for node in syntax.body if isinstance(node, ast.ClassDef)])


def top(module: str) -> str:
    return module.partition(".")[0]


def modules_in(*folders: str) -> Iterator[str]:
    """Yields the modules of some folders, including subfolders."""
    for module, path in sources().items():
        if any(path.is_relative_to(ROOT / folder) for folder in folders):
            yield module


def circle(graph: Graph) -> list[str]:
    """Returns a cycle of a graph, with its first node again at the end; empty if there is none."""
    done: set[str] = set()

    def search(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        found = next(filter(None, (search(after, [*way, node]) for after in sorted(graph.get(node, ())))), [])
        done.add(node)
        return found

    return next(filter(None, (search(node, []) for node in sorted(graph))), [])


def side_by_side(parent: str) -> Graph:
    """Returns the imports between subfolders of a folder. Modules of the folder itself may be shared, or import all."""
    graph: dict[str, set[str]] = {}
    depth = parent.count(".") + 2
    for module in modules_in(parent.replace(".", "/")):
        folder, names = ".".join(module.split(".")[:depth]), read(module).imports
        if is_folder(folder):
            others = {".".join(name.split(".")[:depth]) for name in names if name.startswith(f"{parent}.")}
            graph.setdefault(folder, set()).update(other for other in others - {folder} if is_folder(other))
    return graph


def is_folder(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).is_dir()


def test_every_folder_of_the_architecture_has_sources() -> None:
    assert {top(module) for module in sources()} == set(FOLDERS)


def test_imports_run_one_way() -> None:
    wrong = {
        f"{module} -> {name}"
        for module in sources()
        for name in read(module).imports
        if top(name) in {*FOLDERS, "tests"} - MAY_IMPORT[top(module)] - {top(module)} and name not in FOR_EVERYONE
    }
    assert wrong == set()


def test_there_are_no_import_cycles_even_for_types() -> None:
    graph = {module: {name for name in read(module).imports if name in sources()} - {module} for module in sources()}
    assert circle(graph) == []


@pytest.mark.parametrize("parent", ["deployments", "deployments.ingress", "simulator"])
def test_sibling_folders_have_no_import_cycle(parent: str) -> None:
    assert circle(side_by_side(parent)) == []


def test_a_cycle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_modules_for_every_folder_import_nothing_of_the_project() -> None:
    assert {name for module in FOR_EVERYONE for name in read(module).imports if top(name) in FOLDERS} == set()


def outside(folders: Iterable[str], package: str) -> set[str]:
    """Returns the modules of the folders that import a package."""
    return {module for module in modules_in(*folders) if package in {top(name) for name in read(module).imports}}


def test_ray_torch_and_asyncio_are_imported_only_where_allowed() -> None:
    assert outside(NO_RAY, "ray") == set()
    assert outside(NO_TORCH, "torch") == set()
    assert outside(NO_ASYNCIO, "asyncio") == set()
    private = ("ray._private", "ray.serve._private", "ray.experimental.internal_kv")
    found = {module for module in sources() for name in read(module).imports if name.startswith(private)}
    assert found == {"deployments.local_ray.private"}


def test_the_core_of_the_ingress_does_not_import_its_drivers() -> None:
    known = {name for module in modules_in(PURE) for name in read(module).imports if top(name) == "deployments"}
    assert {name for name in known if not name.startswith("deployments.ingress.core.")} <= MAY_IMPORT_FROM_DEPLOYMENTS


def test_no_function_is_too_long_to_read() -> None:
    functions = {name: number for module in sources() for name, number in read(module).functions.items()}
    assert {name: number for name, number in functions.items() if number > MOST_LINES_OF_A_FUNCTION} == {}


def test_every_test_file_that_starts_ray_is_in_the_list() -> None:
    files = (ROOT / "tests" / "end_to_end").glob("test_*.py")
    assert {path.name for path in files if "mark.ray" in path.read_text(encoding="utf-8")} <= set(ON_RAY)


def test_no_two_classes_of_a_folder_have_the_same_name() -> None:
    """Except in experiments, which are independent of each other."""
    modules = [module for module in sources() if top(module) != "experiments"]
    named = Counter((top(module), name) for module in modules for name in read(module).classes)
    assert [name for name, count in named.items() if count > 1] == []


LIGHT: dict[str, list[tuple[str, set[str]]]] = {
    "what runs without torch": [
        ("cluster.emulated", {"torch", "ray", "scipy"}),
        (
            "optimizer.plans.plan_file, optimizer.calibration.thresholds, simulator.simulate",
            {"torch", "ray", "offramp"},
        ),
        (
            "earlyexit.engine.engine, earlyexit.clock, profiles.records, profiles.measure, cluster.devices",
            {"torch", "ray"},
        ),
        (
            "earlyexit.network.store, earlyexit.codecs.text, earlyexit.codecs.image, earlyexit.codecs.tensor",
            {"torch", "transformers", "ray"},
        ),
        ("deployments.choices, deployments.api.http", {"opentelemetry", "ray", "torch"}),
        ("deployments.ingress_deployment", {"torch", "transformers"}),
    ],
    "the replica": [("earlyexit.engine.device, earlyexit.network.model", {"transformers", "ray"})],
}
"""For each process: modules that it imports in groups, and the modules that each group must not load."""


@pytest.mark.parametrize("groups", LIGHT.values(), ids=LIGHT)
def test_light_parts_load_nothing_heavy(groups: list[tuple[str, set[str]]]) -> None:
    checks = [
        f"import {modules}; loaded = {heavy!r} & set(sys.modules); assert not loaded, loaded"
        for modules, heavy in groups
    ]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *checks])], check=True, cwd=ROOT)
