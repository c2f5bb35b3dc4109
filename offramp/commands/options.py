"""Options that several commands share, and options of the commands that plan, simulate, and use or manage services.

Modules with options import neither torch nor numpy, because shell completion imports them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Json, ValidationError
from pydantic_core import PydanticCustomError

from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError, PlanError, raising
from optimizer import Strategy

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows


Model = TypeVar("Model", bound=BaseModel)


def _check_url(url: str) -> str:
    with suppress(ValueError):  # such as an incomplete IPv6 address, or a port that is not a number
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    raise PydanticCustomError("address", "an address like http://127.0.0.1:8000 is needed")


def check_output_file(path: Path, option: str) -> Path:
    """Returns the path; raises InputError if the file cannot be written or its folder does not exist."""
    with raising(InputError, f"--{option} {path}", OSError):  # such as a name that is too long
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"--{option} {path}: it must be a file in an existing folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"--{option} {path}: no permission to write the file")
    return path


Address = Annotated[str, AfterValidator(_check_url)]
OutFile = Annotated[Path, AfterValidator(lambda path, info: check_output_file(path, info.field_name))]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, description="Seed of all random numbers.")]
Split = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
"""Splits the value of an option that takes several numbers, separated by commas."""
Ascending = AfterValidator(lambda numbers: tuple(sorted(set(numbers))))
Integers = Annotated[tuple[int, ...], Split, Ascending]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), Split, Ascending]
Numbers = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Split]
InSeconds = AfterValidator(lambda milliseconds: tuple(each / 1000 for each in milliseconds))


def validated(
    model: type[Model], given: Mapping[str, Any], option_at: Callable[..., str] = lambda first, *_: str(first)
) -> Model:
    """Returns an instance of a model; raises InputError that names the option of the first invalid value.

    `option_at`: returns the option of the field at a path. By default the first field of the path has its name.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors()
    option, message, value = f"--{option_at(*first['loc']).replace('_', '-')}", first["msg"], first["input"]
    if first["type"] == "literal_error":
        allowed = ", ".join(re.findall("'(.*?)'", first["ctx"]["expected"]))
        raise InputError(f"{option} {value!r}; allowed: {allowed}")
    shown = "" if isinstance(value, tuple | list) else f" {value!r}"  # such messages name the wrong item themselves
    raise InputError(f"{option}{shown}: {message[0].lower()}{message[1:]}")


class Job(BaseModel):
    """Base of the options of a command: each field is an option, unless it is declared with `exclude`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)

    def model_post_init(self, _: Any) -> None:
        """Checks the options together; raises InputError for an output that is another path of the command."""
        paths = {name: os.path.realpath(value) for name, value in self if isinstance(value, Path)}
        for out, other in product(("plot", "out", "jsonl"), paths):  # what commands write
            if other != out and paths[other] == paths.get(out):
                raise InputError(f"--{out} {getattr(self, out)} would overwrite {other.upper()}; choose another path")
        self.check()

    def check(self) -> None:
        """Raises InputError for options that contradict each other or do not fit together."""


class JsonOption(Job):
    """The option `--json`."""

    as_json: bool = Field(default=False, alias="json")
    """Print JSON instead of tables."""


class ApiKeyOption(Job):
    """The option `--api-key-file`. There is none for the key itself, because other users can see command lines."""

    api_key_file: Path | None = None
    """File that holds the service's API key. None: $OFFRAMP_API_KEY."""

    @property
    def api_key(self) -> str | None:
        """The API key, or None; raises InputError for an unusable file."""
        if self.api_key_file is None:
            return os.environ.get("OFFRAMP_API_KEY") or None
        from deployments.keys import read_secret

        return read_secret(self.api_key_file).strip()


class ServerOptions(ApiKeyOption):
    """The address of a service, and its API key."""

    url: Address = "http://127.0.0.1:8000"
    """Address of the running service."""


