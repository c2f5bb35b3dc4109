"""What profiles refuse, one case per rule; `python -m tests.profiles.test_refusals` writes `refusals.txt` anew."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.network.chain import Chain
from profiles.catalogue import published_profile
from profiles.forecast import forecast_rate, forecast_survival
from profiles.latency import LatencyProfile
from profiles.lengths import Lengths, read_lengths
from profiles.networks import of_networks, survival_of
from profiles.records import ExitRecords
from profiles.records_table import read_records
from profiles.sequence_trace import read_sequences
from profiles.stream import ExitStream, Observations, StreamShape, empty
from profiles.table import LatencyTable
from profiles.windows import SurvivalHistory, Window, survival_history
from tests.profiles.test_batches import batches
from tests.profiles.test_latency import PROFILE, TEXT, table
from tests.profiles.test_measure import split, table_of
from tests.profiles.test_networks import CHAIN, HALF
from tests.profiles.test_networks import RECORDS as OF_CHAIN
from tests.profiles.test_records_table import HEADER, ROWS
from tests.profiles.test_stream import LATE, PROBES, SHAPE, floats, stream_of
from tests.profiles.test_survival_history import history
from tests.profiles.windows_of import NONE, RECORDS, estimate, observe
from tests.refusals import Case, FileCase, Refusals

NAN, INF = float("nan"), float("inf")
SHARES = replace(RECORDS, score="share", confidences={1: 0.5, 3: 0.6})
ANSWERS_NE = RECORDS.answers()
STAYED = replace(
    LATE,
    stayed_N=np.array([True, True]),
    active_NR=np.ones((2, 2), dtype=bool),
    scores_NR=np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32),
    losses_NR=np.zeros((2, 2), dtype=np.float32),
)
ONE = {"survival_WK": np.array([[1, 0.5]]), "inputs_WK": np.ones((1, 2)), "missing_W": np.zeros(1, dtype=bool)}
SECONDS = np.array([[1.0, 2.0, 6.0]])


def records(**changes: Any) -> Case:
    return lambda: replace(RECORDS, **changes)


def of_answers(answers_NE: Any, **facts: Any) -> Case:
    return lambda: ExitRecords.of_answers(
        answers_NE,
        **{name: getattr(RECORDS, name) for name in ("score", "num_blocks", "ramps", "sample_ids", "scores_NR")},
        **facts,
    )


def stream(**settings: Any) -> Case:
    given: dict[str, Any] = {"since_s": 0.0} | settings
    return lambda: ExitStream(SHAPE, **given)


def late(**changes: Any) -> Case:
    arrays: dict[str, Any] = {name: floats(*rows) for name, rows in changes.items()}
    return lambda: replace(LATE, **arrays)


def one_window(**changes: Any) -> Case:
    return lambda: SurvivalHistory(**(ONE | changes))


def counts(rows: object) -> SurvivalHistory:
    return SurvivalHistory.from_counts(np.array(rows, dtype=float))


def forecast(**settings: Any) -> Case:
    return lambda: forecast_survival(counts([[100, 50, 10]]), **settings)


def rates(*rates_rps: float, **settings: Any) -> Case:
    return lambda: forecast_rate(np.array(rates_rps), **settings)


def latency_table(
    batches: tuple[int, ...] = (1, 2, 4), *, block_s: Any = SECONDS, ramp_s: Any = SECONDS, **facts: Any
) -> Case:
    return lambda: LatencyTable(batches=batches, block_s_NB=block_s, ramp_s_EB=ramp_s, **facts)


CASES: dict[str, Case] = {
    # Exit records
    "records: no inputs": lambda: RECORDS.subset(np.array([], dtype=np.int64)),
    "records: scores of one ramp": records(scores_NR=np.zeros((4, 1), np.float32)),
    "records: losses of three inputs": records(losses_NR=np.zeros((3, 2))),
    "records: answers of two exits": records(answers_NE=np.zeros((4, 2))),
    "records: true losses of three inputs": records(true_losses_NE=np.zeros((3, 3))),
    "records: tallies of two exits": records(tallies_NE=np.zeros((4, 2, 1))),
    "records: a loss above 1": records(losses_NR=np.full((4, 2), 1.5)),
    "records: a loss that is no number": records(losses_NR=np.full((4, 2), NAN)),
    "records: half a label": records(losses_NR=np.full((4, 2), 0.5)),
    "records: a score that is no number": records(scores_NR=np.full((4, 2), NAN, np.float32)),
    "records: an unknown score": records(score="margin"),
    "records: ramps out of order": records(ramps=(3, 1)),
    "records: a ramp after the last block": records(ramps=(1, 5)),
    "records: few arrival times": records(times_s_N=np.array([1.0, 2.0])),
    "records: an arrival that is no time": records(times_s_N=np.array([1.0, 2.0, 3.0, NAN])),
    "records: few tokens": records(tokens_N=np.array([1, 2, 3])),
    "records: an input without tokens": records(tokens_N=np.array([1, 2, 3, 0])),
    "records: few sequences": records(sequences_N=np.array([0, 0, 1])),
    "records: few losses at the end": records(end_losses_N=np.zeros(3)),
    "records: half a label at the end": records(end_losses_N=np.full(4, 0.5)),
    "records: a confidence of one ramp": records(confidences={1: 0.5}),
    "records: few answers": of_answers(ANSWERS_NE[:, :2]),
    "records: few true answers": of_answers(ANSWERS_NE, truth_N=np.array([0, 1])),
    "records: other confidences": lambda: ExitRecords.join([SHARES, RECORDS]),
    "records: no answers kept": lambda: replace(RECORDS, answers_NE=None).answers(),
    "records: ramps not recorded": lambda: RECORDS.outcome({1: 0.5, 2: 0.5}),
    "records: ramps to keep not recorded": lambda: RECORDS.of_ramps((2, 3)),
    "records: a threshold that is no number": lambda: RECORDS.outcome({1: 0.5, 3: NAN}),
    "records: nested, a ramp without a threshold": lambda: RECORDS.nested_survival({1: 0.75}),
    "records: harm without the truth": lambda: replace(RECORDS, true_losses_NE=None).of_harm(),
    # Recorded batches
    "batches: of nothing": lambda: replace(batches(), size=0),
    "batches: of more than there are": lambda: replace(batches(), size=8),
    "batches: shape": lambda: replace(batches(), ramps=(0,)),
    "batches: a ramp after the last block": lambda: replace(batches(), ramps=(0, 3)),
    "batches: half a label": lambda: replace(batches(), losses_NR=np.full((7, 2), 0.5)),
    "batches: losses where no input leaves": lambda: replace(batches(), losses_NR=np.ones((7, 2))),
    "batches: ramps not recorded": lambda: batches().exits_N((0, 1)),
    # Networks of a chain
    **{
        f"networks: {list(used)}": partial(of_networks, OF_CHAIN, used, CHAIN)
        for used in ((), (0, 1), (2, 1), (1, 1, 2), (-1, 2), (0, 3))
    },
    "networks: another chain": lambda: survival_of(OF_CHAIN, HALF, Chain(names=("s", "l"), lengths=(2, 2), ramps=(1,))),
    "networks: an end not recorded": lambda: of_networks(OF_CHAIN.of_ramps((0, 2, 3)), (2,), CHAIN),
    # Lengths
    "lengths: none": lambda: Lengths.of([]),
    "lengths: 0": lambda: Lengths.of([3, 0]),
    "lengths: no number": lambda: Lengths.of([NAN]),
    "lengths: half a token": lambda: Lengths.of([2.5]),
    "lengths: infinite": lambda: Lengths.of([INF]),
    "lengths: too long": lambda: Lengths.of([1_000_001]),
    "lengths: mean below 1": lambda: Lengths(mean=0.5),
    "lengths: mean that is no number": lambda: Lengths(mean=NAN),
    "lengths: no shares": lambda: Lengths.weighted({}),
    "lengths: a share of nothing": lambda: Lengths.weighted({3: 0.0}),
    "lengths: a negative share": lambda: Lengths.weighted({3: -1.0, 4: 2.0}),
    "lengths: a share that is no number": lambda: Lengths.weighted({3: NAN}),
    # Live streams
    "stream: no period": stream(period_s=0.0),
    "stream: a period that is no number": stream(period_s=NAN),
    "stream: keeps less than a window": stream(keep_s=60.0),
    "stream: keeps for ever": stream(keep_s=INF),
    "stream: begins at infinity": stream(since_s=INF),
    "stream: begins at no time": stream(since_s=NAN),
    "stream: times beyond all windows": lambda: stream_of(1e300),
    "stream: other ramps": lambda: ExitStream(SHAPE, since_s=0).append(empty(replace(SHAPE, score="entropy"))),
    "stream: joins other ramps": lambda: Observations.join(SHAPE, [empty(replace(SHAPE, score="entropy"))]),
    "stream: a ramp after the last block": lambda: StreamShape(score="entropy", num_blocks=4, ramps=(1, 3)),
    "stream: an unknown score": lambda: StreamShape(score="margin", num_blocks=6, ramps=()),  # type: ignore[arg-type] # the point
    "seen: few probes": lambda: replace(LATE, probe_N=np.zeros(1, dtype=bool)),
    "seen: few ramps": late(scores_NR=[[0.9], [0.2]]),
    "seen: an endless time": lambda: replace(LATE, times_s_N=np.array([5, INF])),
    "seen: an exit that is none": lambda: replace(STAYED, exits_N=np.array([2, 5], dtype=np.int16)),
    "seen: scores of blocks that did not run": lambda: replace(STAYED, stayed_N=np.array([False, True])),
    "seen: losses of an input that left": late(losses_NR=[[0, NAN], [0, NAN]]),
    "seen: losses missing": late(losses_NR=[[NAN, NAN]] * 2),
    "seen: a loss above 1": late(losses_NR=[[NAN, NAN], [2, NAN]]),
    "seen: half a label": late(losses_NR=[[NAN, NAN], [0.5, NAN]]),
    "seen: few true losses": late(true_losses_NE=[[0, NAN]] * 2),
    "seen: true losses of what did not run": late(true_losses_NE=[[0, 0, NAN]] * 2),
    "pruned: few ends": lambda: replace(PROBES, end_losses_N=floats(1)),
    "pruned: half a label": lambda: replace(PROBES, end_losses_N=floats(0.5, NAN)),
    "pruned: no probe": lambda: replace(
        PROBES,
        stayed_N=np.array([False, True]),
        active_NR=np.ones((2, 2), dtype=bool),
        end_losses_N=floats(0, 0),
        probe_N=np.array([True, False]),
    ),
    # Windows
    "window: no probe": lambda: Window(
        start_s=120, period_s=120, observations=observe(RECORDS, {}, np.array(NONE))
    ).records(),
    "window: ramps not recorded": lambda: estimate(RECORDS, {}, NONE, {2: 0.5}),
    "window: a threshold that is no number": lambda: estimate(RECORDS, {}, NONE, {1: NAN}),
    "window: none says anything": lambda: survival_history([estimate(RECORDS, {1: 0.5}, NONE, {1: 0.8, 3: 0.7})]),
    # Histories of survival and their forecasts
    "history: below 1 at the first block": one_window(survival_WK=np.array([[0.9, 0.5]])),
    "history: below 0": one_window(survival_WK=np.array([[1, -0.5]])),
    "history: rises": one_window(survival_WK=np.array([[1, 0.5, 0.6]]), inputs_WK=np.ones((1, 3))),
    "history: no number": one_window(survival_WK=np.array([[1, NAN]])),
    "history: infinite inputs": one_window(inputs_WK=np.array([[5, INF]])),
    "history: fewer than no inputs": one_window(inputs_WK=-np.ones((1, 2))),
    "history: inputs of three blocks": one_window(inputs_WK=np.ones((1, 3))),
    "history: no windows": one_window(survival_WK=np.array([1, 0.5])),
    "history: worth of all blocks": lambda: history(worth_WR=np.ones((2, 3))),
    "history: worth below 0": lambda: history(worth_WR=-np.ones((2, 2))),
    "history: worth that is no number": lambda: history(worth_WR=np.full((2, 2), NAN)),
    "counts: rise": lambda: counts([[100, 50, 60]]),
    "counts: below 0": lambda: counts([[100, -1, -1]]),
    "counts: no number": lambda: counts([[100, NAN, 3]]),
    "counts: no windows": lambda: counts([100, 50]),
    "forecast: no window": forecast(horizon=0),
    "forecast: coverage of all": forecast(coverage=1.0),
    "forecast: prior of two blocks": forecast(prior=[1, 0.5]),
    "forecast: prior rises": forecast(prior=[1, 0.5, 0.6]),
    "forecast: no inputs to come": forecast(inputs_to_come=0),
    "forecast: endless inputs to come": forecast(inputs_to_come=INF),
    "forecast: nothing was seen": lambda: forecast_survival(counts(np.full((3, 3), NAN))),
    "rates: negative": rates(-1.0, 2),
    "rates: infinite": rates(INF, 2),
    "rates: all missing": rates(NAN, NAN),
    "rates: none": rates(),
    "rates: windows of no time": rates(1.0, window_s=0),
    # Latency
    "table: no batch sizes": latency_table(()),
    "table: batch 0": latency_table((0, 1, 2)),
    "table: batch sizes not ascending": latency_table((1, 4, 2)),
    "table: a batch size twice": latency_table((1, 2, 2)),
    "table: more values than sizes": latency_table((1, 2)),
    "table: fewer values than sizes": latency_table(ramp_s=SECONDS[:, :2]),
    "table: one row, flat": latency_table(block_s=SECONDS[0]),
    "table: negative seconds": latency_table(block_s=-SECONDS),
    "table: seconds that are no numbers": latency_table(ramp_s=SECONDS * NAN),
    "table: infinite seconds": latency_table(ramp_s=SECONDS * INF),
    "table: length 0": latency_table(length=0),
    "table: context 0": latency_table(context=0),
    "table: negative seconds of context": latency_table(context_s=-1.0),
    "profile: no device": lambda: replace(PROFILE, device=""),
    "profile: no lengths": lambda: replace(PROFILE, tables={}),
    "profile: three blocks": lambda: replace(PROFILE, num_blocks=3),
    "profile: below the measured lengths": lambda: PROFILE.at(15),
    "profile: above the measured lengths": lambda: PROFILE.at(129),
    "profile: no common batch size": lambda: replace(PROFILE, tables={16: table(1, (1, 2)), 32: table(2, (4,))}).at(20),
    "profile: another model": lambda: PROFILE.check_fits("big", 2, (0,)),
    "profile: other blocks": lambda: PROFILE.check_fits("tiny", 3, (0, 1)),
    "profile: other ramps": lambda: PROFILE.check_fits(None, 2, ()),
    "points: missing": lambda: table_of({split(0, 1): [5.0], split(1, 2): [7.0]}, 2, []),
    "points: unequal rounds": lambda: table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0, 7.0], split(0, 2): [12.0]}, 2, []
    ),
    "catalogue: unknown model": lambda: published_profile("gpt2", "V100"),
    "catalogue: unknown accelerator": lambda: published_profile("resnet50", "L4"),
}


def npz(header: Mapping[str, Any] | None = None, **arrays: Any) -> bytes:
    """A file of exit records with some values changed, or left out where None."""
    facts = {"schema_version": 2, "score": "confidence", "num_blocks": 6, "ramps": [1, 3], "provenance": {}}
    kept = {name: value for name, value in (facts | dict(header or {})).items() if value is not None}
    whole = {"sample_ids": np.array(RECORDS.sample_ids), "scores": RECORDS.scores_NR, "losses": RECORDS.losses_NR}
    file = io.BytesIO()
    there = {name: array for name, array in (whole | arrays).items() if array is not None}
    np.savez(file, header=np.array(json.dumps(kept)), **there)
    return file.getvalue()


def lines(*rows: str, header: str = HEADER) -> str:
    return "\n".join((header, *rows)) + "\n"


def rows(row: int, text: str) -> str:
    """The table with another row."""
    return lines(*ROWS[:row], text, *ROWS[row + 1 :])


def tokens(cell: str) -> str:
    """The table with tokens of the second input."""
    return lines(*(f"{row},{7 if row[0] == 'a' else cell}" for row in ROWS), header=HEADER + ",tokens")


def one_row(header: str) -> str:
    return lines(",".join("1" * (header.count(",") + 1)), header=header)


LOSSES = "sample_id,exit,confidence,loss"
TWO_EXITS = ("a,0,0.5,0", "a,1,,0")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens"
scaled = partial(read_records, scale=2.0)


def of_records(files: Mapping[str, str | bytes | None], name: str = "e.csv") -> dict[str, FileCase]:
    return {case: (read_records, name, content) for case, content in files.items()}


def of_profiles(*changes: Sequence[str]) -> dict[str, FileCase]:
    """Latency profiles, by what is written instead of what."""
    files = dict[str, FileCase]()
    for old, new in changes:
        assert TEXT.count(old) == 1
        name = f"profile file: {' '.join(new.split())[:50] or 'without ' + old.strip()}"
        files[name] = (LatencyProfile.load, "p.json", TEXT.replace(old, new))
    return files


FILES: dict[str, FileCase] = {
    **of_records(
        {
            "npz: schema 3": npz({"schema_version": 3}),
            "npz: without a score": npz({"score": None}),
            "npz: an unknown score": npz({"score": "margin"}),
            "npz: 6.0 blocks": npz({"num_blocks": 6.0}),
            "npz: ramp 3.0": npz({"ramps": [1, 3.0]}),
            "npz: ramp true": npz({"ramps": [True, 3]}),
            "npz: no losses": npz(losses=None),
            "npz: losses of integers": npz(losses=np.zeros((4, 2), np.int64)),
            "npz: another array": npz(more=np.zeros(2)),
            "npz: losses of three ramps": npz(losses=np.zeros((4, 3))),
        },
        "r.npz",
    ),
    "npz: a scale": (scaled, "r.npz", npz()),
    "records: unknown ending": (read_records, "e.txt", ""),
    **of_records(
        {
            "csv: absent": None,
            "csv: empty": b"",
            "csv: not UTF-8": b"\xff\xfe\x00",
            "csv: an endless cell": b"sample_id,exit,loss,entropy\n" + b"x" * 200_000,
            "csv: no input": one_row("Exit,Confidence,Prediction"),
            "csv: no exit": one_row("Sample_ID,Confidence,Prediction"),
            "csv: no answer": one_row("Sample_ID,Exit,Confidence"),
            "csv: shares": one_row("Sample_ID,Exit,Share,Loss"),
            "csv: no score": one_row("Sample_ID,Exit,Prediction"),
            "csv: two scores": one_row("Sample_ID,Exit,Entropy,Confidence,Loss"),
            "csv: a column twice": one_row("Sample_ID,Exit,exit,Confidence,Loss"),
            "csv: no rows": lines(),
            "csv: one exit": lines("a,0,0.6,yes,no"),
            "csv: a short row": rows(1, "a,2,0.9,no"),
            "csv: exit 2.0": rows(1, "a,2.0,0.9,no,no"),
            "csv: exit -1": rows(1, "a,-1,0.9,no,no"),
            "csv: exit too large": rows(1, "a,99999999,0.9,no,no"),
            "csv: an empty input": rows(1, ",2,0.9,no,no"),
            "csv: an empty score": rows(1, "a,2,,no,no"),
            "csv: a score that is no number": rows(1, "a,2,nan,no,no"),
            "csv: a score above 1": rows(1, "a,2,1.5,no,no"),
            "csv: a word as a score": rows(1, "a,2,sure,no,no"),
            "csv: an empty answer": rows(1, "a,2,0.9,,no"),
            "csv: two truths": rows(1, "a,2,0.9,no,yes"),
            "csv: an exit twice": rows(1, "a,0,0.9,no,no"),
            "csv: an exit missing": lines(*ROWS[:4], *ROWS[5:]),
            "csv: 0 tokens": tokens("0"),
            "csv: half a token": tokens("1.5"),
            "csv: no tokens": tokens(""),
            "csv: too many tokens": tokens("9999999"),
            "csv: a loss above 1": lines("a,0,0.5,1.5", "a,1,,0", header=LOSSES),
            "csv: a loss of the last exit": lines("a,0,0.5,0", "a,1,,0.5", header=LOSSES),
            "csv: an empty loss": lines("a,0,0.5,", "a,1,,0", header=LOSSES),
        }
    ),
    "csv: a scale for losses": (scaled, "e.csv", lines(*TWO_EXITS, header=LOSSES)),
    "csv: a scale for labels": (scaled, "e.csv", lines(*ROWS)),
    "csv: a scale of nothing": (partial(read_records, scale=0.0), "e.csv", lines("a,0,0.5,1,2", "a,1,0.5,4,2")),
    **of_profiles(
        ("[0.001, 2e-03]", "[0.001, -1]"),
        ("[0.001, 2e-03]", "[0.001, NaN]"),
        ("1e-05, 2e-05", "1e-05, Infinity"),
        ("[0.001, 2e-03]", '[0.001, "2"]'),
        (', "batch": [1, 2],', ","),
        ('"batch": [1, 2]', '"batch": []'),
        ('"batch": [1, 2]', '"batch": [2, 1]'),
        ('"batch": [1, 2]', '"batch": [1, 2, 4]'),
        ("        [0.001, 0.002]\n", "        [0.001]\n"),
        ("[0.001, 2e-03],\n", ""),
        ("        [1e-05, 2e-05]\n", ""),
        ('"ramps": [0]', '"ramps": [1]'),
        ('"num_blocks": 2', '"num_blocks": 0'),
        ('"kind": "measured"', '"kind": "guessed"'),
        ('"schema_version": 1', '"schema_version": 2'),
        ('"model": "tiny"', '"model": ""'),
        ('"dtype"', '"type"'),
        ('"dtype": "float32",', '"dtype": "float32", "x": 1,'),
        ('"length": 32', '"length": 0'),
        ('"length": 32', '"length": 16'),
        ('"length": 32', '"length": 8'),
        ('"kind": "measured",', '"kind": "measured"'),
        (TEXT, "[]"),
        (TEXT, TEXT.replace("  ", "\t").replace("[1]]", "[-1]]")),
    ),
    "profile file: absent": (LatencyProfile.load, "p.json", None),
    "lengths: absent": (read_lengths, "l.txt", None),
    "lengths: a word": (read_lengths, "l.txt", "12\nmany\n"),
    "lengths: 0 on a line": (read_lengths, "l.txt", "12\n0\n"),
    "lengths: nan on a line": (read_lengths, "l.txt", "nan\n"),
    "lengths: an empty line": (read_lengths, "l.txt", "\n"),
    "sequences: absent": (read_sequences, "s.csv", None),
    "sequences: no column": (read_sequences, "s.csv", "TIMESTAMP,ContextTokens\nx,1\n"),
    "sequences: no rows": (read_sequences, "s.csv", TRACE),
    "sequences: a word": (read_sequences, "s.csv", f"{TRACE}\nx,5,3\nx,many,3\n"),
    "sequences: no token": (read_sequences, "s.csv", f"{TRACE}\nx,5,0\n"),
    "sequences: a short row": (read_sequences, "s.csv", f"{TRACE}\nx,5\n"),
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES)


@pytest.mark.parametrize("case", REFUSALS.names)
def test_what_is_refused_is_told_in_the_recorded_words(case: str, tmp_path: Path) -> None:
    assert REFUSALS.said(case, tmp_path) == REFUSALS.recorded()[case]


def test_no_other_case_is_recorded() -> None:
    REFUSALS.check_recorded()


if __name__ == "__main__":
    REFUSALS.write()
