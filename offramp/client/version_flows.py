"""What clients do with versions, written once for both: the repository index, loading, and the canary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

from earlyexit.errors import DeadlineError, OfframpError
from offramp.client.flows import Flow, Flows, question
from offramp.client.protocol import Reply

INDEX_PATH = "/v2/repository/index"
POLL_S = 0.5
"""Below the seconds that a version takes to start or to end."""
Row: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFlows:
    """Every call about versions, without the sending."""

    flows: Flows

    def index(self, *, after_s: float = 0.0) -> Flow[list[Row]]:
        rows = yield from self.flows.order("POST", INDEX_PATH, {}, after_s=after_s)
        return list(rows)

    def canary(self) -> Flow[dict[str, Any]]:
        return (yield from self._of_model("GET", "canary"))

    def set_canary(self, version: str, share: float, compare_share: float) -> Flow[dict[str, Any]]:
        body = {"version": version, "share": share, "compare_share": compare_share}
        return (yield from self._of_model("PUT", "canary", body))

    def end_canary(self) -> Flow[dict[str, Any]]:
        return (yield from self._of_model("DELETE", "canary"))

    def promote(self, version: str) -> Flow[dict[str, Any]]:
        return (yield from self._of_model("PUT", "default", {"version": version}))

    def load(self, model: str, version: str, config: str | None, timeout_s: float) -> Flow[None]:
        parameters = {"version": version} if config is None else {"version": version, "config": config}
        yield from self._order(model, "load", parameters)

        def is_ready(row: Row | None) -> bool:
            if row is not None and row["state"] == "UNAVAILABLE":
                raise OfframpError(f"version {version!r} of {model!r} did not start: {row['reason']}")
            return row is not None and row["state"] == "READY"

        until_s = self.flows.clock.now_s() + timeout_s
        yield from self._wait(model, version, is_ready, timeout_s)
        yield from self._wait_under_its_path(model, version, until_s)

    def unload(self, model: str, version: str, timeout_s: float) -> Flow[None]:
        yield from self._order(model, "unload", {"version": version})
        yield from self._wait(model, version, lambda row: row is None or row["state"] == "UNAVAILABLE", timeout_s)

    def _of_model(self, method: str, what: str, body: dict[str, object] | None = None) -> Flow[dict[str, Any]]:
        model = yield from self.flows.served_model()
        found = yield from self.flows.order(method, f"/v2/models/{model}/{what}", body)
        return dict(found)

    def _order(self, model: str, what: str, parameters: dict[str, str]) -> Flow[None]:
        yield from self.flows.order("POST", f"/v2/repository/models/{model}/{what}", {"parameters": parameters})

    def _wait_under_its_path(self, model: str, version: str, until_s: float) -> Flow[None]:
        """Serve may call an application running before its ingress has seen every stage, or a proxy the ingress.

        A version with a route prefix of its own is not found under this path: then the index has to do. Raises
        DeadlineError.
        """
        after_s = 0.0
        while (left_s := until_s - self.flows.clock.now_s() - after_s) > 0:
            outcome = yield question(f"/v2/models/{model}/versions/{version}/ready", after_s=after_s, timeout_s=left_s)
            if isinstance(outcome, Reply) and outcome.status != HTTPStatus.SERVICE_UNAVAILABLE:
                return
            after_s = POLL_S
        raise DeadlineError(f"version {version!r} of {model!r} runs but was not ready in time")

    def _wait(self, model: str, version: str, is_so: Callable[[Row | None], bool], timeout_s: float) -> Flow[None]:
        """Until the index has it so; raises DeadlineError."""
        until_s, after_s = self.flows.clock.now_s() + timeout_s, 0.0
        while True:
            rows = yield from self.index(after_s=after_s)
            after_s = POLL_S
            row = next((each for each in rows if (each["name"], each["version"]) == (model, version)), None)
            if is_so(row):
                return
            if self.flows.clock.now_s() + POLL_S >= until_s:
                state = "not there" if row is None else row["state"]
                raise DeadlineError(f"version {version!r} of {model!r} is {state} after {timeout_s:g} s")
