"""Exit records of a chain where some of its networks are left out: the same inputs, seen by the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from earlyexit.errors import DataError
from earlyexit.network.chain import Chain
from profiles.records import ExitRecords

DECAY = "decay"
"""In the provenance of such records."""


def decay_of(records: ExitRecords) -> float | None:
    """By which their scores were made comparable over places; None: scores are as ramps gave them."""
    found = (records.provenance or {}).get(DECAY)
    return None if found is None else float(found)


def check_decay_of(records: ExitRecords, decay: float | None, name: str) -> None:
    """Raise DataError for records of another decay than a policy's, or a calibration's."""
    held = decay_of(records)
    if held != decay:
        raise DataError(f"{name} holds scores of {_said(held)}, not of {_said(decay)}")


def _said(decay: float | None) -> str:
    return "no decay" if decay is None else f"decay {decay:g}"


WEIGHTS = "weights"
"""In the provenance of records of an ensemble: by the end of a network, what counts in what comes after it."""
PRUNE, WORDS_CUT, TOKENS_KEPT, MEASURING = "prune", "words_cut", "tokens_kept", "measuring"
"""In the provenance where words are pruned: alphas, as of a plan; the share of all words that the last network does not
see; per network the share of its tokens that is left; and of all networks but the last how many times as long they take
to measure attention."""
ALONE_FILE = "exit_records_alone.npz"
"""Beside an ensemble's records: the same inputs with nothing mixed, as plans see them that leave networks out."""


def weights_of(records: ExitRecords) -> dict[int, float] | None:
    """Of an ensemble: what exits say is then of inputs that came by all networks before; None: nothing is mixed."""
    found = (records.provenance or {}).get(WEIGHTS)
    return None if found is None else {int(end): float(weight) for end, weight in found.items()}


def prune_of(records: ExitRecords) -> dict[int, float]:
    """Of inputs that lost words at crossings, the alphas; empty where all texts are whole."""
    found = (records.provenance or {}).get(PRUNE, {})
    return {int(end): float(alpha) for end, alpha in found.items()}


def kept_of(records: ExitRecords) -> tuple[float, ...]:
    """Per network the share of tokens that is left of inputs that lost words; (): all."""
    return tuple(map(float, (records.provenance or {}).get(TOKENS_KEPT, ())))


def measuring_of(records: ExitRecords) -> tuple[float, ...]:
    """Of networks that tell where attention went, how many times as long they take for it; (): none does."""
    return tuple(map(float, (records.provenance or {}).get(MEASURING, ())))


def alone_of(path: Path, records: ExitRecords) -> ExitRecords | None:
    """What holds of the same inputs where networks are left out, of records in a file that hold only where none is.

    None of others. Raises DataError where it is gone.
    """
    if weights_of(records) is not None:
        beside, of = path.with_name(ALONE_FILE), "an ensemble"
    elif prune_of(records):
        beside, of = path.parent.parent / path.name, "pruned texts"
    else:
        return None
    if not beside.is_file():
        raise DataError(f"{path} is of {of}, and {beside} is not there: calibrate again")
    return ExitRecords.load(beside)


def check_weights(records: ExitRecords, weights: Mapping[int, float] | None, name: str) -> None:
    """Raise DataError for records of other weights than a policy's, or a calibration's."""
    held, wanted = weights_of(records) or {}, weights or {}
    if held != wanted:
        raise DataError(
            f"{name} holds what networks say with the weights {held or 'of none'}, not {wanted or 'of none'}"
        )


def of_networks(records: ExitRecords, used: Sequence[int], chain: Chain) -> ExitRecords:
    """The records without the ramps of networks that are not used; blocks keep the chain's numbers.

    Survival still has an entry for every block of the chain: an input at a network's start has passed the blocks of
    those left out before it, without running them. Raises DataError for records of another chain, for networks that
    do not end at the reference, and for those of an ensemble without one that counts in what comes after it.
    """
    _check_chain(records, chain)
    last = len(chain.lengths) - 1
    if list(used) != sorted(set(used)) or not used or used[-1] != last or used[0] < 0:
        raise DataError(f"networks {list(used)}: some of 0 to {last}, ascending, the last of them {last}")
    missing = [
        end for end, weight in (weights_of(records) or {}).items() if weight and chain.network_of(end) not in used
    ]
    if missing:
        raise DataError(
            f"exit records of an ensemble: what ended after blocks {missing} is mixed into what comes after, and "
            f"networks {list(used)} are without it; records of the networks alone are needed"
        )
    return records.of_ramps([ramp for ramp in records.ramps if chain.network_of(ramp) in used])


def survival_of(
    records: ExitRecords, thresholds: Mapping[int, float], chain: Chain, alone: ExitRecords | None = None
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """By networks used, the share of inputs that reach every block of the chain, all ramps of these networks active.

    Exact for these inputs: that a small network's hard inputs are also a later one's is in the records. Ramps without
    a threshold are never active. `alone`: of an ensemble's records, the same inputs where nothing is mixed, and of
    pruned texts' the whole ones: exact where a network before the last counts, or prunes, alone. Raises DataError as
    `of_networks` does.
    """
    _check_chain(records, chain)
    whole = len(chain.lengths)
    return {
        used: of_networks(records if alone is None or len(used) == whole else alone, used, chain)
        .outcome({ramp: value for ramp, value in thresholds.items() if chain.network_of(ramp) in used})
        .survival
        for used in subsets(chain)
    }


def subsets(chain: Chain) -> Iterator[tuple[int, ...]]:
    """Every choice of networks that ends at the reference, the reference alone first."""
    *others, last = range(len(chain.lengths))
    for number in range(len(others) + 1):
        for chosen in combinations(others, number):
            yield (*chosen, last)


def _check_chain(records: ExitRecords, chain: Chain) -> None:
    if records.num_blocks != chain.num_blocks or not set(chain.end_ramps) <= set(records.ramps):
        raise DataError(
            f"exit records of {records.num_blocks} blocks and ramps {list(records.ramps)} are not of a chain of "
            f"{chain.num_blocks} blocks whose networks end after {list(chain.ends)}"
        )
