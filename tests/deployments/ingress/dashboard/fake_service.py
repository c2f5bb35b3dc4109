"""A fake service behind the real page. Its counts grow with the clock, and its controller returns given reports.

    python -m tests.deployments.ingress.dashboard.fake_service 8000

serves the page of it, to look at and to draw.
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn

from deployments.api.http import build_api
from deployments.api.state import LivePage, StateRoutes
from deployments.ingress.core.calls import bucket_of
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ops.dashboard import ServiceFacts, image_facts
from deployments.settings import ServeSettings
from deployments.wire.controller_link import ControllerLink
from deployments.wire.messages import ChainLoad, IngressReport, ReplicaReport
from earlyexit.clock import MonotonicClock, WallClock
from earlyexit.errors import ControllerUnavailableError
from earlyexit.network.boundary import Split
from earlyexit.network.store import ModelCard
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage, deployment_name
from optimizer.plans.plan_file import placed_document
from tests.deployments.ingress.api.faces import FakeBackend
from tests.deployments.ingress.dashboard.dashboard_scene import ingress, ran, replica
from tests.model_cards import a_card

NUM_BLOCKS = 12
SURVIVAL = (1.0, 0.97, 0.86, 0.71, 0.6, 0.52, 0.44, 0.35, 0.29, 0.25, 0.22, 0.2)
"""Survival by block, from the ramps of the plan."""
STAGES = (
    Stage(
        device="emulated:V100",
        replicas=9,
        splits=(Split(first=0, end=3, batch=8, ramps=(1, 2)), Split(first=3, end=6, batch=8, ramps=(3, 4, 5))),
    ),
    Stage(device="emulated:P100", replicas=4, splits=(Split(first=6, end=12, batch=8, ramps=(6, 7, 8, 9, 10)),)),
)
RATE_PER_S = 300.0
CARD = a_card(name="bert-base", num_blocks=NUM_BLOCKS)


def plan(epoch: int, stages: tuple[Stage, ...] = STAGES) -> PlacedPlan:
    predicted = {"rate_per_s": 320.0, "latency_s": 0.081, "usd_per_hour": 21.0}
    policy = PolicySpec(name="entropy", thresholds=0.1)
    return PlacedPlan(plan=Plan(stages=stages, policy=policy, epoch=epoch, predicted=predicted))


START_S = 30.0


@dataclass
class FakeService(FakeBackend, IngressCore, ControllerLink):
    """The parts of an ingress and a service that the page needs. Its fields may change while the page is open."""

    has_controller: bool = True
    controller_answers: bool = True
    idle: bool = False
    held_s: float | None = None
    """Counts stay constant, as after so many seconds under load."""
    ingresses_answer: bool = True
    suspended: str | None = None
    max_viewers: int = 16
    followed: PlacedPlan = field(default_factory=lambda: plan(4))
    name: str = "a"
    observations: Any = field(default_factory=lambda: SimpleNamespace(agreement=None))
    card: ModelCard = CARD
    length: int = 1
    """Tokens per input."""
    num_looks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock = MonotonicClock()
        self._began_s = self._clock.now_s()
        paced = {"batch": [1], "block_s": [[1.0]], "ramp_s": []}
        emulated = {"emulated:V100": paced | {"time_scale": 2.0}, "emulated:P100": paced | {"time_scale": 1.0}}
        fields = {"model": "none", "plan": plan(4).plan, "slo_s": 0.1, "emulated": emulated}
        settings = ServeSettings.model_validate(fields)
        facts = ServiceFacts(card=self.card, settings=settings, image=image_facts(self.signature.codec))
        self.state = StateRoutes(facts, self, self.ask_all, self if self.has_controller else None, WallClock())
        self.page = LivePage(self.state.event, self._clock, max_viewers=self.max_viewers)

    @property
    def placed(self) -> PlacedPlan:
        return self.followed

    @property
    def seconds(self) -> float:
        """Seconds under load, which started a minute before the test."""
        if self.held_s is not None:
            return self.held_s
        return 0.0 if self.idle else 60.0 + self._clock.now_s() - self._began_s

    @property
    def answered(self) -> int:
        return int(RATE_PER_S * self.seconds)

    async def ask_all(self, deployment: str, method: str) -> list[Any]:
        if deployment == "ingress":
            self.num_looks += 1
            return [self.reported() if self.ingresses_answer else None]
        stages = self.followed.stage_of.items()
        of_type = (slot for slot, stage in stages if deployment_name(stage.device) == deployment)
        return [report for slot in of_type for report in self.replicas(slot)]

    def reported(self) -> IngressReport:
        wave = 1 + 0.3 * math.sin(self.seconds / 4)
        shares = {0.02: 0.5, 0.05: 0.4, 0.098: 0.1}  # the last bucket ends above the SLO
        left = [before - after for before, after in zip(SURVIVAL, (*SURVIVAL[1:], 0.0), strict=True)]
        return ingress(
            answered=self.answered,
            arrived=int(self.answered * 1.02),
            in_slo=int(self.answered * 0.995),
            epoch=self.followed.epoch,
            unanswered=0 if self.idle else int(40 * wave),
            waiting=0 if self.idle else int(6 * wave),
            exits={block: int(self.answered * share) for block, share in enumerate(left) if share > 0},
            drops={} if self.idle else {"admission": int(self.seconds * 3), "deadline": int(self.seconds / 5)},
            assigned={chain: int(self.answered * share) for chain, share in enumerate(self.followed.plan.shares)},
            chains=(ChainLoad(unanswered=20, cost=20, limit=80.0),) * len(self.followed.plan.shares),
            latencies={bucket_of(latency_s): int(self.answered * share) for latency_s, share in shares.items()},
        )

    def replicas(self, slot: str) -> list[ReplicaReport]:
        stage = self.followed.stage_of[slot]
        return [
            replica(
                f"{slot}#{index}abcdefg",
                slot,
                *(
                    ran(split, int(split.batch * 0.85), int(9 * self.seconds), 0.3 * self.seconds, length=self.length)
                    for split in stage.splits
                ),
                waiting=0 if self.idle else index,
                device=stage.device,
                epoch=self.followed.epoch,
                node="0123456789abcdef",
                pid=1000 + index,
            )
            for index in range(stage.replicas)
        ]

    async def ask(self, method: str, *_: object, timeout_s: float = 5.0) -> Any:
        if not self.controller_answers:
            raise ControllerUnavailableError("the controller does not answer", retry_after_s=5.0)
        return self.describe() if method == "describe" else self.history()

    def describe(self) -> dict[str, Any]:
        return {
            "epoch": self.followed.epoch,
            "reason": "period",
            "in_force_since_s": WallClock().now_s() - 75,
            "forecast": {
                "survival": list(SURVIVAL),
                "survival_low": [max(0.0, share - 0.05 * (block > 0)) for block, share in enumerate(SURVIVAL)],
                "survival_high": [min(1.0, share + 0.05) for share in SURVIVAL],
                "how": "ARIMA",
            },
            "observed": {
                "survival": [min(1.0, share * 1.04) for share in SURVIVAL],
                "seconds": 75.0,
                "rate_per_s": 306.0,
                "goodput_per_s": 297.0,
                "agreement": 0.9931,
                "accuracy_budget": 0.01,
                "within_budget": True,
                "inputs_seen": 412,
                "pruned_agreement": None,
                "drops": {"admission": 225, "deadline": 15},
            },
        }

    def history(self) -> list[dict[str, Any]]:
        gained = {"seconds": 120.0, "offered_rps": 290.0, "goodput_rps": 251.0, "dropped": 312}
        now_s = WallClock().now_s()
        words = "taken: 320/s in 81 ms for 281/s in 79 ms, 14 % more; 3 replicas move, worth 20 s of the next 120 s"
        older = PlacedPlan(plan=self.followed.plan)
        rows: list[tuple[str, int, float, str, dict[str, float] | None]] = [
            ("in force", 4, 75.0, words, None),
            ("proposed", 3, 195.0, "turned down: 1 % more is not worth it", None),
        ]
        rows += [("in force", 4, 315.0, "taken: the first plan", gained)]  # of earlier settings
        return [
            {"epoch": epoch, "at_s": now_s - ago_s, "outcome": outcome, "reason": "period", "words": said}
            | {"placed": placed_document(older), "gained": measured}
            for outcome, epoch, ago_s, said, measured in rows
        ]


class _Server(uvicorn.Server):
    """A server that signals when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def served(service: FakeBackend, port: int) -> Iterator[str]:
    """Serves on a port of this machine, in a thread."""
    routes = (service.state, service.page) if isinstance(service, FakeService) else ()
    app = build_api(service, *routes)
    config = uvicorn.Config(app, port=port, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    try:
        assert server.listens.wait(START_S), "the page's server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    with served(FakeService(), int(sys.argv[1])) as url:
        input(f"{url}/dashboard\n")
