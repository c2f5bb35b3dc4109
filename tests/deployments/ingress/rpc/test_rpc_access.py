from __future__ import annotations

import grpc
import pytest

from deployments.access import AccessSettings
from deployments.ingress.access.gate import OPEN_PATHS, Gate
from deployments.ingress.access.key_ring import KeyRing
from deployments.ingress.access.rates import Limit, RateLimits
from deployments.ingress.rpc.calls import Rpcs
from deployments.ingress.rpc.server import RPCS, SERVICE
from earlyexit.clock import ManualClock
from tests.deployments.ingress.rpc.test_rpc_calls import FakeBackend, FakeContext, infer_bytes

KEY = "alice-0123456789"


def gate(limit: Limit | None = None) -> Gate:
    return Gate(
        ring=KeyRing(AccessSettings(keys_env="KEYS"), {"KEYS": f"alice:{KEY}"}),
        limits=None if limit is None else RateLimits(limit, "inputs"),
        clock=ManualClock(),
        counts_inputs=True,
    )


def context(key: str | None) -> FakeContext:
    return FakeContext(metadata=[] if key is None else [("authorization", f"Bearer {key}")])


@pytest.mark.parametrize("name", RPCS)
async def test_every_rpc_but_health_is_behind_the_keys(name: str) -> None:
    without = context(None)
    await Rpcs(FakeBackend(), gate()).call(name, b"", without)
    refused = without.code is grpc.StatusCode.UNAUTHENTICATED
    assert refused == (f"/{SERVICE}/{name}" not in OPEN_PATHS)
    behind = context(KEY)
    await Rpcs(FakeBackend(), gate()).call(name, b"", behind)
    assert behind.code is not grpc.StatusCode.UNAUTHENTICATED


async def test_inputs_beyond_the_rate_are_refused_with_the_time_to_wait() -> None:
    rpcs = Rpcs(FakeBackend(), gate(Limit(rate_per_s=1.0, burst=2.0)))
    first, second = context(KEY), context(KEY)
    await rpcs.call("ModelInfer", infer_bytes("pay", "bill"), first)
    await rpcs.call("ModelInfer", infer_bytes("pay"), second)
    assert (first.code, second.code) == (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert ("retry-after", "1") in second.trailing