class RowOptions(Job):
    """How a data file is read."""

    text_column: str = "text"
    """Column that holds the text."""
    pair_column: str | None = None
    """Column that holds the second text, if rows are pairs of texts."""
    part: str | None = Field(default=None, examples=["train", "val", "test"])
    """Part of the data to read: a list of a CLINC150 file, or a folder above those of the labels (train, val, test).
    None: all images, or the list train."""

    def read(self, path: Path, **options: Any) -> LabelledRows:
        """Returns the rows of a file; `options` override fields. Raises DataError or InputError."""
        from earlyexit.data.rows import read_labelled

        return read_labelled(path, **self.model_dump(include=set(LabelledRowOptions.model_fields)) | options)


class LabelledRowOptions(RowOptions):
    """How a data file with labels is read."""

    label_column: str = "label"
    """Column that holds the label."""
    joints: Path | None = None
    """For poses: table of the joints (.csv) with the columns image (path in the data), joint, x, y, visible."""
    classes: Path | None = None
    """For segmentation (a folder or .zip with image/ and label/): table of the classes (.csv) with columns id, name."""


class BenchJob(JsonOption, ServerOptions, LabelledRowOptions):
    """Send a load of predictions to a running service, and report rate, latency, goodput, exits and errors.

    Generation is not measured.
    """

    data: Path
    """Inputs to send: rows as for `offramp train`, with or without labels, or a .txt file with one text per line."""
    requests: int | None = Field(default=None, ge=1)
    """Number of requests. None: 1000, unless --seconds is given."""
    rate: float | None = Field(default=None, gt=0, le=1e12, allow_inf_nan=False)
    """Open loop: requests per second, at random times, without waiting. None: 50 for the first probe of --sustained."""
    arrivals: str | None = Field(default=None, examples=["uniform:100"])
    """Open loop with another arrival process, during --seconds, such as uniform:100 or trace:FILE,rate=100. None:
    poisson at --rate."""
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Duration of an open loop, instead of --requests, or of each probe of --sustained. None: 10 for probes."""
    concurrency: int | None = Field(default=None, ge=1)
    """Closed loop: number of clients, which wait for each answer. None: 8, without an open loop."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs per request."""
    slo_ms: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Largest latency of an answer that counts as goodput."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Timeout of a request in seconds, retries included."""
    sustained: bool = False
    """Search for the highest Poisson rate with p99 within --slo-ms and at most 1 % of the requests failed, starting at
    --rate, in probes of --seconds."""
    retries: int = Field(default=0, ge=0)
    """How often a failed request is sent again."""
    seed: Seed = 0

    def check(self) -> None:
        if self.sustained and (self.requests, self.concurrency, self.arrivals) != (None, None, None):
            raise InputError("--sustained chooses its own loads: leave out --requests, --concurrency and --arrivals")
        if self.sustained:
            return
        if [self.rate, self.arrivals, self.concurrency].count(None) < 2:
            raise InputError(
                "--rate and --arrivals (open loops) and --concurrency (closed loop) exclude each other: give one"
            )
        is_open, ends = self.concurrency is None and (self.rate or self.arrivals), (self.requests, self.seconds)
        if (self.seconds is not None and (not is_open or None not in ends)) or (self.arrivals and self.seconds is None):
            raise InputError("--seconds is the duration of --arrivals, or of --rate instead of --requests")


class PredictJob(JsonOption, ServerOptions, RowOptions):
    """Send inputs to a running service, and print the answers. The exit status is 1 if an input failed."""

    texts: tuple[str, ...] = Field(default=(), json_schema_extra={"argument": "TEXTS"})
    """Inputs: texts, paths of images, the two texts of a pair, or - to read one text per line from standard input."""
    data: Path | None = None
    """File with inputs, instead of arguments: texts or pairs (.csv, .tsv, .jsonl, .txt, CLINC150's .json), images
    (folder or .zip), arrays (.npy, .npz)."""
    out: OutFile | None = None
    """With --data or -: file to write, .jsonl or .csv. None: standard output."""
    form: Literal["jsonl", "csv"] | None = Field(default=None, alias="format")
    """Output format: jsonl or csv. None: by the ending of --out, else jsonl."""
    maps: Path | None = None
    """Folder for class maps, one PNG file per image. None: none are written."""
    batch: int = Field(default=32, ge=1)
    """With --data or -: inputs per request."""
    concurrency: int = Field(default=8, ge=1)
    """With --data or -: number of concurrent requests."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Timeout of a request in seconds and, with --data or -, of waiting for a busy service that answers nothing."""
    truncate: bool = False
    """Truncate texts that are longer than the model allows."""

    def check(self) -> None:
        if self.as_json and self.form == "csv":
            raise InputError("--json and --format csv exclude each other: give one of them")


