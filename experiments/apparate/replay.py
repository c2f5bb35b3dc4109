"""When the answers of a replayed stream came: every input runs on to the end of the model.

A share of the batches are probes, which run the inactive ramps too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.apparate.times import Answered
from experiments.tuning import replay as tuned_replay
from experiments.tuning.replay import BATCH, Controller
from optimizer.live.exit_times import ExitTimes
from profiles.records import ExitRecords
from profiles.scores import BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of a stream."""

    answered: Answered
    settings: Sequence[Mapping[int, float]]
    """The thresholds of every batch."""

    @property
    def changes(self) -> int:
        """How often a batch was served otherwise than the one before it."""
        return sum(one != other for one, other in zip(self.settings, self.settings[1:], strict=False))

    @property
    def mean_ramps(self) -> float:
        """Active ramps of the mean batch."""
        return float(np.mean([len(setting) for setting in self.settings]))


def replay(
    records: ExitRecords, controller: Controller, times: ExitTimes, *, probe_share: float = 0.0, seed: int = 0
) -> Replay:
    """Serve a stream; equal seeds probe the same batches."""
    num_batches = -(-len(records) // BATCH)
    probes_K = np.random.default_rng(seed).random(num_batches) < probe_share
    found = tuned_replay.replay(records, controller, probe_N=np.repeat(probes_K, BATCH)[: len(records)])
    return Replay(answered=_timed(found, probes_K, records, times), settings=found.settings)


def _timed(found: tuned_replay.Replayed, probes_K: BoolArray, records: ExitRecords, times: ExitTimes) -> Answered:
    """Of probes all ramps take their time."""
    answer_s = []
    for index, (setting, is_probe) in enumerate(zip(found.settings, probes_K.tolist(), strict=True)):
        exits_N = found.exits_N[index * BATCH : (index + 1) * BATCH]
        answer_s.append(times.released_s(records.ramps if is_probe else setting)[exits_N])
    return Answered(answer_s_N=np.concatenate(answer_s), losses_N=found.losses_N, whole_s=times.whole_s)
