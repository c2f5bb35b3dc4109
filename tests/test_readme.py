"""Tests that names in the README and the documents exist, and that shown files are accepted."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

import offramp
from offramp.cli.app import COMMANDS, app, build
from optimizer.plans.plan_file import ModelShape, parse_plan
from optimizer.problems.problem_file import read_problem
from tests.reference import TABLES, renewed, routes

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_IN_THE_REPOSITORY = "runs/"
"""Folder of a reader's own runs."""


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Returns the texts between single backticks, on one line."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def code(text: str) -> list[str]:
    """Returns code spans, and the lines of indented blocks without their comments."""
    blocks = [line[4:].partition("#")[0] for line in text.splitlines() if line.startswith("    ")]
    return [*spans(text), *blocks]


@cache
def commands() -> dict[str, set[str]]:
    """Returns the options of each command of the command line."""
    return {
        name: {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("--")
        }
        for name, declared in COMMANDS.items()
        for command in [build(name)]
    }


@cache
def options_of_the_app() -> set[str]:
    """Returns the options that stand before any command."""
    return {option for parameter in typer.main.get_command(app).params for option in parameter.opts}


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = {target for line in code(read(document)) for target in re.findall(r"\bmake ([a-z-]+)", line)}
        assert named <= targets, document


def test_every_command_and_option_of_offramp_exists() -> None:
    known = commands()
    for document in DOCUMENTS:
        for line in code(read(document)):
            called = re.match(r"offramp ([a-z-]+)(.*)", line)
            if called is None:
                continue
            where = f"{document}: {line}"
            assert called[1] in known.keys() | options_of_the_app(), where
            assert called[1].startswith("--") or set(re.findall(r"--[a-z-]+", called[2])) <= known[called[1]], where


def test_an_option_without_a_command_exists_in_some_command() -> None:
    known = options_of_the_app().union(*commands().values())
    for document in DOCUMENTS:
        alone = {span.split()[0] for span in spans(read(document)) if span.startswith("--")}
        assert alone <= known, document


def paths(text: str) -> Iterator[str]:
    for span in spans(text):
        looks_like_one = re.fullmatch(r"[\w.-]+(/[\w.-]*)+", span) or re.fullmatch(r"[\w.-]+\.(md|toml|txt)", span)
        if looks_like_one and not span.startswith(NOT_IN_THE_REPOSITORY):
            yield span


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", read(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_into_a_document_has_a_heading() -> None:
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", read(document)):
            target = document.parent / path if path else document
            assert anchor in anchors(target), f"{document}: {path}#{anchor}"


def test_every_path_and_link_leads_somewhere() -> None:
    for document in DOCUMENTS:
        text = read(document)
        links = [link for link in re.findall(r"\]\(([^)\s#]+)", text) if not link.startswith("https://")]
        named = {path: ROOT / path for path in paths(text)} | {link: document.parent / link for link in links}
        assert [name for name, path in named.items() if not path.exists()] == [], document


def test_every_name_is_in_the_file_that_the_document_states() -> None:
    for document in DOCUMENTS:
        for path, name in re.findall(r"`([\w/]+\.py)`:\s+`([\w.]+)`", read(document)):
            top, _, method = name.partition(".")
            text = read(ROOT / path)
            found = re.search(rf"^(class |def |async def )?{top}\b", text, flags=re.MULTILINE)
            assert found, f"{document}: {top} in {path}"
            behind = text[found.start() :]
            assert not method or re.search(rf"^    (async )?def {method}\b", behind, flags=re.MULTILINE), (
                f"{document}: {name} in {path}"
            )


def test_the_life_of_a_request_has_at_most_forty_lines_and_names_files() -> None:
    told = read(ROOT / "docs" / "architecture.md").partition("## The life of a request\n")[2].partition("\n## ")[0]
    steps = re.split(r"^\d+\. ", told.strip(), flags=re.MULTILINE)[1:]
    assert len(told.strip().splitlines()) <= 40
    assert [step for step in steps if ".py`" not in step] == []