class GenerateJob(ServerOptions):
    """Send a prompt to a running service whose model generates, and print the answer as it arrives."""

    prompt: str = Field(json_schema_extra={"argument": "PROMPT"})
    """Prompt to answer, or with --raw a text to continue."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens of the answer."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature, where 0 always takes the most probable token."""
    top_p: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Sample from the most probable tokens whose probabilities add up to this sum."""
    seed: Seed = 0
    stop: tuple[str, ...] = ()
    """Text that ends the answer (may be repeated)."""
    exits: bool = False
    """Colour each token by the block after which it left, and print a table at the end."""
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Timeout in seconds until the first text, and between two pieces of text."""


class ForecastJob(JsonOption):
    """Forecast the next window's survival at every block, with intervals."""

    series: Path = Field(json_schema_extra={"argument": "SERIES"})
    """CSV file with past windows, oldest first: columns inputs, 0, 1 and so on (survival by block)."""
    coverage: float = 0.8
    """Probability that a forecast value lies in its interval."""
    window_s: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Length of a window in seconds, which adds a forecast of the rate. None: no forecast of the rate."""


class DoctorJob(JsonOption):
    """Check this machine: libraries, cores, GPUs, memory, ports, leftovers of Ray.

    It starts and changes nothing. The exit status is 1 if a check failed.
    """

    targets: tuple[Path, ...] = Field(default=(), json_schema_extra={"argument": "MODEL_OR_SERVICE"})
    """Model folders, checkpoints of transformers and service files to check too."""
    port: list[Annotated[int, Field(ge=1, le=65535)]] | None = None
    """Port that must be free for a service (may be repeated). None: 8000."""


class DemoJob(Job):
    """Train a model, and compare three plans on this machine and on emulated accelerators (takes minutes)."""

    data: Path | None = None
    """Your own labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json. None: generated texts."""
    keep: bool = False
    """Serve the trained model until Ctrl-C, without the comparison."""
    out: Path | None = None
    """Folder for model, picture and figures. None: runs/demo."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the service."""


def _parse_order(value: Any) -> Any:
    """Returns the order that a text names; raises InputError."""
    with raising(InputError, "--order", PlanError):
        return OrderSpec.parse(value) if isinstance(value, str) else value


Order = Annotated[
    OrderSpec | None,
    BeforeValidator(_parse_order),
    Field(
        examples=["arrival", "deadline", "shortest", "das"],
        description="Order of queued inputs: arrival, deadline, shortest, or das (das:0.3 sets its eta). "
        "None: the plan's order, else deadline.",
    ),
]


class ProblemOption(Job):
    """The argument PROBLEM."""

    problem: Path = Field(json_schema_extra={"argument": "PROBLEM"})
    """Problem file (YAML or JSON)."""


class SearchOptions(JsonOption, ProblemOption):
    """Options of commands that search for plans."""

    time_limit_s: float | None = Field(default=None, gt=0)
    """Seconds after which a strategy's search ends with its best plan so far. None: no limit."""


class PlanJob(SearchOptions):
    """Find the best plan for a problem file: splits, batch sizes, active ramps, accelerators and replicas.

    The exit status is 3 if no plan meets the problem. The output then names the binding limit, and limits with a plan.
    """

    objective: Json[dict[str, Any]] | None = None
    """Objective as JSON, such as {"minimize": "cost", "rate_per_s": 2000}. None: the problem file's."""
    order: Order = None
    strategy: Strategy = "best"
    """Search space of the planner: best, or one of its parts: stock, early-exit, e3, serial, apparate, pame."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use."""
    plot: OutFile | None = None
    """File for a picture of the plan: .svg, .png or .pdf."""
    out: OutFile | None = None
    """Plan file to write, for `offramp serve --plan`."""
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """With --out: threshold of every active ramp, an entropy in nats."""
    compared: bool = Field(default=True, alias="compare")
    """Plan with the other strategies too, for comparison."""

    def check(self) -> None:
        for name in ("threshold", "order"):
            if getattr(self, name) is not None and self.out is None:
                raise InputError(f"--{name} goes with --out: it is written into the plan file")


