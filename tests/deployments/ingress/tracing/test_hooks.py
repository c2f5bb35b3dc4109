from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.choices import TracingSettings
from deployments.ops.tracing.start import check_tracing, start_tracing
from deployments.ops.tracing.tracer import traces_url
from deployments.settings import ServeSettings
from earlyexit.clock import ManualClock
from optimizer.plan import stock_plan

ROOT = Path(__file__).parents[4]
UNTRACED = ServeSettings(model="m", plan=stock_plan(1, batch=1))
TRACED = UNTRACED.model_copy(update={"tracing": TracingSettings()})


def test_what_traces_is_there_where_it_is_asked_for() -> None:
    check_tracing(TRACED)
    check_tracing(UNTRACED)
    assert start_tracing(UNTRACED, ManualClock()) is None


def test_tracing_without_its_extra_is_refused_with_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from deployments.ops.tracing.start import check_tracing\n"
        "from deployments.choices import TracingSettings\n"
        "from deployments.settings import ServeSettings\n"
        "from optimizer.plan import stock_plan\n"
        "settings = ServeSettings(model='m', plan=stock_plan(1, batch=1))\n"
        "check_tracing(settings)\n"
        "check_tracing(settings.model_copy(update={'tracing': TracingSettings()}))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert "InputError: tracing needs OpenTelemetry's exporter over OTLP/HTTP" in said.stderr
    assert "pip install '.[tracing]'" in said.stderr


def test_settings_that_cannot_be_are_refused() -> None:
    wrong = [("endpoint", "collector:4318"), ("endpoint", "http://"), ("ratio", 1.1), ("headers", {})]
    for field, value in wrong:
        with pytest.raises(ValidationError, match=field):
            TracingSettings.model_validate({field: value})


def test_spans_go_to_the_path_that_an_endpoint_names_or_the_usual_one() -> None:
    assert traces_url(None) is None  # the SDK's own
    for endpoint in ("http://collector:4318", "http://collector:4318/"):
        assert traces_url(endpoint) == "http://collector:4318/v1/traces"
    assert traces_url("https://host/otlp/traces") == "https://host/otlp/traces"
