"""The command line: parses, calls, prints. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError, OfframpError
from offramp.cli.doctor_commands import commands as doctor_commands
from offramp.cli.options import (
    ARRIVALS,
    BACKENDS,
    BUILT_IN_PLANS,
    DEVICE_NAMES,
    DTYPES,
    FRONTS,
    ApiKeyFile,
    AsJson,
    Backend,
    Dtype,
    GrpcPort,
    LabelColumn,
    PairColumn,
    Part,
    Seed,
    TextColumn,
    Url,
    above_zero,
    choice,
    completes,
    optional_http_address,
    tracing_options,
)
from offramp.cli.plan_commands import commands as plan_commands
from offramp.cli.predict_commands import commands as predict_commands
from offramp.cli.service_commands import commands as service_commands
from offramp.cli.service_commands import serve_file, serve_until_stopped
from offramp.cli.simulate_commands import commands as simulate_commands
from offramp.cli.train_commands import commands as train_commands
from offramp.cli.version_commands import commands as version_commands
from offramp.client.credentials import find_api_key

if TYPE_CHECKING:
    from deployments.settings import ServeSettings
    from offramp.client.inputs import Input
    from offramp.load.run import LoadConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Early-exit model serving on Ray Serve.",
)


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(help="Model folder, or a service file, which says all but the ports itself.")
    ],
    plan: Annotated[
        str, typer.Option(help="Plan file, or built in: stock, early-exit, serial.", **completes(BUILT_IN_PLANS))
    ] = "serial",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size of a built-in plan; default: 32.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas of a built-in plan; default: 1.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of a built-in plan; default: cpu.", **completes(DEVICE_NAMES))
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    front: Annotated[str, typer.Option(help="haproxy (fast) or proxy (Serve's own).", **completes(FRONTS))] = "haproxy",
    ingress_replicas: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Dtype = "float32",
    backend: Backend = "torch",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU replica.")] = 1,
    max_queued: Annotated[int, typer.Option(min=1, help="Unanswered inputs per ingress before 503.")] = 2000,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request, before 413.")] = 2_000_000,
    timeout_s: Annotated[float, typer.Option(callback=above_zero, help="Timeout of requests that name none.")] = 30.0,
    grpc_port: GrpcPort = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the Prometheus metrics; default: a free one.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(callback=optional_http_address, help="OpenTelemetry collector, for traces.")
    ] = None,
    trace_ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of requests that are traced; default: 0.01.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of API keys, name:key or key per line; default: $OFFRAMP_API_KEYS.")
    ] = None,
    rate_limit: Annotated[
        float | None, typer.Option(callback=above_zero, help="Requests per second that one key, or all, may send.")
    ] = None,
) -> None:
    """Serve a model, or a service file's, on this machine until it is told to stop (Ctrl-C or SIGTERM)."""
    if model.is_file():
        given = _given(context)
        serve_file(model, port=port if "port" in given else None, grpc_port=grpc_port, metrics_port=metrics_port)
        return
    from deployments.serve_control import LocalCluster
    from offramp.service.access import access_settings
    from offramp.service.plans import resolve_plan

    chosen = resolve_plan(plan, model, batch=batch, replicas=replicas, device=device)
    settings = serve_settings(
        model=str(model.resolve()),
        plan=chosen,
        ingress_replicas=ingress_replicas,
        dtype=choice("dtype", dtype, DTYPES),
        backend=choice("backend", backend, BACKENDS),
        threads_per_replica=threads,
        max_queued=max_queued,
        max_body_bytes=max_body_bytes,
        default_timeout_s=timeout_s,
        tracing=tracing_options(otlp_endpoint, trace_ratio),
        access=access_settings(api_keys, rate_limit),
    )
    cluster = LocalCluster(
        port=port,
        host=host,
        front=choice("front", front, FRONTS),
        grpc_port=grpc_port,
        metrics_port=metrics_port,
    )
    serve_until_stopped(settings, cluster)