class FleetJob(JsonOption):
    """Divide the accelerators of a cluster among several models, and plan each of them.

    Each model gets the same multiple of its rate, which is maximized, or its rate at the least cost. The exit status is
    3 if not all can be served.
    """

    fleet: Path = Field(json_schema_extra={"argument": "FLEET"})
    """Fleet file (YAML or JSON): `devices`, `objective`, and `models` with a `problem` file and a `rate_per_s` each."""
    out: Path | None = None
    """Folder for a plan file of each model, for `offramp serve --plan`."""
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """With --out: threshold of every active ramp, an entropy in nats."""
    time_limit_s: float = Field(default=10.0, gt=0)
    """Seconds after which no better division is sought."""

    def check(self) -> None:
        if self.threshold is not None and self.out is None:
            raise InputError("--threshold goes with --out: it is written into the plan files")


class WhatIfJob(SearchOptions):
    """Solve a problem for several values of one quantity; give exactly one of the options."""

    slo_s: Annotated[Numbers, InSeconds] | None = Field(default=None, alias="slo_ms")
    """Latency limits in ms, such as 25,50,100."""
    batch_limit: Integers | None = None
    """Largest batch sizes, such as 1,2,4,8."""
    usd_per_hour: Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Split] | None = Field(
        default=None, alias="budget"
    )
    """Budgets in USD per hour, such as 10,20."""
    count: str | None = None
    """Counts of one accelerator type, such as V100=4,8,16."""
    rate_per_s: Numbers | None = Field(default=None, alias="rate")
    """Rates per second, such as 1000,2000, with minimal cost as the objective if the problem names no rate."""


class SimulateJob(JsonOption, ProblemOption):
    """Simulate a plan under load, and report goodput, latency, drops, batch fill, utilisation and cost.

    The exit status is 3 if no plan meets the problem, and 130 after an interrupt, which prints the results so far.
    """

    order: Order = None
    arrivals: str
    """Arrival process: poisson:9000, uniform:9000, gamma:9000,cv=2, mmpp:1000,peak=5000,..., trace:FILE, counts:FILE or
    times:FILE."""
    plan: Path | None = None
    """Plan file, or the output of `offramp plan --json`. None: the planner's plan."""
    strategy: Strategy | None = None
    """Search space of the planner: best, stock, early-exit, e3, serial, apparate, pame. None: best."""
    duration_s: float = Field(default=60.0, alias="duration", gt=0, allow_inf_nan=False)
    """Seconds during which requests arrive."""
    warm_up_s: float = Field(default=1.0, alias="warm_up")
    """Seconds at the start that are not counted."""
    records: Path | None = None
    """Exit records (.npz, .csv, .tsv). None: inputs leave at random, according to the problem's survival."""
    thresholds: str | None = None
    """With records: one threshold, one per ramp such as 0=0.4,3=0.2, or a calibration.json. None: the plan's policy."""
    lengths: str | None = None
    """Lengths of inputs in tokens: a file (one number per line, or exit records), or a normal distribution as
    mean,variance,low,high. None: the problem's."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs per request."""
    num_ingresses: int = Field(default=1, ge=1, le=1000, alias="ingresses")
    """Replicas of the ingress."""
    overlap_below: int | None = Field(default=None, ge=1)
    """Start a device's second batch while the running one has fewer inputs than this. None: the plan's value."""
    admission: bool = True
    """Refuse inputs on arrival that would be late."""
    seed: Seed = 0

    def check(self) -> None:
        if self.plan is not None and self.strategy is not None:
            raise InputError("--plan and --strategy exclude each other: a file's plan is not the planner's")
        if not 0 <= self.warm_up_s < self.duration_s:
            raise InputError(
                f"--warm-up {self.warm_up_s:g}: it must be at least 0 and below --duration, {self.duration_s:g} s"
            )


