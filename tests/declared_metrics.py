"""Prints name, kind and labels of every instrument that a process of a service creates, as JSON.

It is a separate process, because Serve cannot be imported if warnings are errors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

from deployments.controller.controller import export_metrics
from deployments.ingress.core.calls import IngressCounts
from deployments.ingress.core.generation import GenerationCounts
from deployments.ingress_deployment import IngressMetrics
from deployments.replica.replica import StageMetrics
from deployments.versions.traffic import Tally
from earlyexit.engine.device import Answered, MemoryUse
from earlyexit.engine.engine import Batch
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.chain import ModelChain

DESCRIBED: dict[str, Any] = {
    **{"epoch": 0, "stragglers": [], "predicted": {}, "forecast": None},
    **{"phases_s": {"solve": 1.0}, "plan_changes": {"period": 1}},
    "accelerators": {"cpu": {"alive": 1, "latency_ratio": 1.0}},
    "tuning": {"thresholds": {"0": 0.5}, "evidence": None},
    "observed": dict.fromkeys(("rate_per_s", "goodput_per_s", "agreement", "pruned_agreement")) | {"survival": [1.0]},
}


def main() -> list[tuple[str, str, tuple[str, ...]]]:
    """Records all metrics once, because each instrument is created with its first value."""
    ingress, counts = IngressMetrics(ModelChain(names=("model",), lengths=(1,))), IngressCounts(slo_s=math.inf)
    counts.exits[0] = counts.retries["cpu-0"] = ingress.finished["/predict", 200] = 1
    counts.drops["late"] = counts.latencies[0] = counts.assigned[0] = 1
    counts.record_crossings(0, [0.1], words=2, pruned_words=1)
    admission = SimpleNamespace(limit=1.0)
    chain = SimpleNamespace(num_unanswered=1, unanswered_tokens=1, admission=admission)
    chains = SimpleNamespace(oldest_s=lambda _: {}, active=[chain], usable=[chain])
    core: Any = SimpleNamespace(counts=counts, placed=SimpleNamespace(epoch=0), chains=chains, num_waiting=1)
    ingress.export(core, 0.0, {"cpu-0": [0.1]})
    stage, tally = StageMetrics("cpu"), Tally()
    member: Any = SimpleNamespace(queue_s=0.1, compute_s=0.1)
    stage.record([Answered(member=member, answer=Answer(sample_id="", value=0, score=1.0, exit=0))])
    split = Split(first=0, end=1, batch=1, tokens=4)
    stage.batch_finished(Batch(split=split, members=(member,), tokens=1, started_s=0.0), 0.1)
    device = SimpleNamespace(memory_use=MemoryUse(), engine=SimpleNamespace(num_waiting=0))
    host: Any = SimpleNamespace(slot="cpu-0", device=device)
    stage.export(host)
    loop: Any = SimpleNamespace(num_running=1, counts=GenerationCounts(ended=Counter(stop=1), exits=Counter({0: 1})))
    ingress.export_sequences(loop)
    export_metrics(ingress, DESCRIBED)
    tally.versions["1"].requests["answered"] += 1
    ingress.export_versions(tally)
    found = [each for metrics in (ingress, stage) for each in metrics.instruments.values()]
    return [(each.info["name"], type(each).__name__.lower(), each.info["tag_keys"]) for each in found]


if __name__ == "__main__":
    print(json.dumps(main()))  # noqa: T201 # the test reads it
