from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offramp.commands.options import SimulateJob
from offramp.commands.simulate import partial_figures, prepare, simulated_sequences
from simulator.outcome import DROPS, Outcome, SlotUse
from tests.offramp.cli import runs
from tests.offramp.cli.runs import PLAN, PROBLEM, Captured, cells, played, printed, records, run, written
from tests.simulator.test_simulate import interrupt


def test_requests_take_the_profiles_times(problem: Path, capsys: Captured, tmp_path: Path) -> None:
    found = played(capsys, problem, "--strategy", "stock")
    simulated = found["simulated"]
    assert (simulated["inputs"], simulated["answered"], simulated["goodput_per_s"]) == (100, 100, 100)
    assert [simulated[name] for name in ("p50_s", "p95_s", "p99_s")] == pytest.approx([0.002] * 3)
    assert simulated["exits"] == {"1": 100}
    assert simulated["utilisation"] == pytest.approx(0.2)  # 2 ms in every 10
    assert [split["fill"] for split in simulated["splits"]] == [0.25]  # one input in a batch of 4
    assert simulated["usd_per_hour"] == pytest.approx(3)
    assert found["predicted"]["rate_per_s"] == pytest.approx(2000)
    assert found["predicted"]["exits"] == {"1": 1.0}
    trace = written(tmp_path / "counts.txt", " ".join(["50"] * 5 + ["0"] * 100 + ["50"] * 5))
    notes = played(capsys, problem, arrivals=f"trace:{trace}")["notes"]
    assert any(note.startswith(f"{trace}: read as 110 counts, requests per second") for note in notes)


def test_the_cheapest_plan_has_room_for_the_queues_of_random_inputs(problem: Path, capsys: Captured) -> None:
    asked = PROBLEM.replace("count: 1", "count: 4").replace("latency_s: 0.1", "latency_s: 0.009")
    written(problem, asked.replace("maximize: rate", "minimize: cost, rate_per_s: 5300, in_time: 0"))
    without = played(capsys, problem, arrivals="poisson:5300")
    written(problem, asked.replace("maximize: rate", "minimize: cost, rate_per_s: 5300"))
    found = played(capsys, problem, arrivals="poisson:5300")
    assert [each["predicted"]["usd_per_hour"] for each in (without, found)] == [6, 9]
    assert without["simulated"]["in_slo_share"] < 0.98 < 0.99 < found["simulated"]["in_slo_share"]
    written(problem, PROBLEM)
    found = played(capsys, problem, arrivals="uniform:1000")
    exits = found["simulated"]["exits"]
    assert exits["0"] + exits["1"] == 1000
    assert 400 < exits["0"] < 600  # half of all, drawn at random
    assert found["predicted"]["exits"] == {"0": 0.5, "1": 0.5}
    assert found["inputs"] == {"from": "survival"}
    assert found["notes"][0].startswith("inputs: random, they leave according to the problem's survival")


def test_lengths_make_batches_of_tokens_and_their_spread_is_reported(problem: Path, capsys: Captured) -> None:
    given = PROBLEM.replace("ramp_s: [[0.0, 0.0, 0.0]]}", "ramp_s: [[0.0, 0.0, 0.0]], length: 32}")
    written(problem, given)
    found = played(capsys, problem, "--lengths", "20,100,3,100", arrivals="poisson:2000")
    (split,) = [each for each in found["simulated"]["splits"] if each["first"] == 0]
    lengths = split["lengths"]
    assert lengths["budget"] == 128  # four inputs of 32 tokens
    assert 0 < lengths["fill"] <= 1
    assert lengths["spread"] >= 1
    assert found["predicted"]["rate_per_s"] > 3000  # of 32 tokens each it is 2667
    assert "lengths: --lengths 20,100,3,100, " in found["notes"][0]
    assert run("simulate", problem, "--arrivals", "poisson:500", "--duration", 2, "--lengths", "20,100,3,100") == 0
    said = capsys.readouterr().out
    assert "128 tokens" in said
    assert "p99/p50" in said
    written(problem, given + "lengths: [16, 48]\n")
    assert run("plan", problem) == 0
    assert "128 tokens" in capsys.readouterr().out


