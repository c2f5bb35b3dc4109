"""The counts of an ingress as Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping

from ray.serve.metrics import Counter, Gauge

from deployments.ingress.core.calls import LATENCY_ENDS_S, IngressCounts, latencies_within
from deployments.ingress.core.generation import GenerationLoop
from deployments.metrics import SECONDS, Totals, histogram, le, tags
from deployments.wire.messages import IngressReport
from earlyexit.network.chain import Chain


class IngressMetrics:
    """The requests, inputs and answers of an ingress; `tell` passes the totals to Ray, once a second.

    A call to Ray per request cost an ingress 3 % of its time. Latencies are counters by `le`, because one of Ray's
    histograms takes every answer alone: 4 us here and more in Ray's agent.
    """

    def __init__(self, chain: Chain) -> None:
        """`chain`: the networks of the model that answers."""
        self._chain = chain
        self._requests = Counter("offramp_requests", "Requests, by route and status", tags("route", "status"))
        self._answers = Counter("offramp_answers", "Answers, by the block they left after", tags("exit", "network"))
        self._hop_s = histogram("offramp_hop_seconds", "Time a call spent outside its stage", SECONDS, "slot")
        self._drops = Counter("offramp_drops", "Inputs without an answer, by reason", tags("reason"))
        self._retries = Counter("offramp_retries", "Inputs sent again because a replica failed", tags("slot"))
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
        """Length classes of inputs that waited. The shortest is always there, so that the metric exists at once."""
        self._finished: Tally[tuple[str, int]] = Tally()
        self._hops: list[tuple[str, float]] = []
        self._grow = Totals().grow

    def request(self, route: str, status: int) -> None:
        """Count a finished request; one over gRPC by the status that HTTP has for the same."""
        self._finished[route, status] += 1

    def hop(self, slot: str, seconds: float) -> None:
        """Record the time that a part of a reply spent outside its stage."""
        self._hops.append((slot, seconds))

    def tell(self, report: IngressReport, counts: IngressCounts) -> None:
        """Tell Ray what has come since the last time. `report` and `counts`: those of the ingress's core."""
        for (route, status), total in self._finished.items():
            self._grow(self._requests, total, route=route, status=str(status))
        for block, total in counts.all_exits.items():
            self._grow(self._answers, total, exit=str(block), network=self._chain.name_of(block))
        for reason, total in report.drops.items():
            self._grow(self._drops, total, reason=reason)
        for slot, total in counts.retries.items():
            self._grow(self._retries, total, slot=slot)
        hops, self._hops = self._hops, []
        for slot, seconds in hops:
            self._hop_s.observe(seconds, {"slot": slot})
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


class GenerationMetrics:
    """Told of totals once a second, as `IngressMetrics` is."""

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

    def tell(self, loop: GenerationLoop) -> None:
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
