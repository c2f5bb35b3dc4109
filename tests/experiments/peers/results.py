"""What a client told."""

from __future__ import annotations

from experiments.peers.client import LoadResult


def load_result(p99_s: float = 0.05, p50_s: float = 0.01, lateness_p99_s: float = 0.0) -> LoadResult:
    """Of a hundred requests, all answered."""
    return LoadResult(
        duration_s=1.0,
        num_sent=100,
        num_counted=100,
        num_answered=100,
        errors={},
        goodput_per_s=100.0,
        p50_s=p50_s,
        p99_s=p99_s,
        from_sent_p99_s=p99_s,
        lateness_p99_s=lateness_p99_s,
        cpu_s=0.0,
    )
