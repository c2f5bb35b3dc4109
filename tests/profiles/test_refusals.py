"""Refusals of profiles, one case per rule; `python -m tests.refusals profiles` rewrites `refusals.txt`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from profiles.catalogue import published_profile
from profiles.forecast import forecast_rate, forecast_survival
from profiles.latency import LatencyProfile
from profiles.lengths import Lengths, read_lengths, read_sequences
from profiles.networks import of_networks, survival_of
from profiles.records import ExitRecords
from profiles.records_table import read_records
from profiles.stream import ExitStream, Observations, StreamShape, empty
from profiles.table import LatencyTable
from profiles.windows import SurvivalHistory, Window, survival_history
from tests.profiles.test_latency import CHAIN, HALF, PROFILE, TEXT, table
from tests.profiles.test_latency import RECORDS as OF_CHAIN
from tests.profiles.test_measure import split, table_of
from tests.profiles.test_records import HEADER, ROWS, batches
from tests.profiles.test_stream import LATE, PROBES, SHAPE, floats, stream_of
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


def late(**changes: Any) -> Case:
    arrays: dict[str, Any] = {name: floats(*rows) for name, rows in changes.items()}
    return lambda: replace(LATE, **arrays)


def counts(rows: object) -> SurvivalHistory:
    return SurvivalHistory.from_counts(np.array(rows, dtype=float))


def as_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts lists under names that end in shapes to arrays."""
    return {name: np.array(each, dtype=float) if name[-2:].isupper() else each for name, each in values.items()}


def latency_table(**changes: Any) -> LatencyTable:
    values: dict[str, Any] = {"batches": (1, 2, 4), "block_s_NB": SECONDS, "ramp_s_EB": SECONDS} | as_arrays(changes)
    return LatencyTable(**values | {"batches": tuple(values["batches"])})


GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
TAKERS: dict[str, Callable[[Any], object]] = {
    "lengths": Lengths.of,
    "weighted": Lengths.weighted,
    "stream": lambda values: ExitStream(SHAPE, **{"since_s": 0.0} | values),
    "history": lambda values: SurvivalHistory(**ONE | as_arrays(values)),
    "counts": counts,
    "forecast": lambda values: forecast_survival(counts([[100, 50, 10]]), **values),
    "rates": lambda values: forecast_rate(**{"window_s": 120.0} | as_arrays(values)),
    "table": lambda values: latency_table(**values),
}
"""Readers by group of refusals.yaml."""
CASES: dict[str, Case] = {
    **{name: partial(take, values) for group, take in TAKERS.items() for name, values in GOLDEN[group].items()},
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
    "records: harm without the truth": lambda: replace(RECORDS, true_losses_NE=None).of_harm(),
    # Recorded batches
    "batches: of nothing": lambda: replace(batches(), size=0),
    "batches: of more than there are": lambda: replace(batches(), size=8),
    "batches: shape": lambda: replace(batches(), ramps=(0,)),
    "batches: a ramp after the last block": lambda: replace(batches(), ramps=(0, 3)),
    "batches: a loss above 1": lambda: replace(batches(), losses_NR=np.full((7, 2), 1.5)),
    "batches: losses where no input leaves": lambda: replace(batches(), losses_NR=np.ones((7, 2))),
    "batches: ramps not recorded": lambda: batches().exits_N((0, 1)),
    # Networks of a chain
    "networks: another chain": lambda: survival_of(OF_CHAIN, HALF, replace(CHAIN, lengths=(2, 1, 1), ramps=(1, 2))),
    "networks: an end not recorded": lambda: of_networks(OF_CHAIN.of_ramps((0, 2, 3)), (2,), CHAIN),
    # Lengths
    "lengths: mean below 1": lambda: Lengths(mean=0.5),
    "lengths: mean that is no number": lambda: Lengths(mean=NAN),
    # Live streams
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
    "window: no probe": lambda: Window(start_s=120, observations=observe(RECORDS, {}, np.array(NONE))).records(),
    "window: ramps not recorded": lambda: estimate(RECORDS, {}, NONE, {2: 0.5}),
    "window: a threshold that is no number": lambda: estimate(RECORDS, {}, NONE, {1: NAN}),
    "window: none says anything": lambda: survival_history([estimate(RECORDS, {1: 0.5}, NONE, {1: 0.8, 3: 0.7})]),
    # Histories of survival and their forecasts
    "forecast: nothing was seen": lambda: forecast_survival(counts(np.full((3, 3), NAN))),
    # Latency
    "profile: no device": lambda: replace(PROFILE, device=""),
    "profile: no lengths": lambda: replace(PROFILE, tables={}),
    "profile: three blocks": lambda: replace(PROFILE, num_blocks=3),
    "profile: below the measured lengths": lambda: PROFILE.at(15),
    "profile: above the measured lengths": lambda: PROFILE.at(129),
    "profile: no common batch size": lambda: replace(PROFILE, tables={16: table(1, (1, 2)), 32: table(2, (4,))}).at(20),
    "profile: other blocks": lambda: PROFILE.check_fits(3, (0,)),
    "profile: other ramps": lambda: PROFILE.check_fits(2, (0, 1)),
    "points: missing": lambda: table_of({split(0, 1): [5.0], split(1, 2): [7.0]}, 2, []),
    "points: unequal rounds": lambda: table_of(
        {split(0, 1): [5.0], split(1, 2): [7.0, 7.0], split(0, 2): [12.0]}, 2, []
    ),
    "catalogue: unknown model": lambda: published_profile("gpt2", "V100"),
    "catalogue: unknown accelerator": lambda: published_profile("resnet50", "L4"),
}


