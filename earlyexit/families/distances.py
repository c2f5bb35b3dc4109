"""A bias on attention by how far apart two tokens are, in buckets (Raffel et al. 2020, T5, section 2.1).

One bucket for each small distance, then ever wider ones. Letters as in `layout.py`; D distances, E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_DISTANCE = 128
"""From it on all distances share a bucket, unless a configuration names another; MPNet's does not."""


def by_distance(table: nn.Embedding, length: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """What is added to the scores of `length` tokens in a row that all see each other, queries before keys, (H, T, T).

    `table`: a bias per bucket and head; the second half of the buckets is for keys behind the query.
    """
    device = table.weight.device
    place_T = torch.arange(length, device=device)
    # Of every distance once; picking T * T of them is cheaper than sorting T * T into buckets.
    offset_D = torch.arange(1 - length, length, device=device)
    bias_DH: Tensor = table(bucket(offset_D, table.num_embeddings, max_distance))
    return bias_DH[place_T[None, :] - place_T[:, None] + (length - 1)].permute(2, 0, 1)


def before(table: nn.Embedding, longest: int, max_distance: int) -> Tensor:
    """What is added to the score of a key so many tokens before its query, (D, H), of distances 0 to `longest` - 1."""
    distance_D = torch.arange(longest, device=table.weight.device)
    bias_DH: Tensor = table(_bucket(distance_D, table.num_embeddings, max_distance))
    return bias_DH


def bucket(offset: Tensor, num_buckets: int, max_distance: int = MAX_DISTANCE) -> Tensor:
    """The bucket of how far a key is behind its query (negative: before it), int64; half are for those behind."""
    half = num_buckets // 2
    return _bucket(offset.abs(), half, max_distance) + (offset > 0).long() * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Of distances to one side.

    Half of the buckets is for the distances below that half, one each; the edges of the others grow evenly in the
    logarithm up to `max_distance`. By comparison with whole edges, where `transformers` rounds a logarithm down: that
    depends on who computes the logarithm.
    """
    exact = num_buckets // 2
    wide = exact + (distance[..., None] >= _edges(exact, num_buckets - exact, max_distance, distance.device)).sum(-1)
    return torch.where(distance < exact, distance, wide)


def _edges(exact: int, num_wide: int, max_distance: int, device: torch.device) -> Tensor:
    """The smallest distance of every wide bucket but the first.

    Computed where it is needed: numbers from the host could not be captured. What is meant to be whole is so before it
    is rounded up, whoever computes the powers.
    """
    step_E = torch.arange(1, num_wide, dtype=torch.float64, device=device)
    return (exact * (max_distance / exact) ** (step_E / num_wide) - 1e-6).ceil()