def test_recorded_inputs_leave_by_a_given_threshold(problem: Path, tmp_path: Path, capsys: Captured) -> None:
    path = records(tmp_path / "exits.npz", 0.1, 0.1, 0.1)
    sure = played(capsys, problem, "--records", path, "--thresholds", 0.4)
    assert sure["simulated"]["exits"] == {"0": 100}
    assert sure["simulated"]["p50_s"] == pytest.approx(0.001)
    assert sure["inputs"]["policy"] == "they leave at an entropy of at most 0.4"
    unsure = played(capsys, problem, "--records", path, "--thresholds", "0=0.05")
    assert unsure["simulated"]["exits"] == {"1": 100}
    card = {"thresholds": {0: 0.4}, "budget": 0.1, "confidence": 0.9, "tested": {}, "provenance": {}}
    for score, status in (("entropy", 0), ("confidence", 2)):
        calibration = written(tmp_path / "calibration.json", json.dumps(card | {"policy": score}))
        given = ("--records", path, "--thresholds", calibration)
        assert run("simulate", problem, "--arrivals", "uniform:100", "--duration", 2, *given) == status
    assert f"the calibration leaves by confidence, {path} holds scores of entropy" in capsys.readouterr().err
    records(tmp_path / "exits.npz", 0.1)
    written(problem, PROBLEM.replace("[1.0, 0.5]", "{records: exits.npz, thresholds: 0.4}"))
    found = played(capsys, problem)
    assert found["simulated"]["exits"] == {"0": 100}
    assert found["inputs"]["records"] == "the problem's exit records"


def test_inputs_that_stay_are_answered_as_early_and_keep_the_device_as_busy_as_without_ramps(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "exits.npz", 0.1)
    stopped = played(capsys, problem, "--plan", plan, "--records", path)
    written(plan, PLAN + "after_answer: stay\n")
    stayed = played(capsys, problem, "--plan", plan, "--records", path)
    for found, utilisation in ((stopped, 0.1), (stayed, 0.2)):  # of 2 ms in every 10
        assert found["simulated"]["exits"] == {"0": 100}
        assert found["simulated"]["p50_s"] == pytest.approx(0.001)
        assert found["simulated"]["utilisation"] == pytest.approx(utilisation)
    assert stayed["plan"]["after_answer"] == "stay"


def test_batches_overlap_below_the_requested_size(problem: Path, plan: Path, tmp_path: Path, capsys: Captured) -> None:
    whole = "stages:\n  - {device: V100, replicas: 1, splits: [{first: 0, end: 2, batch: 2, ramps: [0]}]}\n"
    policy = "policy: {name: entropy, thresholds: 0.4}\n"
    path = records(tmp_path / "exits.npz", 0.1, 0.9)  # one of two leaves after the first of two blocks, of 1 ms each
    rates_per_s = []
    for said, option in (("", ()), ("overlap_below: 2\n", ()), ("", ("--overlap-below", 2))):
        written(plan, whole + policy + said)
        load = ("--plan", plan, "--records", path, "--inputs-per-request", 2, *option)
        found = played(capsys, problem, *load, arrivals="uniform:1000")
        assert found["plan"].get("overlap_below") == (2 if said or option else None)
        rates_per_s.append(found["simulated"]["goodput_per_s"])
    assert rates_per_s[0] < 1300  # two inputs every 2 ms
    assert rates_per_s[1] == rates_per_s[2] > 1500  # another pair beside the one that remains


def test_inputs_are_run_in_the_requested_order(problem: Path, plan: Path, tmp_path: Path, capsys: Captured) -> None:
    path = records(tmp_path / "exits.npz", 0.1)
    for said, option, expected in (
        ("", (), None),
        ("order: shortest\n", (), "shortest"),
        ("", ("--order", "das:0.25"), {"name": "das", "eta": 0.25}),
    ):
        written(plan, PLAN + said)
        found = played(capsys, problem, "--plan", plan, "--records", path, *option)
        assert found["plan"].get("order") == expected
        assert found["simulated"]["answered"] == 100


