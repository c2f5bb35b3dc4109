"""What an ingress counts of its inputs anyway, as Prometheus metrics: to tell it costs no request anything."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge

from deployments.ingress.core.counts import LATENCY_ENDS_S, latencies_within
from deployments.metrics import Totals, le, tags
from deployments.reports import IngressReport
from earlyexit.chain import Chain


class FlowMetrics:
    """Told of totals once a second.

    Latencies are counters by `le` instead of one of Ray's histograms: that one takes every answer alone, 4 us here and
    more in Ray's agent, while the ingress has them counted in buckets already.
    """

    def __init__(self, chain: Chain) -> None:
        """`chain`: of the model that answers."""
        self._chain = chain
        self._inputs = Counter("offramp_inputs", "Inputs that arrived, refused ones too")
        self._in_slo = Counter("offramp_answers_in_slo", "Answers inside the SLO; all of them where there is none")
        self._latencies = Counter("offramp_latency_seconds_bucket", "Answers by latency, at most `le`", tags("le"))
        self._waiting = Gauge("offramp_waiting", "Inputs that no stage has been sent yet")
        self._unanswered = Gauge("offramp_unanswered", "Inputs that wait or are under way")
        self._answered_tokens = Counter("offramp_answered_tokens", "Tokens of answered inputs")
        self._unanswered_tokens = Gauge("offramp_unanswered_tokens", "Tokens of inputs that wait or are under way")
        self._oldest_s = Gauge(
            "offramp_oldest_wait_seconds", "Longest wait of inputs that no stage has been sent yet", tags("tokens")
        )
        self._crossings = Counter("offramp_crossings", "Inputs that went on to another network", tags("network"))
        self._crossing_s = Counter("offramp_crossing_seconds", "Time inputs waited to be encoded anew", tags("network"))
        self._words = Counter("offramp_words", "Words that could be pruned at a crossing", tags("network"))
        self._pruned_words = Counter("offramp_pruned_words", "Words pruned at a crossing", tags("network"))
        self._lengths = {1}
        """Of which some waited; the shortest, so that the metric is there before anybody does."""
        self._grow = Totals().grow

    def tell(self, report: IngressReport) -> None:
        """Tell Ray what has come since the last time."""
        self._grow(self._inputs, report.arrived)
        self._grow(self._in_slo, report.in_slo)
        for end_s, total in zip(LATENCY_ENDS_S, latencies_within(report.latencies, LATENCY_ENDS_S), strict=True):
            self._grow(self._latencies, total, le=le(end_s))
        self._grow(self._answered_tokens, report.answered_tokens)
        self._tell_crossings(report)
        self._waiting.set(report.waiting)
        self._unanswered.set(report.unanswered)
        self._unanswered_tokens.set(report.unanswered_tokens)
        self._lengths |= report.oldest_s.keys()
        for length in self._lengths:
            self._oldest_s.set(report.oldest_s.get(length, 0.0), {"tokens": str(length)})

    def _tell_crossings(self, report: IngressReport) -> None:
        for counter, totals in (
            (self._crossings, report.crossings),
            (self._crossing_s, report.crossing_s),
            (self._words, report.words),
            (self._pruned_words, report.pruned_words),
        ):
            for block, total in totals.items():
                self._grow(counter, total, network=self._chain.name_of(block))
