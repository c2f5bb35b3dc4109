"""Error messages of planning, one case per rule; `python -m tests.refusals optimizer` rewrites `refusals.txt`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from earlyexit.network.boundary import Split
from optimizer.calibration.thresholds import Guarantee, lay_path, sequences_of
from optimizer.cost.evaluate import evaluate
from optimizer.cost.rescore import joint_reach
from optimizer.live.tuning.base import check_tunable
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.plans.plan_file import ModelShape, parse_plan, parse_policy, plan_document, read_plan, write_plan
from optimizer.problems.problem import MaximizeRate, MinimizeLatency, Supply
from optimizer.problems.problem_file import parse_problem, read_problem
from optimizer.problems.what_if import Axis, variants, with_batch_limit
from optimizer.search.pame import find_exits, fixed
from optimizer.search.planner import solve
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.exit_records import share_card
from tests.latency_profile import latency_profile
from tests.optimizer.generation import test_file as generation
from tests.optimizer.generation.sequences import asking, two_blocks
from tests.optimizer.pame import test_strategy as pame_strategy
from tests.optimizer.pame import test_thresholds as pame_thresholds
from tests.optimizer.test_chains import SMALL, one_block, two_networks
from tests.optimizer.test_chains import document as of_lengths
from tests.optimizer.test_evaluate import PROBLEM, split, stage, staying
from tests.optimizer.test_models_file import THREE, TWO, of_three_inputs, recorded
from tests.optimizer.test_plan import NETWORKS, side_by_side
from tests.optimizer.test_plan import SHAPE as OF_CHAIN
from tests.optimizer.test_plan import planned as plan
from tests.optimizer.test_plan import spans as of_chain
from tests.optimizer.test_plan_file import GOOD as PLAN_FILE
from tests.optimizer.test_plan_file import PLAN, POLICY, SHAPE, SIDE_BY_SIDE
from tests.optimizer.test_problem_file import GOOD as PROBLEM_FILE
from tests.optimizer.test_problem_file import PROFILED, PUBLISHED, VARIED, problem_records, with_t4
from tests.optimizer.test_rescore import RECORDS
from tests.optimizer.test_sequences import THREE as GENERATIONS
from tests.optimizer.test_thresholds import synthetic
from tests.refusals import Case, FileCase, Refusals

NAN, INF = float("nan"), float("inf")
GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
Reader = Callable[[Path], object]


def chain_file(*bounds: list[list[int]], prune: str = "{}") -> str:
    """Returns a plan file with these splits per stage."""
    lines = ["networks: [2, 5, 9]", f"prune: {prune}", "stages:"]
    for each in bounds:
        lines += ["- splits:", *(f"  - {{first: {first}, end: {end}, batch: 4}}" for first, end in each)]
    return "\n".join(lines)


def problem(**changed: Any) -> Case:
    """Returns a problem of three blocks on one accelerator type, with changed fields."""
    plain = parse_problem(THREE).problem
    return lambda: replace(plain, **changed)


def rows(blocks: int, ramps: int, batches: tuple[int, ...] = (1, 2), **facts: Any) -> LatencyTable:
    """Returns a table in which every block takes a second for any batch."""
    seconds = np.ones((blocks + ramps, len(batches)))
    return LatencyTable(batches=batches, block_s_NB=seconds[:blocks], ramp_s_EB=seconds[blocks:], **facts)


def whole(of: Any, *stages: Stage) -> Case:
    """Evaluates a plan."""
    return lambda: evaluate(of, stages)


def one_split(**facts: Any) -> Stage:
    return Stage(device="gpu", replicas=1, splits=(Split(first=0, end=1, **facts),))


CHAINED = {"splits": [{"first": 0, "end": 2, "batch": 4}, {"first": 2, "end": 9, "batch": 4}]}
TAKERS: dict[str, Callable[[Any], object]] = {
    "networks": lambda given: plan(of_chain((0, 2), (2, 9)), networks=tuple(given)),
    "policies": lambda given: PolicySpec(**given),
    "parsed policies": parse_policy,
    "shares": lambda given: side_by_side(*given),
    "lengths of problems": lambda given: parse_problem(of_lengths(lengths=given)),
    "sequences": lambda given: asking(two_blocks(), **given),
}
"""Functions by group in refusals.yaml."""
CASES: dict[str, Case] = {
    **{name: partial(take, given) for group, take in TAKERS.items() for name, given in GOLDEN[group].items()},
    # Plans
    "plan: no stage": lambda: Plan(stages=()),
    "plan: no split": lambda: Stage(device="cpu", replicas=1, splits=()),
    "plan: plain data": lambda: parse_plan({"stages": [{"splits": [{"first": 0, "end": 2, "batch": 0}]}]}),
    "plan: plain data, a block too few": lambda: parse_plan({"stages": [CHAINED]}, ModelShape(num_blocks=10, ramps=())),
    "plan: plain data, a ramp too many": lambda: parse_plan(plan_document(PLAN), replace(SHAPE, ramps=(1,))),
    "plan: a policy of another place": lambda: parse_policy({"name": "voting", "votes": 0}, where="control.policy"),
    "write: full": lambda: write_plan(PLAN, Path("/dev/full")),
    "write: a long name": lambda: write_plan(PLAN, Path("/tmp") / ("p" * 300)),
    "write: a folder": lambda: write_plan(PLAN, Path("/")),
    "chain: no networks said": lambda: parse_plan({"stages": [CHAINED]}, OF_CHAIN),
    "chain: other networks said": lambda: parse_plan({"stages": [CHAINED], "networks": [4, 9]}, OF_CHAIN),
    "chain: of one model": lambda: parse_plan(
        {"stages": [CHAINED], "networks": [2, 9]}, ModelShape(num_blocks=9, ramps=())
    ),
    "chain: one network begins late": lambda: Plan(stages=(of_chain((2, 9)),)),
    "chain: weights within a network": lambda: Plan(
        stages=(of_chain((0, 2), (5, 9)),), networks=NETWORKS, policy=PolicySpec(thresholds=0.4, weights={3: 0.2})
    ),
    "chain: weights of one network": lambda: Plan(
        stages=(of_chain((0, 9)),), policy=PolicySpec(thresholds=0.4, weights={3: 0.2})
    ),
    "prune: one network": lambda: Plan(stages=(of_chain((0, 9)),), prune={8: 0.7}),
    "prune: where inputs stay": lambda: replace(plan(of_chain((0, 2), (5, 9))), prune={1: 0.7}).with_splits(
        after_answer="stay"
    ),
    # Problems
    "problem: ramp -1": problem(ramps=(-1, 0)),
    "problem: a share above 1": problem(survival_N=(1.0, 1.5, 0.5)),
    "problem: no devices": problem(devices={}),
    "problem: seconds of two blocks": problem(latency={"V100": rows(2, 2)}),
    "problem: seconds of one ramp": problem(latency={"V100": rows(3, 1)}),
    "problem: -1 devices": lambda: Supply(count=-1),
    "problem: sequences of networks": lambda: two_blocks(networks=(1, 2)),
    "problem: the least latency of sequences": lambda: two_blocks(objective=MinimizeLatency(rate_per_s=1.0)),
    "problem: answers of one token": lambda: asking(two_blocks(), output=Lengths(mean=1)),
    "problem: lengths of no known length": lambda: replace(
        one_block(), lengths=Lengths.of([16]), latency={"gpu": rows(1, 0)}
    ),
    "problem: stayers, without lengths": lambda: parse_problem(of_lengths(lengths=None, stayers_length=[1.0])),
    "problem: longer inputs than any batch": lambda: solve(one_block(lengths=Lengths.of([900]))),
    # Evaluation and planner
    "evaluate: no stage": whole(PROBLEM),
    "evaluate: too short": whole(PROBLEM, stage(split(0, 2))),
    "evaluate: too long": whole(PROBLEM, stage(split(0, 4))),
    "evaluate: a late start": whole(PROBLEM, stage(split(1, 3))),
    "evaluate: a gap": whole(PROBLEM, stage(split(0, 1)), stage(split(2, 3))),
    "evaluate: overlap": whole(PROBLEM, stage(split(0, 2)), stage(split(1, 3))),
    "evaluate: an unknown device": whole(PROBLEM, stage(split(0, 3), device="T4")),
    "evaluate: a device that is measured alone": whole(
        replace(PROBLEM, devices={"slow": Supply(count=1)}), stage(split(0, 3))
    ),
    "evaluate: a batch that is measured elsewhere": whole(PROBLEM, stage(split(0, 3, batch=2), device="slow")),
    "evaluate: a batch between": whole(PROBLEM, stage(split(0, 3, batch=3))),
    "evaluate: an unknown ramp": whole(PROBLEM, stage(split(0, 3, 0, 2))),
    "evaluate: stops and stays": whole(PROBLEM, stage(split(0, 1)), staying(stage(split(1, 3)))),
    "evaluate: over a crossing": whole(
        two_networks(), Stage(device="cpu", replicas=1, splits=(Split(first=0, end=2, batch=4),))
    ),
    "evaluate: without the last network": whole(two_networks(), Stage(device="cpu", replicas=1, splits=(SMALL,))),
    "evaluate: tokens beyond all batches": whole(one_block(lengths=Lengths.of([16])), one_split(batch=99, tokens=1024)),
    "evaluate: tokens without lengths": whole(one_block(), one_split(batch=16, tokens=512)),
    "evaluate: a token stays": whole(
        two_blocks(),
        Stage(device="gpu", replicas=1, splits=(Split(first=0, end=2, batch=8, ramps=(0,), after_answer="stay"),)),
    ),
    "rescore: a ramp without a threshold": lambda: joint_reach(RECORDS, {0: 0.4})((0, 1)),
    # What-ifs
    "what-if: an unknown device": lambda: variants(VARIED, Axis(name="count", values=(8,), device="T4")),
    "what-if: -1 devices": lambda: variants(VARIED, Axis(name="count", values=(-1,), device="V100")),
    "what-if: a batch limit of 0": lambda: variants(VARIED, Axis(name="batch_limit", values=(2, 0))),
    "what-if: a limit that leaves none there": lambda: with_batch_limit(with_t4(("V100", 0), ("T4", 9)), 4),
    "what-if: a large count": lambda: Axis(name="count", values=(1, 2**70), device="V100"),
    "what-if: a large batch limit": lambda: Axis(name="batch_limit", values=(1, 2**70)),
    "what-if: a budget without prices": lambda: variants(with_t4(("V100", 4)), Axis(name="usd_per_hour", values=(3,))),
    # Strategy pame
    "pame: without batches": lambda: solve(replace(pame_strategy.problem(), batches=None), "pame"),
    "pame: the highest rate": lambda: solve(replace(pame_strategy.problem(), objective=MaximizeRate()), "pame"),
    "pame: too few inputs": lambda: find_exits(
        replace(pame_thresholds.FOUR, size=5), (0, 1), 4, fixed(pame_thresholds.batches([[1, 1]] * 4))
    ),
    # Guarantees
    **{
        f"guarantee: budget {budget}, confidence {confidence}": partial(Guarantee, budget=budget, confidence=confidence)
        for budget, confidence in ((0.0, 0.9), (1.0, 0.9), (0.01, 0.0), (0.01, 1.0))
    },
    **{
        f"thresholds: costs {costs}": partial(lay_path, synthetic(50, np.random.default_rng(13)), costs)
        for costs in ((1.0, 1.0, 1.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, NAN))
    },
    "sequences: torn apart": lambda: sequences_of(replace(GENERATIONS, sequences_N=np.array([1, 1, 2, 2, 1, 1, 1]))),
    # The live planner
    "tuner: a policy without thresholds": lambda: check_tunable(PolicySpec(name="patience", patience=2)),
}


def put_in(group: str, text: str, read: Reader, name: str) -> dict[str, FileCase]:
    """Returns the cases of a group of replacements, each applied alone."""
    found = dict[str, FileCase]()
    for old, new in GOLDEN[group]:
        assert old in text, old
        case = f"{group.removesuffix(' files')} file: {' '.join(new.split())[:70] or 'without ' + old.strip()}"
        assert case not in found
        found[case] = (read, name, text.replace(old, new, 1))
    return found


def with_batches(given: Any) -> str:
    """Returns the text of a problem file."""
    return yaml.safe_dump(THREE, sort_keys=False) + yaml.safe_dump({"batches": given}, width=500)


in_shape = partial(read_plan, shape=SHAPE)
FOUR_CHAINS = (SIDE_BY_SIDE + SIDE_BY_SIDE.partition("chains:\n")[2]).replace("0.75", "0.25")
GAP = SIDE_BY_SIDE.replace("{first: 2, end: 6", "{first: 2, end: 5")
STAY = PLAN_FILE + "after_answer: stay\n"
TOKENS = PLAN_FILE.replace("batch: 32,", "batch: 32, tokens: 256,")
SHORT = "ramp_s: [[0.0001, 0.0002]]"
TWO_LENGTHS = TWO.replace(SHORT, f"{SHORT}, length: 16").replace("ramp_s: []", "ramp_s: [], length: 64")
ONE_NETWORK = PROBLEM_FILE + "survival_of: [{networks: [0], survival: [1.0, 0.8, 0.5]}]\n"
FILES: dict[str, FileCase] = {
    **put_in("plan files", PLAN_FILE, in_shape, "plan.yaml"),
    **{name: (in_shape, "plan.yaml", content) for name, content in GOLDEN["whole plan files"].items()},
    **{
        f"plan's policy: {' '.join(new.split())}": (in_shape, "plan.yaml", PLAN_FILE.replace(POLICY, new))
        for new in GOLDEN["policies of plan files"]
    },
    "plan: deep": (in_shape, "plan.yaml", "[" * 3000),
    "plan: not UTF-8": (in_shape, "plan.yaml", b"dispatch: \xff\n"),
    "plan: no policy": (in_shape, "plan.yaml", PLAN_FILE.replace("policy:\n" + POLICY, "")),
    "plan: tokens of images": (partial(read_plan, shape=replace(SHAPE, has_tokens=False)), "plan.yaml", TOKENS),
    "plan: a token stays": (partial(read_plan, shape=replace(SHAPE, generates=True)), "plan.yaml", STAY),
    "plan: more chains than allowed": (in_shape, "plan.yaml", FOUR_CHAINS),
    "plan: chains of different ends": (read_plan, "plan.yaml", GAP),
    **put_in("side by side files", SIDE_BY_SIDE, in_shape, "plan.yaml"),
    **{name: (read_plan, "plan.yaml", chain_file(*bounds)) for name, bounds in GOLDEN["plans of a chain"].items()},
    **{
        name: (read_plan, "plan.yaml", chain_file([[0, 2]], [[5, 9]], prune=prune))
        for name, prune in GOLDEN["pruned"].items()
    },
    **put_in("problem files", PROBLEM_FILE, read_problem, "problem.yaml"),
    "problem file: a list": (read_problem, "problem.yaml", "- 1\n"),
    "problem file: survival of one network": (read_problem, "problem.yaml", ONE_NETWORK),
    **put_in("published files", PUBLISHED, read_problem, "problem.yaml"),
    **put_in("chain files", TWO, read_problem, "problem.yaml"),
    "chain file: two lengths": (read_problem, "problem.yaml", TWO_LENGTHS),
    **put_in("sequence files", generation.FILE, read_problem, "problem.yaml"),
    **{name: (read_problem, "problem.yaml", with_batches(given)) for name, given in GOLDEN["batches"].items()},
}


def beside(name: str, save: Reader, text: str) -> Reader:
    """Reads a problem that names a file beside it."""

    def read(folder: Path) -> object:
        save(folder / name)
        (folder / "problem.yaml").write_text(text, encoding="utf-8")
        return read_problem(folder / "problem.yaml")

    return read


def of_another_schema(path: Path) -> None:
    latency_profile().save(path)
    path.write_text(path.read_text(encoding="utf-8").replace('"schema_version": 1', '"schema_version": 9'))


def of_records(survival: str) -> str:
    return PROBLEM_FILE.replace("[1.0, 0.5, 0.25]", f"{{records: r.npz, {survival}}}")


def shares(folder: Path) -> object:
    """Reads a problem whose records and calibration have different confidences."""
    records = replace(problem_records(), score="share", confidences={0: 0.7, 1: 0.7})
    (folder / "calibration.json").write_text(share_card(0.95).to_json(), encoding="utf-8")
    survival = PROBLEM_FILE.replace("[1.0, 0.5, 0.25]", "{folder: .}")
    return beside("exit_records.npz", records.save, survival)(folder)


def an_ensemble(folder: Path) -> object:
    """Reads a problem with records of an ensemble, without the records of its single networks."""
    of_three_inputs(folder / "r.npz", 0.9, weights={1: 0.3})
    return read_problem(recorded(folder / "problem.yaml", "r.npz"))


FOLDERS: dict[str, Reader] = {
    "profile: absent": beside("other.json", latency_profile().save, PROFILED),
    "profile: a long name": beside("v100.json", latency_profile().save, PROFILED.replace("v100.json", "p" * 300)),
    "profile: four blocks": beside("v100.json", latency_profile(num_blocks=4).save, PROFILED),
    "profile: one ramp": beside("v100.json", latency_profile(ramps=(0,)).save, PROFILED),
    "profile: large batches": beside("v100.json", latency_profile(tables={32: rows(3, 2, (1, 2**70))}).save, PROFILED),
    "profile: another length": beside(
        "v100.json", latency_profile().save, PROFILED.replace("length: 32", "length: 64")
    ),
    "profile: another schema": beside("v100.json", of_another_schema, PROFILED),
    "records: one ramp": beside("r.npz", problem_records(ramps=(0,)).save, of_records("thresholds: 0.4")),
    "records: a threshold of one ramp": beside("r.npz", problem_records().save, of_records("thresholds: {1: 0.4}")),
    "records: batches too": beside(
        "r.npz", problem_records().save, of_records("thresholds: 0.4") + "batches: {size: 1, losses: [[null, null]]}\n"
    ),
    "records: other confidences": shares,
    "records: an ensemble without its networks": an_ensemble,
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES, folders=FOLDERS)
test_what_is_refused_is_told_in_the_recorded_words, test_no_other_case_is_recorded = REFUSALS.tests()