def test_each_chain_has_a_row_and_the_share_of_one_limits_the_rate(problem: Path, plan: Path, capsys: Captured) -> None:
    """The V100 does 2000/s, with four fifths of the inputs, so that the plan does 2500/s. Others leave at a ramp."""
    entry = "{batch: [1, 4], block_s: [[0.005, 0.005], [0.003, 0.003]], ramp_s: [[0.0, 0.0]]}"
    text = PROBLEM.replace("latency:", f"latency:\n  T4: {entry}", 1).replace("[1.0, 0.5]", "[1.0, 0.0]")
    written(problem, text.replace("devices:", "devices:\n  T4: {count: 1, usd_per_hour: 1}"))
    stages = "stages: [{device: %s, splits: [{first: 0, end: 2, batch: 4, ramps: %s}]}]"
    chains = f"chains:\n- {{share: 0.8, {stages % ('V100', [])}}}\n- {{share: 0.2, {stages % ('T4', [0])}}}\n"
    written(plan, f"{chains}policy: {{name: entropy, thresholds: 0.4}}\n")
    assert run("simulate", problem, "--plan", plan, "--arrivals", "uniform:100", "--duration", 2) == 0
    rows = cells(capsys.readouterr().out)
    assert {"0: 1 x V100 16% 0-1 4 160 25% 2.00 2.00", "1: 1 x T4 10% 0-1 4 40 25% 5.00 5.00"} <= set(rows)
    assert {"0 20.00% 20.00% 20", "1 80.00% 80.00% 80"} <= set(rows)
    assert any(row.startswith("goodput 2500.0/s at most") for row in rows)
    assert any(row.startswith("latency p99 16.00 ms at 2500.0/s") for row in rows), "500/s fill T4's batches in 8 ms"


def test_patience_is_that_of_the_plan(tmp_path: Path, capsys: Captured) -> None:
    """There are 4 blocks with ramps after 0 to 2; answers alternate, so no ramp repeats the one before it."""
    text = PROBLEM.replace("blocks: 2", "blocks: 4").replace("[0]", "[0, 1, 2]").replace("[1.0, 0.5]", "[1, 1, 1, 1]")
    row = "[0.001, 0.001, 0.001]"
    text = text.replace(f"[{row}, {row}]", f"[{row}, {row}, {row}, {row}]")
    text = text.replace("[[0.0, 0.0, 0.0]]", "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]")
    split = "{first: 0, end: 4, batch: 1, ramps: [0, 1, 2]}"
    plan = written(
        tmp_path / "plan.yaml",
        f"stages: [{{device: V100, splits: [{split}]}}]\npolicy: {{name: patience, patience: 1}}\n",
    )
    path = records(tmp_path / "exits.npz", 0.1, num_blocks=4, ramps=(0, 1, 2))
    found = played(capsys, written(tmp_path / "problem.yaml", text), "--plan", plan, "--records", path)
    assert found["simulated"]["exits"] == {"3": 100}


def test_a_plan_file_and_the_planners_json_simulate_alike(problem: Path, tmp_path: Path, capsys: Captured) -> None:
    written(problem, PROBLEM + "order: shortest\n")
    assert run("plan", problem, "--out", tmp_path / "plan.yaml", "--threshold", 0.4, "--json") == 0
    printed = written(tmp_path / "plan.json", capsys.readouterr().out)
    own, of_file, of_answer = (
        played(capsys, problem, *option) for option in ((), ("--plan", tmp_path / "plan.yaml"), ("--plan", printed))
    )
    assert own["plan"]["order"] == of_file["plan"]["order"] == of_answer["plan"]["order"] == "shortest"
    assert own["plan"]["chains"] == of_file["plan"]["chains"] == of_answer["plan"]["chains"]
    assert own["plan"]["predicted"] == of_file["plan"]["predicted"] == of_answer["plan"]["predicted"]
    assert own["simulated"] == of_file["simulated"] == of_answer["simulated"]
    assert of_file["plan"]["policy"] == {"name": "entropy", "thresholds": 0.4}
    assert of_answer["plan"]["policy"] is None


def test_a_plan_may_come_from_a_pipe(problem: Path, plan: Path, capsys: Captured) -> None:
    reading, writing = os.pipe()
    os.write(writing, plan.read_bytes())
    os.close(writing)
    found = played(capsys, problem, "--plan", f"/dev/fd/{reading}")
    os.close(reading)
    assert found["plan"]["policy"] == {"name": "entropy", "thresholds": 0.4}