def _check_absolute(at: str) -> str:
    if not PurePosixPath(at).is_absolute():
        raise InputError(f"--at {at}: an absolute path on the nodes is needed")
    return at


class ServiceFileOptions(Job):
    """A service file, and the folder of its files on the nodes."""

    service: Path = Field(json_schema_extra={"argument": "SERVICE"})
    """Service file (YAML or JSON)."""
    at: Annotated[str, AfterValidator(_check_absolute)] | None = None
    """Folder in which all nodes have model/, exit records and state. None: the same paths as on this machine."""


class ClusterOption(Job):
    """The address of a Ray cluster."""

    address: Address = "http://127.0.0.1:8265"
    """Address of Ray's dashboard."""


class WaitOption(Job):
    """The time limit of a command that waits until its work is done."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Maximum time to wait in seconds."""


class RenderJob(ServiceFileOptions):
    """Turn a service file into a Serve config for `serve deploy`, a KubeRay manifest, or settings."""

    kuberay: bool = False
    """Write a RayService manifest instead of a Serve config."""
    image: str = "offramp"
    """With --kuberay: image that contains Ray and this repository."""
    claim: str = "offramp"
    """With --kuberay: volume claim that all pods mount."""
    redis: str | None = None
    """With --kuberay: host:port of a Redis, so that the service survives the loss of Ray's head."""
    redis_secret: str | None = None
    """With --redis: Kubernetes secret that holds its `password`."""
    settings: bool = False
    """Write only the settings, as a folder of the version repository holds them."""
    out: OutFile | None = None
    """File to write. None: standard output."""

    def check(self) -> None:
        if self.kuberay and self.settings:
            raise InputError("--kuberay and --settings exclude each other: give one of them")
        of_manifests = {"image", "claim", "redis"} & self.model_fields_set
        if (of_manifests and not self.kuberay) or (self.redis_secret is not None and self.redis is None):
            raise InputError("--image, --claim and --redis go with --kuberay, and --redis-secret with --redis")


class DeployJob(WaitOption, ClusterOption, ServiceFileOptions):
    """Deploy a service to a running Ray cluster, next to its other applications, and wait until it runs."""


class StatusJob(JsonOption, ApiKeyOption, ClusterOption):
    """Show a Ray cluster's applications, deployments and replicas, and the service's current plan."""

    url: Address | None = None
    """Address of the service, to read its plan. None: Serve's port on the dashboard's machine."""


class DeleteJob(WaitOption, ClusterOption):
    """Delete one application from a Ray cluster, and keep the others."""

    name: str = Field(json_schema_extra={"argument": "NAME"})
    """Name of the application."""


class VersionsJob(JsonOption, ServerOptions):
    """List the models and versions of a cluster, with their states."""


class CanaryJob(JsonOption, ServerOptions):
    """Route a share of the requests to a version, or compare the default version with the canary."""

    version: str | None = None
    """Version to try, with --share or --compare. None: only report the current canary."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that this version answers."""
    compare: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that both versions answer, for comparison."""
    end: bool = False
    """Route all requests to the default version again."""

    def check(self) -> None:
        if self.end and self.version is not None:
            raise InputError("--end ends the canary, --version starts one: give one of them")
        if (self.version is None) == bool(self.share or self.compare):
            raise InputError("--version and a --share or --compare above 0 go together; --end ends a canary")


class VersionOptions(ServerOptions):
    """The option `--version`, and the service."""

    version: str
    """Name of the version."""


class PromoteJob(JsonOption, VersionOptions):
    """Make a version the default, which answers all requests that name no version."""


class LoadJob(WaitOption, ServerOptions, ServiceFileOptions):
    """Start the version of a service file next to the others, and wait until it is ready."""


class UnloadJob(WaitOption, VersionOptions):
    """Stop a version that receives no requests, and wait until it is gone."""

    model: str = Field(json_schema_extra={"argument": "MODEL"})
    """Name of the model."""
