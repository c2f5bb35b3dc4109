"""`GET /metrics`: the counts of all ingresses and replicas in Prometheus' text format, read for each request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from deployments.ingress.core.calls import latencies_within
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.network.chain import Chain

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""Characters that the text format escapes in labels."""
Sample = tuple[Mapping[str, str], float]
"""The labels and the value of a metric."""
METRICS = {
    "offramp_inputs_total": "Inputs of well-formed requests that arrived, including refused ones",
    "offramp_answered_total": "Inputs that were answered; for models that generate, steps",
    "offramp_answers_in_slo_total": "Answers inside the SLO; all answers without an SLO",
    "offramp_answers_total": "Answers under the present plan, by the block they left after",
    "offramp_drops_total": "Inputs without an answer, by reason",
    "offramp_latency_seconds_bucket_total": "Answers by latency, at most `le` seconds",
    "offramp_answered_tokens_total": "Tokens of answered inputs",
    "offramp_waiting": "Inputs that were not sent to any stage yet",
    "offramp_unanswered": "Inputs that wait or are in flight",
    "offramp_unanswered_tokens": "Tokens of inputs that wait or are in flight",
    "offramp_ingress_plan_epoch": "The epoch of the plan that the ingress follows",
    "offramp_stage_waiting": "Inputs queued in a stage's replica",
    "offramp_batches_total": "Batches that a replica ran, by the split's first block; without probes",
    "offramp_batch_inputs_total": "Inputs of these batches",
    "offramp_batch_tokens_total": "Tokens of these batches",
    "offramp_busy_seconds_total": "Device time of these batches, in seconds",
}
"""Help texts by metric name. Names that end in `_total` are counters, all others are gauges."""


def metrics_text(ingresses: Iterable[IngressReport], replicas: Iterable[ReplicaReport], chain: Chain) -> str:
    """Returns the counts of all ingresses and replicas of a service, each with its own labels."""
    by_name: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for name, sample in (*_of_ingresses(ingresses, chain), *_of_replicas(replicas)):
        by_name[name].append(sample)
    return "".join(_lines(name, samples) for name, samples in by_name.items() if samples)


def _of_ingresses(reports: Iterable[IngressReport], chain: Chain) -> Iterator[tuple[str, Sample]]:
    for report in reports:
        own = {"ingress": report.name}
        yield "offramp_inputs_total", (own, report.arrived)
        yield "offramp_answered_total", (own, report.answered)
        yield "offramp_answers_in_slo_total", (own, report.in_slo)
        for block, count in sorted(report.exits.items()):
            yield "offramp_answers_total", (own | {"exit": str(block), "network": chain.name_of(block)}, count)
        for reason, count in sorted(report.drops.items()):
            yield "offramp_drops_total", (own | {"reason": reason}, count)
        for le, count in latencies_within(report.latencies).items():
            yield "offramp_latency_seconds_bucket_total", (own | {"le": le}, count)
        yield "offramp_answered_tokens_total", (own, report.answered_tokens)
        yield "offramp_waiting", (own, report.waiting)
        yield "offramp_unanswered", (own, report.unanswered)
        yield "offramp_unanswered_tokens", (own, report.unanswered_tokens)
        yield "offramp_ingress_plan_epoch", (own, report.epoch)


def _of_replicas(reports: Iterable[ReplicaReport]) -> Iterator[tuple[str, Sample]]:
    for report in reports:
        own = {"slot": report.slot, "replica": report.replica, "device": report.device}
        yield "offramp_stage_waiting", (own, report.waiting)
        for block in sorted({each.first for each in report.times}):
            times, split = [each for each in report.times if each.first == block], own | {"split": str(block)}
            yield "offramp_batches_total", (split, sum(each.batches for each in times))
            yield "offramp_batch_inputs_total", (split, sum(each.batches * each.size for each in times))
            yield "offramp_batch_tokens_total", (split, sum(each.tokens for each in times))
            yield "offramp_busy_seconds_total", (split, sum(each.seconds for each in times))


def _lines(name: str, samples: Sequence[Sample]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {METRICS[name]}\n# TYPE {name} {kind}\n"]
    for labels, value in samples:
        label_text = ",".join(f'{label}="{text.translate(ESCAPED)}"' for label, text in labels.items())
        lines.append(f"{name}{{{label_text}}} {value:.15g}\n")
    return "".join(lines)
