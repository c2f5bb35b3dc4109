"""Decisions and messages in random logs equal recorded ones, so that a refactoring changes none unnoticed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from earlyexit.errors import OfframpError
from tests.deployments.ingress.core.core_world import CoreWorld, plan

KINDS = ["submit"] * 4 + ["answer"] * 5 + ["go on", "lose", "fail", "give up", "plan"]


class RandomLog:
    """Random requests, answers, losses and plan changes."""

    def __init__(self, seed: int) -> None:
        self.scene = CoreWorld(plan(replicas=2), max_queued=40, slo_s=2.0)
        self._rng = random.Random(seed)
        self._epoch = 1
        self._serial = 0

    def run(self) -> list[str]:
        for _ in range(120):
            self.scene.until(self.scene.now_s + self._rng.random() / 10)
            what = self._rng.choice(KINDS)
            if what == "submit":
                self._submit()
            elif what == "plan":
                self._follow()
            else:
                self._reply(what)
        return self.scene.log

    def _submit(self) -> None:
        scene, number = self.scene, self._rng.randint(1, 6)
        letters = "".join(chr(0x4E00 + self._serial + k) for k in range(number))
        self._serial += number
        try:
            scene.core.check_admission(number, scene.now_s + 2.0, scene.now_s)
            scene.submit(letters, deadline_s=scene.now_s + 2.0)
        except OfframpError as refusal:
            scene.log.append(f"{scene.now_s:g} refused {letters}: {refusal}")

    def _follow(self) -> None:
        self._epoch += 1
        cut, replicas, rate_per_s = self._rng.randint(1, 3), self._rng.randint(1, 3), self._rng.randint(5, 30)
        self.scene.follow(plan(epoch=self._epoch, cut=cut, replicas=replicas, predicted={"rate_per_s": rate_per_s}))

    def _reply(self, what: str) -> None:
        scene = self.scene
        of_calls = [at for at, call in enumerate(scene.calls) if call.num_remaining]
        if not of_calls:
            return
        at = self._rng.choice(of_calls)
        inside = "".join(flight.key for flight in scene.calls[at].remaining())
        some = inside[: self._rng.randint(1, len(inside))]
        replies: dict[str, Callable[[], None]] = {
            "answer": lambda: scene.answer(at, some),
            "go on": lambda: scene.go_on(at, some, block=3),
            "lose": lambda: scene.lose(at, some),
            "fail": lambda: scene.fail(at),
            "give up": lambda: scene.give_up(some),
        }
        replies[what]()


def test_decisions_and_messages_equal_the_recorded_ones() -> None:
    log = "\n".join(words for seed in range(50) for words in RandomLog(seed).run())
    assert hashlib.sha256(log.encode()).hexdigest()[:16] == "655577f7f9f20678"
