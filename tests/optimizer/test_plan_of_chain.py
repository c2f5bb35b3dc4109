"""Plans of several networks one after the other: what they may leave out, and where their splits must end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import ModelShape, parse_plan, plan_document, read_plan, write_plan

NETWORKS = (2, 5, 9)
SHAPE = ModelShape(num_blocks=9, ramps=(0, 1, 3, 4, 6), networks=NETWORKS)


def stage(*bounds: tuple[int, int]) -> Stage:
    return Stage(device="cpu", replicas=1, splits=tuple(Split(first=a, end=b, batch=4) for a, b in bounds))


def plan(*stages: Stage, networks: tuple[int, ...] = NETWORKS) -> Plan:
    return Plan(stages=stages, networks=networks)


@pytest.mark.parametrize(
    ("stages", "entry", "used"),
    [
        pytest.param([stage((0, 2), (2, 5), (5, 9))], 0, (0, 1, 2), id="all, in one stage"),
        pytest.param([stage((0, 1)), stage((1, 2), (2, 5)), stage((5, 7), (7, 9))], 0, (0, 1, 2), id="all"),
        pytest.param([stage((0, 2)), stage((5, 9))], 0, (0, 2), id="without the middle one"),
        pytest.param([stage((0, 2), (5, 9))], 0, (0, 2), id="without the middle one, in one stage"),
        pytest.param([stage((2, 5), (5, 9))], 2, (1, 2), id="without the first"),
        pytest.param([stage((5, 9))], 5, (2,), id="the last alone"),
    ],
)
def test_a_plan_may_leave_out_networks(stages: list[Stage], entry: int, used: tuple[int, ...], tmp_path: Path) -> None:
    made = plan(*stages)
    assert (made.entry, made.used, made.num_blocks) == (entry, used, 9)
    assert sum(each.num_blocks for each in made.stages) == sum((2, 3, 4)[network] for network in used)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made


def test_a_stage_says_which_blocks_it_runs_without_a_gap() -> None:
    assert stage((0, 1), (1, 2), (5, 9)).ranges == ((0, 2), (5, 9))
    assert stage((2, 5)).ranges == ((2, 5),)


REFUSED: list[Any] = [
    pytest.param([[(0, 5), (5, 9)]], "blocks 0 to 4 runs over a crossing: a network ends after block 1", id="crossing"),
    pytest.param([[(0, 2)], [(2, 5)]], "the last network, blocks 5 to 8, is left out", id="without the last"),
    pytest.param([[(0, 2), (2, 4)], [(5, 9)]], "gap: no split runs blocks 4 to 4; .* blocks 0, 2 or 5", id="its end"),
    pytest.param([[(0, 2), (3, 5)], [(5, 9)]], "gap: no split runs blocks 2 to 2; a plan leaves out whole", id="start"),
    pytest.param([[(0, 2)], [(6, 9)]], "gap: no split runs blocks 2 to 5", id="the start of the last"),
    pytest.param([[(0, 2)], [(5, 8)]], "gap: no split runs blocks 8 to 8", id="the end of the last"),
    pytest.param([[(1, 2), (2, 5), (5, 9)]], "must start where a network does, at 0, 2 or 5, not 1", id="late start"),
    pytest.param([[(0, 2), (2, 5), (4, 9)]], "overlap: two splits run block 4", id="overlap"),
    pytest.param([[(5, 10)]], "over a crossing|ends at block 10, the last of the networks at 9", id="too far"),
]


@pytest.mark.parametrize(("bounds", "said"), REFUSED)
def test_half_networks_crossed_ones_and_a_missing_last_one_are_refused(
    bounds: list[list[tuple[int, int]]], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan(*(stage(*each) for each in bounds))


@pytest.mark.parametrize(("bounds", "said"), REFUSED)
def test_files_refuse_the_same_at_their_line(bounds: list[list[tuple[int, int]]], said: str, tmp_path: Path) -> None:
    lines = ["networks: [2, 5, 9]", "stages:"]
    for each in bounds:
        lines += ["- splits:", *(f"  - {{first: {first}, end: {end}, batch: 4}}" for first, end in each)]
    path = tmp_path / "plan.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(PlanError, match=rf"plan\.yaml:\d+: .*({said})"):
        read_plan(path)


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        pytest.param((9,), "a plan of one model leaves them out, and so 9", id="one"),
        pytest.param((5, 2, 9), r"networks must ascend.*\[5, 2, 9\]", id="disorder"),
        pytest.param((2, 2, 9), "networks must ascend", id="twice"),
        pytest.param((0, 9), "networks must ascend", id="an empty one"),
        pytest.param((2, 8), "over a crossing|ends at block 9, the last of the networks at 8", id="another end"),
    ],
)
def test_networks_that_are_none_are_refused(networks: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(stage((0, 2), (2, 9)), networks=networks)


@pytest.mark.parametrize(
    ("networks", "shape", "said"),
    [
        pytest.param(None, SHAPE, r"networks end at blocks \[2, 5, 9\]; the plan does not say so", id="none said"),
        pytest.param([4, 9], SHAPE, r"networks end at blocks \[2, 5, 9\]; the plan says \[4, 9\]", id="others"),
        pytest.param([2, 9], ModelShape(num_blocks=9, ramps=()), "the model is one network", id="of one"),
    ],
)
def test_a_plan_says_the_networks_that_its_model_has(networks: list[int] | None, shape: ModelShape, said: str) -> None:
    document = {"stages": [{"splits": [{"first": 0, "end": 2, "batch": 4}, {"first": 2, "end": 9, "batch": 4}]}]}
    with pytest.raises(PlanError, match=said):
        parse_plan(document if networks is None else {**document, "networks": networks}, shape)


def test_of_one_network_nothing_is_said() -> None:
    one = plan(stage((0, 9)), networks=())
    assert (one.entry, one.used) == (0, (0,))
    assert "networks" not in plan_document(one)
    spec = PolicySpec(thresholds=0.5)
    with pytest.raises(PlanError, match="the first split must start at block 0, not 2"):
        Plan(stages=(stage((2, 9)),), policy=spec)


def test_weights_of_an_ensemble_are_of_the_networks_ends(tmp_path: Path) -> None:
    policy = PolicySpec(name="entropy", thresholds=0.4, weights={1: 0.2, 4: 0.5})
    made = Plan(stages=(stage((0, 2), (5, 9)),), networks=NETWORKS, policy=policy)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    with pytest.raises(PlanError, match=r"weights after blocks \[3\]; the networks that are not the last end after"):
        Plan(stages=made.stages, networks=NETWORKS, policy=PolicySpec(thresholds=0.4, weights={3: 0.2}))
    with pytest.raises(PlanError, match="are of a chain's networks, and the model is a single one"):
        Plan(stages=(stage((0, 9)),), policy=PolicySpec(thresholds=0.4, weights={3: 0.2}))


def test_words_are_pruned_by_an_alpha_after_each_network_that_inputs_leave(tmp_path: Path) -> None:
    made = replace(plan(stage((0, 2), (2, 5)), stage((5, 9))), prune={1: 0.7, 4: 0.9})
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    assert "prune" not in plan_document(plan(stage((5, 9))))


@pytest.mark.parametrize(
    ("prune", "said"),
    [
        pytest.param("{3: 0.7}", r"not after block 3: networks end after blocks \[1, 4\]", id="no end"),
        pytest.param("{8: 0.7}", r"not after block 8: networks end after blocks \[1, 4\]", id="the last"),
        pytest.param("{1: .nan}", "(above 0 and up to 2|a finite number), not nan", id="not a number"),
        pytest.param("{1: 0.0}", "above 0 and up to 2, not 0.0", id="nothing"),
        pytest.param("{1: 14.0}", "above 0 and up to 2, not 14.0", id="per cent"),
    ],
)
def test_a_plan_that_prunes_elsewhere_or_by_nonsense_is_refused_at_its_line(
    prune: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    lines = ["networks: [2, 5, 9]", f"prune: {prune}", "stages:", "- splits:"]
    path.write_text("\n".join([*lines, "  - {first: 0, end: 2, batch: 4}", "  - {first: 5, end: 9, batch: 4}"]))
    with pytest.raises(PlanError, match=rf"plan\.yaml:2: .*{said}"):
        read_plan(path)
    with pytest.raises(PlanError, match=said):
        replace(plan(stage((0, 2), (5, 9))), prune=yaml.safe_load(prune))


def test_a_plan_of_one_network_prunes_no_words() -> None:
    with pytest.raises(PlanError, match="not after block 8: the model is a single one"):
        Plan(stages=(stage((0, 9)),), prune={8: 0.7})


def test_where_inputs_stay_no_words_are_pruned_for_the_reference_would_be_asked_of_other_texts() -> None:
    made = replace(plan(stage((0, 2), (5, 9))), prune={1: 0.7})
    with pytest.raises(PlanError, match="prune: inputs that stay are to tell what the reference says of whole"):
        made.with_after_answer("stay")
