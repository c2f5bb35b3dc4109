"""The wheel and the image, and commands without the extra `serve`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offramp.cli.app import SERVED
from tests.offramp.cli.runs import PROBLEM, written

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {package.partition(".")[0] for package in PROJECT["tool"]["setuptools"]["packages"]}
PLANNING = ("plan problem.yaml --json", "simulate problem.yaml --arrivals uniform:100 --duration 2 --json")
SERVING = ("serve model", "doctor", "predict 'a text'", "ramp model --data log.csv", "train --data log.csv --out model")
ONE_LINE = r"offramp: \w+ is not installed; run in Offramp's clone: pip install '\.\[serve\]'"
WITHOUT = f"""
import shlex, sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(SERVED)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from offramp.cli.app import main
for command in sys.argv[1:]:
    try:
        main(shlex.split(command))
    except SystemExit as ended:
        print(ended.code, flush=True)
"""
"""Runs commands in an interpreter without the modules of the extra, and prints their exit statuses."""


def built(folder: Path) -> Path:
    """The wheel, built from a copy because setuptools leaves a folder behind."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, timeout=300)
    [wheel] = (folder / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built"))


def test_plans_and_simulations_need_no_extra_and_other_commands_name_it(tmp_path: Path) -> None:
    written(tmp_path / "problem.yaml", PROBLEM)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *PLANNING, *SERVING], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert [line for line in done.stdout.splitlines() if len(line) == 1] == ["0"] * len(PLANNING) + ["2"] * len(SERVING)
    said = done.stderr.splitlines()
    assert len(said) == len(SERVING)
    assert [line for line in said if not re.fullmatch(r"offramp: (\w+) is .*pip install '\.\[serve\]'", line)] == []


def test_the_modules_of_the_extra_are_those_of_its_packages() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["optional-dependencies"]["serve"]}
    packages_of = packages_distributions()
    modules = {
        module
        for module, packages in packages_of.items()
        if names & {canonicalize_name(package) for package in packages} and module.isidentifier()
    }
    assert modules >= SERVED
    assert names == names & {canonicalize_name(package) for module in SERVED for package in packages_of[module]}


def test_the_wheel_holds_every_package_its_data_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [points] = [name for name in names if name.endswith("entry_points.txt")]
        assert "offramp = offramp.__main__:main" in archive.read(points).decode()
    folders = {name.partition("/")[0] for name in names}
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line for line in tracked.stdout.splitlines() if not line.endswith(".md")} <= names


def test_the_image_copies_every_package_and_installs_extras_that_exist() -> None:
    text = (ROOT / "examples" / "kuberay" / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(re.findall(r"^COPY (\w+) \1$", text, flags=re.MULTILINE)) >= PACKAGES
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert "serve" in extras.split(",")
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.slow
def test_the_wheel_plans_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    written(tmp_path / "problem.yaml", PROBLEM)

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(each) for each in command], cwd=tmp_path, capture_output=True, text=True, timeout=900, env={}
        )

    python, offramp = tmp_path / "venv/bin/python", tmp_path / "venv/bin/offramp"
    assert run(sys.executable, "-m", "venv", "venv").returncode == 0
    constraints = ROOT / "constraints.txt"
    done = run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints, wheel)
    assert done.returncode == 0, done.stderr
    assert run(python, "-c", "import torch").returncode != 0
    assert run(offramp, "--version").stdout.startswith("offramp ")
    for command in PLANNING:
        done = run(offramp, *shlex.split(command))
        assert done.returncode == 0, done.stderr
    for command in SERVING[:3]:
        done = run(offramp, *shlex.split(command))
        assert (done.returncode, bool(re.fullmatch(ONE_LINE, done.stderr.strip()))) == (2, True), done.stderr


def test_importing_offramp_loads_an_http_library_only_for_a_client_and_never_a_service() -> None:
    code = (
        "import sys, offramp; heavy = {'httpx', 'aiohttp', 'httptools', 'torch', 'ray', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "offramp.Client, offramp.AsyncClient, offramp.__version__; assert 'httpx' in sys.modules;"
        "heavy = {'torch', 'ray', 'tokenizers', 'starlette', 'scipy', 'deployments.api.completions.bodies'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