def zipped(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npz(header: Mapping[str, Any] | None = None, **arrays: Any) -> bytes:
    """Returns a file of exit records with some values changed, or removed if None."""
    facts = {"schema_version": 2, "score": "confidence", "num_blocks": 6, "ramps": [1, 3], "provenance": {}}
    kept = {name: value for name, value in (facts | dict(header or {})).items() if value is not None}
    whole = {"sample_ids": np.array(RECORDS.sample_ids), "scores": RECORDS.scores_NR, "losses": RECORDS.losses_NR}
    there = {name: array for name, array in (whole | arrays).items() if array is not None}
    return zipped(header=np.array(json.dumps(kept)), **there)


scaled = partial(read_records, scale=2.0)


def of_profiles(changes: Sequence[tuple[str, str]]) -> dict[str, FileCase]:
    """Returns latency profiles with some text replaced."""
    files = dict[str, FileCase]()
    for old, new in changes:
        assert TEXT.count(old) == 1
        name = f"profile file: {' '.join(new.split())[:50] or 'without ' + old.strip()}"
        files[name] = (LatencyProfile.load, "p.json", TEXT.replace(old, new))
    return files


def of_table(*rows: str, header: str = HEADER) -> str:
    return "\n".join((header, *rows)) + "\n"


LOSSES = of_table("a,0,0.5,0", "a,1,,0", header="sample_id,exit,confidence,loss")
FILES: dict[str, FileCase] = {
    "npz: schema 3": (read_records, "r.npz", npz({"schema_version": 3})),
    "npz: without a score": (read_records, "r.npz", npz({"score": None})),
    "npz: an unknown score": (read_records, "r.npz", npz({"score": "margin"})),
    "npz: 6.0 blocks": (read_records, "r.npz", npz({"num_blocks": 6.0})),
    "npz: ramp 3.0": (read_records, "r.npz", npz({"ramps": [1, 3.0]})),
    "npz: ramp true": (read_records, "r.npz", npz({"ramps": [True, 3]})),
    "npz: no losses": (read_records, "r.npz", npz(losses=None)),
    "npz: losses of integers": (read_records, "r.npz", npz(losses=np.zeros((4, 2), np.int64))),
    "npz: another array": (read_records, "r.npz", npz(more=np.zeros(2))),
    "npz: losses of three ramps": (read_records, "r.npz", npz(losses=np.zeros((4, 3)))),
    "npz: a scale": (scaled, "r.npz", npz()),
    "npz: absent": (read_records, "r.npz", None),
    "npz: empty": (read_records, "r.npz", ""),
    "npz: a cut archive": (read_records, "r.npz", b"PK\x03\x04cut"),
    "npz: a cut array": (read_records, "r.npz", b"\x93NUMPY\x01\x00"),
    "npz: no header": (read_records, "r.npz", zipped(x=np.zeros(1))),
    "npz: a number as header": (read_records, "r.npz", zipped(header=np.array("3"))),
    "npz: a broken header": (read_records, "r.npz", zipped(header=np.array("{"))),
    "records: unknown ending": (read_records, "e.txt", ""),
    **{name: (read_records, "e.csv", content) for name, content in GOLDEN["csv"].items()},
    "csv: not UTF-8": (read_records, "e.csv", b"\xff\xfe\x00"),
    "csv: an endless cell": (read_records, "e.csv", b"sample_id,exit,loss,entropy\n" + b"x" * 10_000_001),
    "csv: a scale for losses": (scaled, "e.csv", LOSSES),
    "csv: a scale for labels": (scaled, "e.csv", of_table(*ROWS)),
    "csv: a scale of nothing": (partial(read_records, scale=0.0), "e.csv", of_table("a,0,0.5,1,2", "a,1,0.5,4,2")),
    **of_profiles([*GOLDEN["profile files"], (TEXT, "[]"), (TEXT, TEXT.replace("  ", "\t").replace("[1]]", "[-1]]"))]),
    "profile file: absent": (LatencyProfile.load, "p.json", None),
    **{name: (read_lengths, "l.txt", content) for name, content in GOLDEN["length files"].items()},
    **{name: (read_sequences, "s.csv", content) for name, content in GOLDEN["sequence files"].items()},
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES)
test_what_is_refused_is_told_in_the_recorded_words, test_no_other_case_is_recorded = REFUSALS.tests()
