"""What an ingress counts of sequences, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping

from ray.serve.metrics import Counter, Gauge

from deployments.ingress.core.counts import LATENCY_ENDS_S, latencies_within
from deployments.ingress.generation.loop import Loop
from deployments.metrics import Totals, le, tags


class GenerationMetrics:
    """Told of totals once a second, as `FlowMetrics` is."""

    def __init__(self) -> None:
        self._running = Gauge("offramp_sequences_running", "Sequences that were let in and have not ended")
        self._ended = Counter("offramp_sequences_ended", "Sequences that ended, by why", tags("ended"))
        self._refused = Counter("offramp_sequences_refused", "Sequences whose SLOs could not be kept")
        self._in_slo = Counter("offramp_sequences_in_slo", "Sequences that ended by themselves, both SLOs kept")
        self._lost = Counter("offramp_sequences_lost", "Times that a sequence began anew on another replica")
        self._probes = Counter("offramp_sequences_probed", "Sequences that ended and were probes")
        self._prompt_tokens = Counter("offramp_prompt_tokens", "Tokens of prompts that were let in")
        self._tokens = Counter("offramp_generated_tokens", "Tokens, by the block they left after", tags("exit"))
        self._ttft = Counter("offramp_ttft_seconds_bucket", "Sequences by time to first token", tags("le"))
        self._tpot = Counter("offramp_tpot_seconds_bucket", "Sequences by time per output token", tags("le"))
        self._grow = Totals().grow

    def tell(self, loop: Loop) -> None:
        """Tell Ray what has come since the last time."""
        counts = loop.counts
        self._running.set(loop.num_running)
        for reason, total in counts.ended.items():
            self._grow(self._ended, total, ended=reason)
        self._grow(self._refused, counts.refused)
        self._grow(self._in_slo, counts.in_slo)
        self._grow(self._lost, counts.lost)
        self._grow(self._probes, counts.probes)
        self._grow(self._prompt_tokens, counts.prompt_tokens)
        for block, total in counts.exits.items():
            self._grow(self._tokens, total, exit=str(block))
        self._tell_times(self._ttft, counts.ttft)
        self._tell_times(self._tpot, counts.tpot)

    def _tell_times(self, counter: Counter, buckets: Mapping[int, int]) -> None:
        for end_s, total in zip(LATENCY_ENDS_S, latencies_within(buckets, LATENCY_ENDS_S), strict=True):
            self._grow(counter, total, le=le(end_s))