@app.command()
def bench(
    data: Annotated[Path, typer.Option("--data", help="Labelled rows as for train, or a .txt with one text per line.")],
    url: Url = "http://127.0.0.1:8000",
    requests: Annotated[int | None, typer.Option(min=1, help="Default: 1000, without --seconds.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(callback=above_zero, help="Open loop: requests per second, sent whatever comes back."),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson or constant; or with --seconds all of the load, like trace:FILE,rate=100.",
            **completes(ARRIVALS),
        ),
    ] = "poisson",
    seconds: Annotated[
        float | None, typer.Option(callback=above_zero, help="How long to send an --arrivals that says its rate.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: clients that wait for answers; default: 8, without --rate.")
    ] = None,
    inputs_per_request: Annotated[int, typer.Option(min=1)] = 1,
    slo_ms: Annotated[
        float, typer.Option(callback=above_zero, help="Latency within which an answer counts as goodput.")
    ] = 100.0,
    timeout_s: Annotated[
        float, typer.Option(callback=above_zero, help="For a whole request, retries included.")
    ] = 30.0,
    retries: Annotated[int, typer.Option(min=0)] = 0,
    api_key_file: ApiKeyFile = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    part: Part = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Load a running service and report rate, latency, goodput, exits and errors."""
    from earlyexit.dataset import read_labelled
    from earlyexit.text_tables import read_texts
    from offramp.client.inputs import inputs_of
    from offramp.load.run import LoadConfig

    if rate is not None and concurrency is not None:
        raise InputError("--rate (open loop) and --concurrency (closed loop) exclude each other: give one of them")
    timed = ":" in arrivals or seconds is not None
    if timed and (rate, concurrency, requests) != (None, None, None):
        raise InputError("--arrivals poisson:100 --seconds 60 is a whole load: no --rate, --concurrency or --requests")
    send_times_s = _send_times_s(arrivals, seconds, seed) if timed else None
    inputs: Sequence[Input]
    if data.suffix == ".txt":
        inputs, labels = read_texts(data), None
    else:
        labelled = read_labelled(
            data, text_column=text_column, pair_column=pair_column, label_column=label_column, part=part
        )
        inputs, labels = inputs_of(labelled.columns), labelled.labels
    config = LoadConfig(
        url=url,
        inputs=inputs,
        labels=labels,
        num_requests=requests or 1000 if send_times_s is None else len(send_times_s),
        rate_rps=rate,
        arrivals="poisson" if timed else choice("arrivals", arrivals, ARRIVALS),
        send_times_s=send_times_s,
        concurrency=8 if rate is None and concurrency is None and not timed else concurrency,
        inputs_per_request=inputs_per_request,
        timeout_s=timeout_s,
        slo_s=slo_ms / 1000,
        retries=retries,
        seed=seed,
    )
    _run_bench(config, find_api_key(api_key_file), as_json=as_json)


app.add_typer(train_commands)
app.add_typer(doctor_commands)
app.add_typer(predict_commands)
app.add_typer(plan_commands)
app.add_typer(simulate_commands)
app.add_typer(service_commands)
app.add_typer(version_commands)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what went wrong is one line on stderr, exit status 2 for bad input and 1 for the rest."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(arguments)
    except OfframpError as error:
        print(f"offramp: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def _given(context: typer.Context) -> set[str]:
    """Options of `serve` that were given with a service file; raises InputError for those that it says itself."""
    given = {
        name
        for name in context.params
        if name != "model" and str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    }
    refused = sorted(f"--{name.replace('_', '-')}" for name in given - {"port", "grpc_port", "metrics_port"})
    if refused:
        raise InputError(
            f"{' and '.join(refused)}: the service file says it; only --port, --grpc-port, --metrics-port go with one"
        )
    return given


def serve_settings(**values: Any) -> ServeSettings:
    """Checked settings; raises InputError that names the field."""
    from pydantic import ValidationError

    from deployments.settings import ServeSettings

    try:
        return ServeSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']}") from error


def _send_times_s(arrivals: str, seconds: float | None, seed: int) -> list[float]:
    """What `--arrivals` and `--seconds` ask for; raises InputError where one of them is missing."""
    import numpy as np

    from offramp.load.arrivals import parse_arrivals

    if seconds is None or ":" not in arrivals:
        raise InputError("--seconds and an --arrivals that says its rate, like poisson:100, need each other")
    found = parse_arrivals(arrivals)
    for note in found.notes:
        print(note, file=sys.stderr)
    times_s = [float(time_s) for time_s in found.draw(seconds, np.random.default_rng(seed))]
    if not times_s:
        raise InputError(f"--arrivals {arrivals}: no request arrives in {seconds:g} s")
    return times_s


def _run_bench(config: LoadConfig, api_key: str | None, *, as_json: bool) -> None:
    import asyncio

    from rich.console import Console

    from offramp.load.report import render
    from offramp.load.run import run_load

    with _progress() as progress:
        report = asyncio.run(run_load(config, partial(progress, "requests"), api_key=api_key))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(render(report))
    if report.num_answers == 0:
        raise OfframpError(f"none of {report.num_requests} requests was answered by {config.url}")


def _progress() -> Any:
    from offramp.jobs.progress import progress_bars

    return progress_bars()