def test_load_above_the_plans_rate_is_dropped_by_admission_or_at_the_deadline(problem: Path, capsys: Captured) -> None:
    settled = ("--duration", 6, "--warm-up", 4)  # the queue grows no more
    found = played(capsys, problem, "--strategy", "stock", *settled, arrivals="uniform:4000")
    simulated = found["simulated"]
    assert simulated["offered_per_s"] == pytest.approx(4000)
    assert 1500 < simulated["goodput_per_s"] <= 2000
    assert simulated["drops"]["admission"] > 1000
    assert found["notes"][-1].startswith("the load of 4000.0 inputs/s exceeds the plan's 2000.0/s")
    assert run("simulate", problem, "--arrivals", "uniform:4000", "--duration", 2, "--strategy", "stock") == 0
    assert "dropped: admission" in capsys.readouterr().out
    found = played(capsys, problem, "--strategy", "stock", "--no-admission", arrivals="uniform:4000")
    assert found["admission"] is False
    assert set(found["simulated"]["drops"]) == {"deadline"}
    found = played(capsys, problem, "--strategy", "stock", "--inputs-per-request", 4, "--ingresses", 2)
    assert found["simulated"]["inputs"] == 400
    assert [split["fill"] for split in found["simulated"]["splits"]] == [1.0]
    assert found["ingresses"] == 2


def test_tables_show_the_figures_and_the_notes(problem: Path, plan: Path, capsys: Captured) -> None:
    written(plan, f"{PLAN}predicted: {{rate_per_s: 9}}\n")
    options = ("--duration", 2, "--plan", plan, "--inputs-per-request", 2)
    assert run("simulate", problem, "--arrivals", "uniform:100", *options) == 0
    found = capsys.readouterr()
    words = " ".join(cells(found.out))
    assert "Simulated, 1 s, 200 inputs" in words
    assert "offered 200.0 inputs/s" in words
    assert "goodput, whole requests 200.0 inputs/s within 100.00 ms" in words
    assert "latency p99 6.50 ms at 2666.7/s 2.00 ms" in words  # waits of 1.5 and 3 ms, twice 1 ms
    assert "dropped none" in words
    assert "cost 3.00 USD/h 3.00 USD/h" in words
    written(problem, PROBLEM.replace(", usd_per_hour: 3", ""))
    assert run("simulate", problem, "--arrivals", "uniform:100", *options) == 0
    assert "USD/h" not in capsys.readouterr().out, "no device has a price"
    assert "the plan file predicts 9.0/s; by the problem's figures it is 2666.7/s" in words  # 4 in 1 ms and half of it
    assert max(len(line) for line in found.out.split("\ninputs: ")[0].splitlines()) <= 80
    assert found.err == ""


def test_equal_seeds_print_equal_bytes_in_another_process_too(problem: Path, plan: Path, capsys: Captured) -> None:
    command = ["simulate", str(problem), "--arrivals", "poisson:500", "--plan", str(plan), "--duration", "2", "--json"]
    assert run(*command) == 0
    here = capsys.readouterr().out
    heavy = "torch ray transformers statsmodels matplotlib httpx aiohttp httptools experiments"
    there = runs.run_alone(*command, without=heavy)
    assert (there.returncode, there.stdout) == (0, here)
    assert run(*command, "--seed", 1) == 0
    assert capsys.readouterr().out != here


def test_without_a_plan_the_binding_limit_is_reported(problem: Path, capsys: Captured) -> None:
    written(problem, PROBLEM.replace("latency_s: 0.1,", "latency_s: 0.001,"))
    assert run("simulate", problem, "--arrivals", "uniform:100") == 3
    found = capsys.readouterr()
    assert found.err.startswith("no plan: the SLO of 1 ms")
    assert found.out == ""
    figures = partial_figures(interrupted(warm_up_s=0.0))
    assert figures is not None
    assert (figures.seconds, figures.inputs, figures.offered_per_s) == (3.0, 3, 1.0)
    assert (figures.answered, figures.in_slo, figures.interrupted) == (3, 2, True)
    assert figures.utilisation == 0.5
    assert figures.usd_per_hour == pytest.approx(1.0)