def test_the_plan_on_the_page_of_planning_is_accepted() -> None:
    _, _, _, _, _, text, side_by_side, *_ = fenced(read(ROOT / "docs" / "planning.md"), "yaml")
    shape = ModelShape(num_blocks=6, ramps=(0, 1, 2, 3, 4))
    plan = parse_plan(yaml.safe_load(text), shape)
    assert (len(plan.stages), plan.ramps) == (2, (0, 1, 2, 3, 4))
    assert parse_plan(yaml.safe_load(side_by_side), shape).shares == (0.75, 0.25)


def test_the_problems_on_the_page_of_planning_are_accepted(tmp_path: Path) -> None:
    text, with_lengths, of_steps, of_a_chain, *_ = fenced(read(ROOT / "docs" / "planning.md"), "yaml")
    path = tmp_path / "problem.yaml"
    path.write_text(text, encoding="utf-8")
    problem = read_problem(path).problem
    assert (problem.num_blocks, problem.ramps, problem.devices["V100"].count) == (3, (0, 1), 4)
    document, added = yaml.safe_load(text), yaml.safe_load(with_lengths)
    (tmp_path / added["lengths"]).write_text("12\n40\n", encoding="utf-8")
    # The reader has the profile of the page. The test replaces it by the first problem's table.
    document["latency"]["V100"]["length"] = added["latency"]["V100"]["length"]
    path.write_text(yaml.safe_dump(document | {"lengths": added["lengths"]}), encoding="utf-8")
    lengths = read_problem(path).problem.lengths
    assert lengths is not None
    assert lengths.mean == 26
    steps = yaml.safe_load(of_steps)["generation"]
    (tmp_path / steps["output_tokens"]).write_text("12\n40\n", encoding="utf-8")
    steps["prefill"]["V100"] = document["latency"]["V100"]
    whole = {name: value for name, value in document.items() if name != "slo"} | {"generation": steps}
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    generation = read_problem(path).problem.generation
    assert generation is not None
    assert generation.num_steps == 25
    models = yaml.safe_load(of_a_chain)
    for model in models["models"]:  # the reader has these profiles as well
        rows = {"block_s": [[0.001]] * model["blocks"], "ramp_s": [[0.001]] * len(model.get("ramps", ()))}
        model["latency"]["V100"] = {"batch": [1], **rows}
    rest = {name: document[name] for name in ("devices", "link", "slo", "objective")}
    path.write_text(yaml.safe_dump(models | rest), encoding="utf-8")
    assert read_problem(path).problem.networks == (2, 5)


def test_the_python_in_documents_imports_existing_names() -> None:
    texts = [text for document in (README, ROOT / "docs" / "api.md") for text in fenced(read(document), "python")]
    imports = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == {"offramp"}
    assert {alias.name for node in imports for alias in node.names} <= set(offramp.__all__)


def test_generated_tables_are_current() -> None:
    for name in TABLES:
        text = read(ROOT / name)
        assert renewed(text, TABLES[name]) == text, "make docs"


def test_a_document_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="routes"):
        renewed("# API", {"routes": routes})


def test_every_source_folder_is_installed_and_documented() -> None:
    packages = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["setuptools"]["packages"]
    named = re.findall(r"^\| `(\w+)/` \|", read(ROOT / "docs" / "architecture.md"), flags=re.MULTILINE)
    assert {package for package in packages if "." not in package} <= set(named)
    folders = {path.parent for top in packages if "." not in top for path in (ROOT / top).rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(packages)


def test_every_module_that_a_document_runs_can_be_run() -> None:
    texts = [read(path) for path in (*DOCUMENTS, ROOT / "Makefile", *(ROOT / "examples").rglob("*.yaml"))]
    named = {name for text in texts for name in re.findall(r"-m (experiments(?:\.\w+)*\w)", text)}
    for name in sorted(named):
        path = ROOT / name.replace(".", "/")
        runs = (path / "__main__.py").is_file() or "__main__" in read(path.with_suffix(".py"))
        assert runs, name


def test_the_picture_needs_no_other_file() -> None:
    picture = ROOT / "docs" / "picture.svg"
    root = ElementTree.fromstring(read(picture))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "href" not in read(picture), "GitHub loads nothing from elsewhere"
