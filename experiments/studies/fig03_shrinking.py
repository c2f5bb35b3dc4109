"""E3, figure 3: a batch shrinks as its inputs leave, and the accelerator is used less.

Computed: batches are drawn from recorded exits; utilisation is throughput relative to a full batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2, EASY_SHARES, bert12_sst2, mixed_rows
from experiments.studies.picture import Lines
from experiments.studies.sides import SEED
from experiments.studies.study import Comparison, Effort, StudyResult, declare, facts
from profiles.catalogue import published_profile
from profiles.records import ExitRecords, IntArray
from profiles.table import LatencyTable

LENGTH = 128
"""Tokens per input."""
BATCHES = (8, 16)
RAMP = 6
"""E3's ramps count from 1. Half of its inputs have left by this ramp."""
EVEN = "50:50"
"""E3's case: inputs that leave by this ramp are easy, so half of the inputs leave by it."""
RECORDED = "as recorded"
NUM_BATCHES = {"full": 50_000, "quick": 5_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinking:
    """How batches of one size shrink."""

    inside_N: tuple[float, ...]
    """Mean number of inputs of a batch that enter each block."""
    utilisation_N: tuple[float, ...]
    """Inputs per second at each block, relative to a full batch."""
    rest: float
    """Utilisation of all blocks after `RAMP` together."""


def shrinking(last_MB: IntArray, table: LatencyTable) -> Shrinking:
    """Computes how batches (M) of inputs (B) shrink, from the last block that each input enters.

    Utilisation is per second of accelerator. A block that no input enters takes no time, and batches are weighted by
    their time.
    """
    batch, num_blocks = last_MB.shape[1], len(table.block_s_NB)
    inside_NM = np.array([(last_MB >= block).sum(1) for block in range(num_blocks)])
    block_s_NX = np.hstack([np.zeros((num_blocks, 1)), table.blocks_at(np.arange(1.0, batch + 1))])
    taken_s_N = np.array(
        [seconds_X[inside_M].mean() for seconds_X, inside_M in zip(block_s_NX, inside_NM, strict=True)]
    )
    inside_N = inside_NM.mean(1)
    full_per_s_N = batch / block_s_NX[:, batch]
    used_s_N = inside_N / full_per_s_N
    return Shrinking(
        inside_N=tuple(inside_N.tolist()),
        utilisation_N=tuple((used_s_N / taken_s_N).tolist()),
        rest=float(used_s_N[RAMP:].sum() / taken_s_N[RAMP:].sum()),
    )


def mixes(records: ExitRecords, rng: np.random.Generator, num_inputs: int) -> dict[str, IntArray]:
    """Returns the last block that each input enters, by name of the mix."""
    thresholds = dict.fromkeys(records.ramps, ENTROPY)
    last_N = records.outcome(thresholds).exits_N
    rows = {
        f"{100 * share:.0f}:{100 - 100 * share:.0f}": mixed_rows(records, thresholds, share, rng, num_inputs=num_inputs)
        for share in EASY_SHARES
    }
    rows[RECORDED] = rng.integers(len(records), size=num_inputs)
    return {name: last_N[each] for name, each in rows.items()}


def run(effort: Effort) -> StudyResult:
    """Runs BERT-base's recorded exits and the V100's published times: every mix at both batch sizes."""
    records, table = bert12_sst2("entropy"), published_profile("bert-base", "V100").tables[LENGTH]
    rng = np.random.default_rng(SEED)
    found: dict[int, dict[str, Shrinking]] = {}
    for batch in BATCHES:
        last = mixes(records, rng, NUM_BATCHES[effort] * batch)
        found[batch] = {name: shrinking(last_N.reshape(-1, batch), table) for name, last_N in last.items()}
    first, (some, more) = found[BATCHES[0]], BATCHES
    some_s, more_s = table.blocks_at(np.array([float(some), float(more)])).sum(0)
    gain = float(more / more_s / (some / some_s))
    inside = {name: each.inside_N for name, each in first.items()}
    used = {name: tuple(100 * share for share in each.utilisation_N) for name, each in first.items()}
    return StudyResult(
        comparisons=(
            *(
                Comparison(
                    f"utilisation lost after ramp {RAMP} (%), {name}, batch {batch}",
                    100 * (1 - found[batch][name].rest),
                    25 if name == EVEN else None,
                )
                for batch in found
                for name in (EVEN, RECORDED)
            ),
            Comparison(
                f"inputs that have left by ramp {RAMP} (%), as recorded",
                100 * (1 - first[RECORDED].inside_N[RAMP] / first[RECORDED].inside_N[0]),
                paper=50,
            ),
        ),
        pictures=(
            _by_block("Inputs inside a batch of 8", "inputs", inside),
            _by_block("Throughput over that of a full batch of 8", "utilisation (%)", used),
        ),
        tables=(facts({f"throughput of a full batch of {more}, over one of {some}": gain}),),
    )


def _by_block(title: str, y_label: str, values: Mapping[str, tuple[float, ...]]) -> Lines:
    x = tuple(float(block + 1) for block in range(len(values[RECORDED])))
    named = {f"{name} easy:hard" if name != RECORDED else name: each for name, each in values.items()}
    return Lines(title, "block", y_label, x, named)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
