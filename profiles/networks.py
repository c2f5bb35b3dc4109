"""Exit records of a chain: their provenance, and records and survival for subsets of the networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from earlyexit.errors import DataError
from earlyexit.network.chain import ModelChain
from profiles.records import ExitRecords

DECAY = "decay"
"""Provenance: the decay of the policy that computed the scores."""


def decay_of(records: ExitRecords) -> float | None:
    """Returns the decay with which the scores were computed; None for constant thresholds."""
    decay = (records.provenance or {}).get(DECAY)
    return None if decay is None else float(decay)


def check_decay_of(records: ExitRecords, decay: float | None, name: str) -> None:
    """Raises DataError unless records were computed with the same decay. `name`: the records' name in the message."""
    recorded = decay_of(records)
    if recorded != decay:
        found, wanted = ("no decay" if each is None else f"decay {each:g}" for each in (recorded, decay))
        raise DataError(f"{name} has scores with {found}, not with {wanted}")


WEIGHTS = "weights"
"""Provenance of an ensemble's records: the block at a network's end -> its weight in later exits."""
PRUNE, WORDS_CUT, TOKENS_KEPT, MEASURING = "prune", "words_cut", "tokens_kept", "measuring"
"""Provenance of records with pruned words: the plan's alphas; the share of all words that the last network does not
get; the share of tokens that each network gets; for each network but the last, the factor by which measuring attention
increases its time."""
ALONE_FILE = "exit_records_alone.npz"
"""File next to an ensemble's records: records of the same inputs without mixing, for plans that skip networks."""


def weights_of(records: ExitRecords) -> dict[int, float] | None:
    """Returns an ensemble's weights, with which scores and answers were mixed; None if nothing was mixed."""
    weights = (records.provenance or {}).get(WEIGHTS)
    return None if weights is None else {int(end): float(weight) for end, weight in weights.items()}


def prune_of(records: ExitRecords) -> dict[int, float]:
    """Returns the alphas with which words were pruned between networks; empty if nothing was pruned."""
    alphas = (records.provenance or {}).get(PRUNE, {})
    return {int(end): float(alpha) for end, alpha in alphas.items()}


def kept_of(records: ExitRecords) -> tuple[float, ...]:
    """Returns the share of tokens that each network gets after pruning; empty if nothing was pruned."""
    return tuple(map(float, (records.provenance or {}).get(TOKENS_KEPT, ())))


def measuring_of(records: ExitRecords) -> tuple[float, ...]:
    """Returns the factors by which measuring attention increases networks' times; empty if none measures it."""
    return tuple(map(float, (records.provenance or {}).get(MEASURING, ())))


def alone_of(path: Path, records: ExitRecords) -> ExitRecords | None:
    """Returns records of the same inputs without mixing and pruning, for plans that skip networks.

    Returns None if `records`, which are in the file `path`, have neither. Raises DataError for a missing file.
    """
    if weights_of(records) is not None:
        file, kind = path.with_name(ALONE_FILE), "an ensemble"
    elif prune_of(records):
        file, kind = path.parent.parent / path.name, "pruned texts"
    else:
        return None
    if not file.is_file():
        raise DataError(f"{path} has records of {kind}, which need {file}: calibrate again")
    return ExitRecords.load(file)


def check_weights(records: ExitRecords, weights: Mapping[int, float] | None, name: str) -> None:
    """Raises DataError unless records were mixed with the same weights. `name`: the records' name in the message."""
    recorded, wanted = weights_of(records) or {}, weights or {}
    if recorded != wanted:
        raise DataError(f"{name} has the ensemble weights {recorded or 'none'}, not {wanted or 'none'}")


def of_networks(records: ExitRecords, used: Sequence[int], chain: ModelChain) -> ExitRecords:
    """Returns the records without the ramps of networks that are not used (see `subsets`).

    Blocks keep the chain's numbers. Survival still has an entry for every block of the chain, although inputs skip the
    blocks of unused networks. Raises DataError for records of another chain, and for an ensemble without a network
    whose weight is not 0.
    """
    if records.num_blocks != chain.num_blocks or not set(chain.end_ramps) <= set(records.ramps):
        raise DataError(
            f"exit records with {records.num_blocks} blocks and ramps {list(records.ramps)} do not match a chain with "
            f"{chain.num_blocks} blocks whose networks end after blocks {list(chain.ends)}"
        )
    weights = weights_of(records) or {}
    if missing := [end for end, weight in weights.items() if weight and chain.network_of(end) not in used]:
        raise DataError(
            f"exit records of an ensemble: the exits after blocks {missing} are mixed into later ones, and networks "
            f"{list(used)} do not include them; records without mixing are needed"
        )
    return records.of_ramps([ramp for ramp in records.ramps if chain.network_of(ramp) in used])


def survival_of(
    records: ExitRecords, thresholds: Mapping[int, float], chain: ModelChain, alone: ExitRecords | None = None
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Returns, for each subset of networks, the share of inputs that reach each block, with all its ramps active.

    It is exact for the recorded inputs, including correlation between networks. Ramps without a threshold are inactive.
    `alone`: records of the same inputs without mixing and pruning (see `alone_of`), for subsets that skip networks.
    Raises DataError as `of_networks` does.
    """
    survival = {}
    for used in subsets(len(chain.lengths)):
        of_subset = records if alone is None or len(used) == len(chain.lengths) else alone
        of_used = {ramp: threshold for ramp, threshold in thresholds.items() if chain.network_of(ramp) in used}
        survival[used] = of_networks(of_subset, used, chain).outcome(of_used).survival
    return survival


def subsets(num_networks: int) -> Iterator[tuple[int, ...]]:
    """Yields all subsets of networks that include the last one, beginning with the last network alone."""
    *others, last = range(num_networks)
    for number in range(len(others) + 1):
        for chosen in combinations(others, number):
            yield (*chosen, last)