def interrupted(*, warm_up_s: float) -> Outcome:
    """Returns a run of 10 s with a request each second that ends at 4 s, with the request of 4 s in flight.

    Until then the device was busy for 2 s.
    """
    return Outcome(
        duration_s=10.0,
        warm_up_s=warm_up_s,
        slo_s=0.1,
        inputs_per_request=1,
        arrived_s_R=np.arange(10.0),
        latency_s_N=np.array([0.05] * 2 + [0.2] + [np.nan] * 7),
        exit_N=np.array([1, 1, 1] + [-1] * 7, dtype=np.int16),
        drop_N=np.array([-1, -1, -1, DROPS.index("admission")] + [DROPS.index("unanswered")] * 6, dtype=np.int8),
        splits=(),
        slots=(SlotUse(slot="split-V100-0", device="V100", replica_s=4.0, utilisation=0.5),),
        usd=4.0 / 3600,
        ended_s=4.0,
        interrupted=True,
    )


@pytest.mark.usefixtures("interruptible")
def test_a_terminal_shows_a_bar_and_ctrl_c_prints_the_result_so_far(problem: Path) -> None:
    terminal, its_end = pty.openpty()
    arguments = ["simulate", str(problem), "--strategy", "stock", "--arrivals", "uniform:4000", "--duration", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "offramp", *arguments],
        stdout=subprocess.PIPE,
        stderr=its_end,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
        cwd=runs.ROOT,
    )
    os.close(its_end)
    seen = b""
    while not re.search(rb"[1-9]\d?/100", seen):
        seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 130
    assert b"simulate" in seen
    assert all(each in out for each in ("INTERRUPTED", "goodput", "T ms  planned T ms")), "tables are whole"


CASCADE = """
models:
  - name: small
    blocks: 2
    latency: {cpu: {batch: [1, 4], block_s: [[0.001, 0.001], [0.001, 0.001]], ramp_s: []}}
  - name: large
    blocks: 2
    latency: {cpu: {batch: [1, 4], block_s: [[0.004, 0.004], [0.004, 0.004]], ramp_s: []}}
survival: [1.0, 1.0, 0.25, 0.25]
crossing_s: 0.001
devices: {cpu: {count: 3, usd_per_hour: 1.0}}
link: {bandwidth_bytes_per_s: 1.0e9}
slo: {latency_s: 0.1}
objective: {maximize: rate}
"""
ALONE = """
networks: [2, 4]
stages:
  - device: cpu
    replicas: 3
    splits: [{first: 2, end: 4, batch: 4, ramps: [2]}]
policy: {name: entropy, thresholds: 0.4}
"""


@pytest.fixture
def cascade(tmp_path: Path) -> Path:
    return written(tmp_path / "cascade.yaml", CASCADE)


def test_a_chains_small_network_gives_most_answers(cascade: Path, capsys: Captured, tmp_path: Path) -> None:
    found = played(capsys, cascade, arrivals="uniform:200")
    assert found["plan"]["networks"] == [2, 4]
    small, large = found["simulated"]["networks"]
    assert (small["used"], small["first"], small["end"]) == (True, 0, 2)
    assert small["answers"] / small["reached"] == pytest.approx(0.75, abs=0.1)
    assert large["reached"] == large["answers"] == small["reached"] - small["answers"]
    assert found["predicted"]["exits"] == {"1": 0.75, "3": 0.25}
    assert run("simulate", cascade, "--arrivals", "uniform:200", "--duration", 2) == 0
    assert "Answers by network" in capsys.readouterr().out
    assert run("plan", cascade, "--json") == 0
    answer = written(tmp_path / "answer.json", capsys.readouterr().out)
    found = played(capsys, cascade, "--plan", answer, arrivals="uniform:100")
    assert [each["used"] for each in found["simulated"]["networks"]] == [True, True]


