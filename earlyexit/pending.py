"""Tokens that left early, and the blocks that have not seen them yet.

A token that leaves at a ramp has no keys and values in the blocks behind it, which later tokens of its sequence attend
to. Its hidden state waits there, and when a later token comes by it is filled in:

- *compute*: the blocks run on it as well, in the same batch, so that what they keep is what the full model would;
- *copy*: every block makes keys and values of the state that it left with (Schuster et al. 2022, CALM: state
  propagation).

Tokens of one sequence may pass a block twice (a batch that failed runs again), or one while an older one is still under
way (who is answered may stay inside): what is noted of one never touches what is noted of newer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from earlyexit.kv_places import Run


@dataclass(frozen=True, slots=True)
class Behind:
    """Hidden states of consecutive tokens of a sequence, from token `start` on."""

    start: int
    hidden_nD: Tensor

    @property
    def end(self) -> int:
        return self.start + self.hidden_nD.shape[0]

    def before(self, end: int) -> Behind | None:
        """Of the tokens before `end`; None where there are none."""
        kept = min(self.end, end) - self.start
        return None if kept <= 0 else Behind(self.start, self.hidden_nD[:kept])

    def since(self, start: int) -> Behind | None:
        """Of the tokens from `start` on; None where there are none."""
        if start >= self.end:
            return None
        return Behind(max(start, self.start), self.hidden_nD[max(0, start - self.start) :])


@dataclass(slots=True)
class Pending:
    """Of every sequence, what waits before which block."""

    _by_sequence: dict[int, dict[int, Behind]] = field(default_factory=dict)

    def blocks(self, run: Run, first: int, end: int) -> list[int]:
        """Where from block `first` on, and before `end`, tokens older than the run's wait."""
        waiting = self._by_sequence.get(run.sequence)
        if not waiting:
            return []
        return [block for block, each in waiting.items() if first <= block < end and each.start < run.start]

    def older(self, sequence: int, block: int, start: int) -> Behind | None:
        """What waits before a block of the tokens before `start`, which it must reach up to."""
        found = self._by_sequence.get(sequence, {}).get(block)
        older = None if found is None else found.before(start)
        assert older is None or older.end == start, f"tokens {older.end} to {start - 1} are nowhere"
        return older

    def num_waiting(self, sequence: int) -> int:
        """Tokens that are behind, of all blocks together."""
        return sum(len(each.hidden_nD) for each in self._by_sequence.get(sequence, {}).values())

    def moved(self, sequence: int, first: int, end: int, rows: Behind) -> None:
        """Blocks `first` to `end` - 1 have seen `rows`, which now wait before `end`, behind what waits there."""
        self.through(sequence, first, rows.end, until=end)
        waiting = self._by_sequence.setdefault(sequence, {})
        there = waiting.get(end)
        before = self.older(sequence, end, rows.start)
        after = None if there is None else there.since(rows.end)
        waiting[end] = joined(rows if before is None else joined(before, rows), after)

    def through(self, sequence: int, first: int, token: int, *, until: int | None = None) -> None:
        """All blocks from `first` on, or those before `until`, have seen the tokens before `token`."""
        waiting = self._by_sequence.get(sequence, {})
        for block in [block for block in waiting if block >= first and (until is None or block < until)]:
            newer = waiting.pop(block).since(token)
            if newer is not None:
                waiting[block] = newer

    def leave(self, sequence: int, block: int, end: int) -> Behind | None:
        """Take away what waits before a block of the tokens before `end`; None where nothing does."""
        found = self._by_sequence.get(sequence, {}).get(block)
        if found is None:
            return None
        self.through(sequence, block, end, until=block + 1)
        return found.before(end)

    def forget(self, sequence: int) -> None:
        """The sequence is over."""
        self._by_sequence.pop(sequence, None)


def joined(before: Behind, after: Behind | None) -> Behind:
    """Both, the one ending where the other begins."""
    if after is None:
        return before
    assert before.end == after.start, f"tokens {before.end} to {after.start - 1} are nowhere"
    return Behind(before.start, torch.cat([before.hidden_nD, after.hidden_nD]))
