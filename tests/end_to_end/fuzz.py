"""Holds a running service to its own description: cases that schemathesis makes of it, and odd requests.

    python -m tests.end_to_end.fuzz URL [--cases 2000]

Prints counts by status and what went wrong, and exits with 1 if anything did: an answer that the description does not
allow, a 5xx that is neither 503 nor the 504 of a deadline that the case itself asked for, or no answer in time. Takes
about 3 minutes for 2,000 cases. The key of the service, if it needs one, is in OFFRAMP_API_KEY.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from offramp.client.protocol import find_api_key
from tests.end_to_end.odd_requests import ODD, Odd, send_odd

ANSWER_S = 20.0
"""A case without an answer after this hangs."""
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.missing_required_header,
    checks.unsupported_method,
]
ENDLESS = "/dashboard/events"
"""A stream, which ends when its reader does."""
TIMES = {"post": 4}
"""Routes that take bodies get so many times the cases of those that take none."""
MOST_ROUNDS = 50
KEPT = 20
"""Problems that are told in full."""


@dataclass(kw_only=True)
class Findings:
    """What came of a run."""

    statuses: Counter[int] = field(default_factory=Counter)
    """Of the made cases."""
    odd: dict[str, int | None] = field(default_factory=dict)
    """Status by name; None where the connection was closed without an answer."""
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def num_cases(self) -> int:
        return self.statuses.total()


def fuzz(url: str, num_cases: int, *, seed: int = 0, api_key: str | None = None) -> Findings:
    """Send at least so many made cases, and every odd request."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    ending = schema.exclude(path=ENDLESS)
    operations = [result.ok() for result in ending.get_all_operations() if isinstance(result, Ok)]
    share = sum(TIMES.get(operation.method, 1) for operation in operations)
    findings = Findings()
    with requests.Session() as session:
        session.headers.update(headers)
        model = session.get(f"{url}/v2", timeout=ANSWER_S).json()["models"][0]
        for each in range(MOST_ROUNDS):
            left = num_cases - findings.num_cases
            if left <= 0:
                break
            for operation in operations:
                examples = max(1, left * TIMES.get(operation.method, 1) // share // 2)
                for mode in GenerationMode:
                    _try_operation(operation, mode, examples, seed + each, session, findings)
    for odd in ODD:
        _try_odd(url, model, odd, headers, findings)
    return findings


def _try_operation(
    operation: Any, mode: GenerationMode, examples: int, seed: int, session: requests.Session, findings: Findings
) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def send(case: Any) -> None:
        _try_case(case, session, findings)

    try:
        send()
    except hypothesis.errors.Unsatisfiable:  # a route without parameters cannot be asked wrongly
        return


def _try_case(case: Any, session: requests.Session, findings: Findings) -> None:
    began_s = time.monotonic()
    try:
        response = case.call(session=session, timeout=ANSWER_S)
    except requests.exceptions.RequestException as error:
        findings.problems.append(f"{case.method} {case.formatted_path}: no answer: {error!r}")
        return
    findings.slowest_s = max(findings.slowest_s, time.monotonic() - began_s)
    findings.statuses[response.status_code] += 1
    if response.status_code >= 500 and not _is_allowed(response.status_code, case.body):
        findings.problems.append(f"{case.as_curl_command()}: {response.status_code} {response.text[:200]}")
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        findings.problems.extend(f"{case.as_curl_command()}: {each}" for each in failures.exceptions)


def _is_allowed(status: int, body: object) -> bool:
    """503 always; 504 where the case asked for its own deadline."""
    return status == 503 or (status == 504 and ("timeout" in str(body)))


def _try_odd(url: str, model: str, odd: Odd, headers: dict[str, str], findings: Findings) -> None:
    try:
        status = send_odd(url, model, odd, headers, ANSWER_S)
    except TimeoutError:
        findings.problems.append(f"{odd.name}: no answer within {ANSWER_S:g} s")
        return
    findings.odd[odd.name] = status
    if status not in odd.allowed:
        findings.problems.append(f"{odd.name}: {status}; allowed: {sorted(map(str, odd.allowed))}")


def report(findings: Findings) -> Iterator[str]:
    """Lines to print."""
    yield f"{findings.num_cases} cases, the slowest answered in {findings.slowest_s:.2f} s"
    yield "  ".join(f"{status}: {count}" for status, count in sorted(findings.statuses.items()))
    yield "odd requests: " + ", ".join(f"{name} {status or 'closed'}" for name, status in findings.odd.items())
    yield from findings.problems[:KEPT]
    yield f"{len(findings.problems)} problems"


def main() -> None:
    """Parse, try, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="A running service.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    findings = fuzz(options.url, options.cases, seed=options.seed, api_key=find_api_key(None))
    print("\n".join(report(findings)))
    raise SystemExit(1 if findings.problems else 0)


if __name__ == "__main__":
    main()
