from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("earlyexit", "profiles", "cluster", "optimizer", "deployments", "simulator", "experiments", "offramp")
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
"""Imports nothing, so that every folder can refuse in the same words."""
MAY_IMPORT_RAY = {"deployments", "experiments"}
MOST_LINES = 400

SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
each_source = pytest.mark.parametrize(
    "source", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in SOURCES]
)


def imports(source: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, anywhere in it and for types too."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} imports relatively"
            assert node.module is not None
            yield node.module


def folder_of(source: Path) -> str:
    return source.relative_to(ROOT).parts[0]


def test_every_folder_of_the_architecture_has_sources() -> None:
    assert {folder_of(source) for source in SOURCES} == set(FOLDERS)


@each_source
def test_imports_run_one_way(source: Path) -> None:
    allowed = MAY_IMPORT[folder_of(source)] | {folder_of(source)}
    wrong = {
        name
        for name in imports(source)
        if name.partition(".")[0] in {*FOLDERS, "tests"} - allowed and name not in FOR_EVERYONE
    }
    assert wrong == set()


@pytest.mark.parametrize("name", sorted(FOR_EVERYONE))
def test_what_everyone_may_import_imports_nothing_of_ours(name: str) -> None:
    source = ROOT / (name.replace(".", "/") + ".py")
    assert {each for each in imports(source) if each.partition(".")[0] in FOLDERS} == set()


@each_source
def test_ray_is_imported_by_deployments_and_experiments_only(source: Path) -> None:
    if folder_of(source) not in MAY_IMPORT_RAY:
        assert "ray" not in {name.partition(".")[0] for name in imports(source)}


@each_source
def test_the_simulator_imports_no_torch(source: Path) -> None:
    if folder_of(source) == "simulator":
        assert "torch" not in {name.partition(".")[0] for name in imports(source)}


@each_source
def test_the_optimizer_imports_no_torch(source: Path) -> None:
    if folder_of(source) == "optimizer":
        assert "torch" not in {name.partition(".")[0] for name in imports(source)}


@each_source
def test_no_file_is_too_long_to_read(source: Path) -> None:
    assert len(source.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        pytest.param("optimizer.plan_file, optimizer.thresholds", {"torch", "ray"}, id="the planner"),
        pytest.param("earlyexit.tokenizer, earlyexit.store", {"torch", "transformers", "ray"}, id="the ingress"),
        pytest.param(
            "earlyexit.codecs.text_pair, earlyexit.codecs.image, earlyexit.codecs.tensor",
            {"torch", "transformers", "ray"},
            id="codecs",
        ),
        pytest.param("deployments.ingress.ingress", {"torch", "transformers"}, id="the running ingress"),
        pytest.param("deployments.ingress.tracing.hooks", {"opentelemetry", "ray", "torch"}, id="an ingress, untraced"),
        pytest.param("earlyexit.engine, earlyexit.times, earlyexit.clock", {"torch", "ray"}, id="the engine"),
        pytest.param("simulator.simulate", {"torch", "ray", "offramp"}, id="a simulation"),
        pytest.param("profiles.records, cluster.devices", {"torch", "ray"}, id="records and devices"),
        pytest.param("earlyexit.device, earlyexit.model", {"transformers", "ray"}, id="the replica"),
    ],
)
def test_light_parts_load_nothing_heavy(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; loaded = {heavy!r} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
