"""Checks a running service against its own OpenAPI description, with cases that schemathesis generates.

A problem is an answer that the description does not allow, a 5xx other than 503 and than 504 for the case's own
deadline, or no answer in time.
"""

from __future__ import annotations

from collections import Counter
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

ANSWER_S = 20.0
"""A case without an answer after this time hangs."""
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
"""A stream that ends only when its reader does."""
TIMES = {"post": 4}
"""Factor on the number of cases, for routes with bodies."""
MOST_ROUNDS = 50


@dataclass(kw_only=True)
class Findings:
    """The result of a run."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return self.statuses.total()


def fuzz(url: str, num_cases: int) -> Findings:
    """Sends at least this number of cases."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]  # a body may also be too large
    ending = schema.exclude(path=ENDLESS)
    operations = [result.ok() for result in ending.get_all_operations() if isinstance(result, Ok)]
    share = sum(TIMES.get(operation.method, 1) for operation in operations)
    findings = Findings()
    with requests.Session() as session:
        for each in range(MOST_ROUNDS):
            left = num_cases - findings.num_cases
            if left <= 0:
                break
            for operation in operations:
                examples = max(1, left * TIMES.get(operation.method, 1) // share // 2)
                for mode in GenerationMode:
                    _try_operation(operation, mode, examples, each, session, findings)
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
    except hypothesis.errors.Unsatisfiable:  # a route without parameters has no invalid cases
        return


def _try_case(case: Any, session: requests.Session, findings: Findings) -> None:
    try:
        response = case.call(session=session, timeout=ANSWER_S)
    except requests.exceptions.RequestException as error:
        findings.problems.append(f"{case.method} {case.formatted_path}: no answer: {error!r}")
        return
    findings.statuses[response.status_code] += 1
    may_be_late = "timeout" in str(case.body)  # the case may have set its own deadline
    if response.status_code >= 500 and response.status_code not in ({503, 504} if may_be_late else {503}):
        findings.problems.append(f"{case.as_curl_command()}: {response.status_code} {response.text[:200]}")
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        findings.problems.extend(f"{case.as_curl_command()}: {each}" for each in failures.exceptions)