def test_a_plan_may_leave_the_small_network_out(cascade: Path, tmp_path: Path, capsys: Captured) -> None:
    plan = written(tmp_path / "plan.yaml", ALONE)
    text = CASCADE.replace("e: large", "e: large\n    ramps: [0]").replace("4]], ramp_s: []", "4]], ramp_s: [[0, 0]]")
    written(cascade, text + "survival_of: [{networks: [1], survival: [1, 1, 1, 0.5]}]\n")
    found = played(capsys, cascade, "--plan", plan, arrivals="uniform:100")
    small, large = found["simulated"]["networks"]
    assert (small["used"], small["reached"], small["answers"]) == (False, 0, 0)
    assert large["answers"] == found["simulated"]["answered"] == 100
    assert found["simulated"]["exits"] == pytest.approx({"2": 50, "3": 50}, abs=15)  # none left before
    assert found["simulated"]["p99_s"] == pytest.approx(0.008)
    chain = "{share: 0.5, stages: [{device: cpu, splits: [%s{first: 2, end: 4, batch: 4, ramps: [2]}]}]}"
    both = ", ".join(chain % small for small in ("", "{first: 0, end: 2, batch: 4}, "))
    written(plan, f"networks: [2, 4]\nchains: [{both}]\npolicy: {{name: entropy, thresholds: 0.4}}\n")
    assert run("simulate", cascade, "--plan", plan, "--arrivals", "uniform:100") == 2
    assert "the chains use different networks" in capsys.readouterr().err
    written(cascade, text)
    assert "networks" not in played(capsys, cascade, "--plan", plan, arrivals="uniform:100")["simulated"]


OF_SEQUENCES = (
    runs.PROBLEM.replace("slo: {latency_s: 0.1, slack: 0.2}\n", "")
    + """\
generation:
  lengths: azure.csv
  tpot_s: 0.1
  ttft_s: 1.0
  chunk: 4
"""
)
"""A block takes 1 ms at any batch, up to four tokens."""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,4,3\nx,2,5\n"
ONE_BY_ONE = ("--arrivals", "uniform:10", "--duration", 2, "--warm-up", 0, "--strategy", "stock")


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    written(tmp_path / "azure.csv", TRACE)
    return written(tmp_path / "problem.yaml", OF_SEQUENCES)


def test_simulated_sequences_have_the_lengths_of_their_trace_in_order(stream: Path, capsys: Captured) -> None:
    found = printed(capsys, "simulate", stream, *ONE_BY_ONE)
    simulated = found["simulated"]
    assert (simulated["sequences"], simulated["whole"], simulated["in_slo"], simulated["refused"]) == (20, 20, 20, 0)
    assert simulated["exits"] == {"1": 10 * (3 + 5)}
    times = [simulated[name] for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")]
    assert times == pytest.approx([0.002] * 4)
    assert found["predicted_sequences"]["tokens_per_s"] > 0
    assert found["slo_s"] == 0.1
    assert run("simulate", stream, *ONE_BY_ONE[:-1], "early-exit") == 0
    said = capsys.readouterr().out
    assert "20 sequences" in said
    assert "per token p50" in said
    assert "Tokens by exit" in said


def test_sequences_that_are_interrupted_in_the_warm_up_have_no_result(stream: Path) -> None:
    job = {"problem": stream, "arrivals": "uniform:2000", "duration": 10, "warm_up": 8, "strategy": "stock"}
    scenario, _, _ = prepare(SimulateJob.model_validate(job))
    assert simulated_sequences(scenario, interrupt) is None  # after 8192 arrivals


def test_sequences_that_take_too_long_are_refused_or_counted_as_late(stream: Path, capsys: Captured) -> None:
    written(stream, OF_SEQUENCES.replace("ttft_s: 1.0", "ttft_s: 0.02"))
    busy = ("--arrivals", "uniform:800", *ONE_BY_ONE[2:])
    kept = printed(capsys, "simulate", stream, *busy)["simulated"]
    unrefused = printed(capsys, "simulate", stream, *busy, "--no-admission")["simulated"]
    assert (kept["refused"] > 0, unrefused["refused"], unrefused["whole"]) == (True, 0, 1600)
    assert unrefused["ttft_p99_s"] > kept["ttft_p99_s"]
    chain = "{share: 0.5, stages: [{device: V100, splits: [{first: 0, end: 2, batch: 4}]}]}"
    plan = written(stream.with_name("plan.yaml"), f"chains: [{chain}, {chain}]\n")
    assert run("simulate", stream, *busy[:-2], "--plan", plan) == 2
    assert "no figures of generation with several chains" in capsys.readouterr().err
