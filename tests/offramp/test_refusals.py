"""Refusals of commands and service files, from the entries of refusals.yaml."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.calibration.calibration_file import RECORDS_FILE
from profiles.records import ExitRecords
from tests.model_cards import change_card
from tests.offramp.cli.runs import PLAN, PROBLEM, Always, Captured, declined, records, refused, run, written
from tests.offramp.service.service_folders import CHAIN_TABLE, TABLE, Files, write_records, write_shares

GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
MODEL = {"folder": "model", "latency": {"cpu": TABLE}}
OF_CHAIN = {"folder": "cascade", "latency": {"cpu": CHAIN_TABLE}, "memory_bytes": 1}


@pytest.mark.parametrize("case", GOLDEN["commands"], ids=lambda case: case["run"][:60])
def test_a_command_refuses(
    case: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    request: pytest.FixtureRequest,
) -> None:
    if "needs" in case:
        pytest.importorskip(case["needs"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # no hub can be reached
    if case["run"] != "serve model":  # that case alone covers the process, whose start takes a second
        monkeypatch.setattr("offramp.commands.serve.run_in_subprocess", lambda work, *given: work(*given))
    monkeypatch.setattr("offramp.commands.serve.RAY_FOLDER", Path(case.get("ray_folder", "/tmp/ray")))
    if case["run"] == "predict":  # by a caller that has closed its standard input
        monkeypatch.setattr("sys.stdin", None)
    files = {"problem.yaml": PROBLEM, "plan.yaml": PLAN} | case.get("files", {})
    for name, (old, new) in case.get("change", {}).items():
        assert old in files[name]
        files[name] = files[name].replace(old, new)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / name, content)
    for name in case.get("loops", ()):
        Path(name).symlink_to(name)
    for name, fields in case.get("records", {}).items():
        records(tmp_path / name, 0.1, **fields)
    if case.get("model"):
        request.getfixturevalue("model")
        Path("checkpoint").symlink_to(request.getfixturevalue("checkpoint"))
        Path("data.csv").symlink_to(request.getfixturevalue("data"))
        capsys.readouterr()  # what its training printed
    monkeypatch.setattr(Always, "answers", case.get("answers", {}))
    url = request.getfixturevalue("answering_url") if "URL" in case["run"] else ""
    command = shlex.split(case["run"].replace("URL", url))
    if "declined" in case:
        said = declined(capsys, *command)
        assert f"Invalid value for '{case['declined']}'" in said
    else:
        said = refused(capsys, *command, status=case.get("status", 2))
    expected: str = case["says"].replace("URL", url)  # "..." stands for any beginning
    assert expected[3:] in said if expected.startswith("...") else said.startswith(expected), said
    assert not Path("new.yaml").exists()


WRONG = (None, 7.5, "\ud83d", json.loads("[" * 600 + "]" * 600), [7], {"x": 7})


def spoilt(value: Any, wrong: Iterator[Any]) -> Iterator[str]:
    """Replaces each value inside JSON data in turn by the next wrong one, and yields its name."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spoilt(inner, wrong)
        value[key] = next(wrong)
        yield f"{key}: {value[key]!r}"
        value[key] = inner


@pytest.mark.parametrize("case", GOLDEN["answers"], ids=lambda case: case["run"])
def test_a_wrong_value_anywhere_in_an_answer_is_reported_in_one_line_or_ignored(
    case: dict[str, Any], answering_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    data = written(tmp_path / "data.csv", "text,label\npay,bill\n")
    monkeypatch.setattr(Always, "answers", case["answers"])
    for what in spoilt(case["answers"], cycle(WRONG)):
        status = run(*shlex.split(case["run"].replace("URL", answering_url).replace("DATA", str(data))))
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("offramp: ")]
        assert (len(said), status) in ((0, 0), (1, 1), (1, 2)), (what, said)
        assert status != 1 or answering_url in said[0]


def prepare(files: Files, case: Mapping[str, Any]) -> None:
    """Changes the model and writes further files, as an entry of refusals.yaml describes."""
    if "chain" in case:
        files.write_chain()
    if "remove" in case:
        (files.model / case["remove"]).unlink()
    if "card" in case:
        change_card(files.model, **case["card"])
    if "shares" in case:
        write_shares(files.model, **case["shares"])
    if "records" in case:
        write_records(files.folder / "others.npz", **case["records"])
    if "plan" in case:
        files.write_plan(**case["plan"])
    if "no_answers" in case:
        path = files.model / RECORDS_FILE
        replace(ExitRecords.load(path), answers_NE=None).save(path)


@pytest.mark.parametrize("case", GOLDEN["services"], ids=lambda case: case["says"][:60])
def test_a_service_file_is_refused_at_its_line(case: dict[str, Any], tmp_path: Path) -> None:
    files, given = Files(tmp_path), case["given"]
    prepare(files, case)
    if "chain" in case:
        given = given | {"model": OF_CHAIN | given.get("model", {})}
    elif "model" in given:
        given = given | {"model": MODEL | given["model"]}
    at, said = files.refused(**given)
    assert case["says"] in f"^{said}"  # "^" stands for the beginning
    lines = files.path.read_text(encoding="utf-8").splitlines()
    if "below" in case:
        assert at == files.line_of(case["line"]) + case["below"]
    else:  # a mapping stands where its first key does: on the line after its name
        assert case["line"] in lines[at - 1] or case["line"] in lines[at - 2]
