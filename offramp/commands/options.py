"""The options that several commands share, and those of the commands that plan, simulate, ask and look after services.

Like all models of options they load neither torch nor numpy, for a shell that completes loads them.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError, PlanError

if TYPE_CHECKING:
    from earlyexit.data import rows as table


StrategyName = Literal["best", "stock", "early-exit", "e3", "serial", "apparate", "pame"]
"""As `optimizer.decision.Strategy`, which a shell that completes does not wait for."""
MOST_INGRESSES = 1000


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets of half an IPv6 address, a port that is no number
        complete = False
    if not complete:
        raise PydanticCustomError("address", "an address like http://127.0.0.1:8000 is needed")
    return url


def _in_a_folder(path: Path, info: ValidationInfo) -> Path:
    """Raises InputError for a file to write whose folder does not exist or is not writable."""
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"--{info.field_name} {path}; a file in a folder that exists is needed")
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"--{info.field_name} {path}: {error.strerror}") from error
    if not writable:
        raise InputError(f"--{info.field_name} {path}: may not be written")
    return path


Address = Annotated[str, AfterValidator(_address)]
OutFile = Annotated[Path, AfterValidator(_in_a_folder)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, description="Seed of all random numbers.")]
Split = BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
"""Of options that are numbers separated by commas."""
Ascending = AfterValidator(lambda numbers: tuple(sorted(set(numbers))))
Integers = Annotated[tuple[int, ...], Split, Ascending]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), Split, Ascending]
Numbers = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Split]


def refusal(option: str, error: ErrorDetails) -> InputError:
    """The error of an option that pydantic refuses, in the words of the command line."""
    said = error["msg"]
    return InputError(f"--{option.replace('_', '-')} {error['input']!r}: {said[0].lower()}{said[1:]}")


class Job(BaseModel):
    """What a command does. Its fields are the command's options, except those that are excluded."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class Printed(Job):
    """What can be printed in two ways."""

    as_json: bool = Field(default=False, alias="json")
    """Print JSON instead of tables."""


class KeyFile(Job):
    """A service that may want a key."""

    api_key_file: Path | None = None
    """File with the service's API key. None: $OFFRAMP_API_KEY."""

    @property
    def api_key(self) -> str | None:
        """The key, if there is one; raises InputError for an unusable file."""
        from offramp.client.protocol import find_api_key  # which loads a client

        return find_api_key(self.api_key_file)


class Asks(KeyFile):
    """A service that is asked."""

    url: Address = "http://127.0.0.1:8000"
    """Address of a running service."""


class Rows(Job):
    """How a file of texts is read."""

    text_column: str = "text"
    """Column with the text."""
    pair_column: str | None = None
    """Column with the second text, where rows are pairs."""
    part: str | None = Field(default=None, examples=["train", "val", "test"])
    """Which list of a CLINC150 file, or folder above the labels': train, val, test. None: all."""

    def read(self, path: Path, **options: Any) -> table.LabelledRows:
        """Returns a file's rows, by these fields and the options of `read_labelled`; raises DataError or InputError."""
        from earlyexit.data.rows import read_labelled

        return read_labelled(path, **self.model_dump(include=set(LabelledRows.model_fields)) | options)


class LabelledRows(Rows):
    """How a file of labelled rows is read."""

    label_column: str = "label"
    """Column with the label."""
    joints: Path | None = None
    """For poses: table of the images' joints with the columns image,joint,x,y,visible (.csv)."""
    classes: Path | None = None
    """For segmentation (a folder or .zip with image/ and label/): table with the columns id,name of classes (.csv)."""


class BenchJob(Printed, Asks, LabelledRows):
    """Load a running service and report rate, latency, goodput, exits and errors."""

    data: Path
    """Labelled rows as for train, or a .txt with one text per line."""
    requests: int | None = Field(default=None, ge=1)
    """Number of requests. None: 1000, without --seconds."""
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Open loop: requests per second, which do not wait for answers."""
    arrivals: str = Field(default="poisson", examples=["poisson", "constant"])
    """Arrivals: poisson, constant, or with --seconds a whole load, such as trace:FILE,rate=100."""
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Duration of a load whose --arrivals says its rate, or of a probe of --sustained."""
    concurrency: int | None = Field(default=None, ge=1)
    """Closed loop: clients that wait for answers. None: 8, without --rate."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs per request."""
    slo_ms: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Latency within which an answer counts as goodput."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Timeout of a request in seconds, retries included."""
    sustained: bool = False
    """Search the highest Poisson rate with p99 within --slo-ms and at most 1 % lost, from --rate on, in probes of
    --seconds."""
    retries: int = Field(default=0, ge=0)
    """How often a failed request is sent again."""
    seed: Seed = 0

    @property
    def is_timed(self) -> bool:
        """Whether `arrivals` and `seconds` say the whole load."""
        return not self.sustained and (":" in self.arrivals or self.seconds is not None)

    @model_validator(mode="after")
    def _agrees(self) -> BenchJob:
        if self.sustained and (self.requests, self.concurrency, self.arrivals) != (None, None, "poisson"):
            raise InputError("--sustained is an open loop of its own: no --requests, --concurrency or --arrivals")
        if self.rate is not None and self.concurrency is not None:
            raise InputError("--rate (open loop) and --concurrency (closed loop) exclude each other: give one of them")
        if self.is_timed and (self.rate, self.concurrency, self.requests) != (None, None, None):
            raise InputError(
                "--arrivals poisson:100 --seconds 60 is a whole load: no --rate, --concurrency or --requests"
            )
        return self


class PredictJob(Printed, Asks, Rows):
    """Ask a running service about inputs: arguments, a file or a pipe. Exit status 1 if one of them failed."""

    texts: tuple[str, ...] = Field(default=(), json_schema_extra={"argument": "TEXTS"})
    """Texts, paths of images, a pair of texts, or - for one text per line from standard input."""
    data: Path | None = None
    """Inputs instead of arguments: texts or pairs (.csv, .tsv, .jsonl, .txt, CLINC150's .json), images (folder or
    .zip), arrays (.npy, .npz)."""
    out: OutFile | None = None
    """With --data or -: file to write, .jsonl or .csv. None: print."""
    form: Literal["jsonl", "csv"] | None = Field(default=None, alias="format")
    """Format of the output: jsonl or csv. None: by the ending of --out, else jsonl."""
    maps: Path | None = None
    """A folder for class maps, a PNG file for each image. None: none is written."""
    batch: int = Field(default=32, ge=1)
    """With --data or -: inputs per request."""
    concurrency: int = Field(default=8, ge=1)
    """With --data or -: requests at the same time."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Timeout of a request in seconds, retries included."""
    truncate: bool = False
    """Cut texts that are too long."""


class GenerateJob(Asks):
    """Ask a running service whose model generates, and print the answer as it comes."""

    prompt: str = Field(json_schema_extra={"argument": "PROMPT"})
    """Prompt to answer, or with --raw a text to continue."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    max_tokens: int = Field(default=128, ge=1)
    """Most tokens of the answer."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Temperature of sampling, where 0 always takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Sample from the likeliest tokens whose probabilities reach this sum."""
    seed: Seed = 0
    stop: tuple[str, ...] = ()
    """Text that ends the answer (may be repeated)."""
    exits: bool = False
    """Colour tokens by the block after which they left, with a table at the end."""
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Timeout in seconds, for the first text and between two."""


class ForecastJob(Printed):
    """Forecast the next window's survival at every block, with intervals."""

    series: Path = Field(json_schema_extra={"argument": "SERIES"})
    """Past windows, oldest first: .json, or .csv with the columns inputs, 0, 1 and so on."""
    coverage: float = 0.8
    """Probability that a level lies in its interval."""
    window_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Length of a window in seconds, to forecast the rate too. None: no rate."""


class DoctorJob(Printed):
    """Check this machine: libraries, cores, GPUs, memory, ports, leftovers of Ray. Exit status 1 if something failed.

    Starts nothing, and changes nothing.
    """

    targets: tuple[Path, ...] = Field(default=(), json_schema_extra={"argument": "MODEL_OR_SERVICE"})
    """Model folders, checkpoints of transformers and service files to check as well."""
    port: list[Annotated[int, Field(ge=1, le=65535)]] | None = None
    """Port that a service needs (may be repeated). None: 8000."""


class DemoJob(Job):
    """Train ramps, then compare three plans on this machine's processors and on emulated accelerators (minutes)."""

    data: Path | None = None
    """Your own labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json. None: texts that are made up."""
    keep: bool = False
    """Only serve the planned model, until Ctrl-C."""
    out: Path | None = None
    """Folder for model, picture and figures. None: runs/demo."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the service."""


class OfOrder(BaseModel):
    """The order in which inputs of a plan's queues go."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    order: str | None = Field(default=None, examples=["arrival", "deadline", "shortest", "das"])
    """Order of the waiting inputs: arrival, deadline, shortest, das (or das:0.3, with its eta). None: the plan's order,
    else deadline."""


def order_option(text: str | None) -> OrderSpec | None:
    """Returns the order that `--order` names; raises InputError."""
    try:
        return None if text is None else OrderSpec.parse(text)
    except PlanError as error:
        raise InputError(f"--order: {error}") from error


class OfProblem(Job):
    """A problem file."""

    problem: Path = Field(json_schema_extra={"argument": "PROBLEM"})
    """Plan problem, YAML or JSON."""


class PlanJob(Printed, OfProblem, OfOrder):
    """Find the best plan for a problem file: what runs where, at which batch, with which ramps on.

    Exit status 3: no plan meets the problem; the answer says which limit binds, and which limits can be met.
    """

    strategy: StrategyName = "best"
    """Strategy: best, or a part of its search space: stock, early-exit, e3, serial, apparate, pame."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use."""
    plot: OutFile | None = None
    """Picture of the plan: .svg, .png or .pdf."""
    out: OutFile | None = None
    """Plan file for `offramp serve --plan`."""
    threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """For --out: entropy in nats at which inputs leave, at every active ramp."""
    compared: bool = Field(default=True, alias="compare")
    """Plan the other strategies too, for comparison."""

    @model_validator(mode="after")
    def _agrees(self) -> PlanJob:
        if self.threshold is not None and self.out is None:
            raise InputError("--threshold: only a plan that is written with --out needs one")
        if self.order is not None and self.out is None:
            raise InputError("--order: only a plan that is written with --out has one")
        return self


class WhatIfJob(Printed, OfProblem):
    """Plan a problem again and again with one number changed; give exactly one of the options."""

    slo_ms: Numbers | None = None
    """SLOs in ms, like 25,50,100."""
    batch_limit: Integers | None = None
    """Largest batch sizes, like 1,2,4,8."""
    budget: Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Split] | None = None
    """Budgets in USD per hour, like 10,20."""
    count: str | None = None
    """Numbers of one device, like V100=4,8,16."""
    rate: Numbers | None = None
    """Rates per second, like 1000,2000, at the least cost if the problem asks for no rate."""


class SimulateJob(Printed, OfProblem, OfOrder):
    """Simulate a plan under load: goodput, latency, drops, fill, utilisation and cost.

    Exit status 3: no plan meets the problem. 130: interrupted; what was simulated by then is printed.
    """

    arrivals: str
    """Arrivals: poisson:9000, uniform:9000, gamma:9000,cv=2, mmpp:1000,peak=5000,..., trace:FILE, counts:FILE or
    times:FILE."""
    plan: Path | None = None
    """Plan file, or the output of `offramp plan --json`. None: the planner's plan."""
    strategy: StrategyName | None = None
    """Strategy of the planner's plan: best, stock, early-exit, e3, serial, apparate, pame. None: best."""
    duration_s: float = Field(default=60.0, alias="duration", gt=0, allow_inf_nan=False)
    """Seconds in which requests arrive."""
    warm_up_s: float = Field(default=1.0, alias="warm_up")
    """Seconds from the start that are not counted."""
    records: Path | None = None
    """Exit records (.npz, .csv, .tsv). None: inputs leave at random, by the problem's survival."""
    thresholds: str | None = None
    """With records: one threshold, one per ramp like 0=0.4,3=0.2, or a calibration.json. None: the plan's policy."""
    lengths: str | None = None
    """Tokens of inputs: a file (one number a line, or exit records), or a normal distribution as
    mean,variance,low,high. None: the problem's."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs per request."""
    num_ingresses: int = Field(default=1, ge=1, le=MOST_INGRESSES, alias="ingresses")
    """Replicas of the ingress."""
    overlap_below: int | None = Field(default=None, ge=1)
    """Start a device's next batch beside a running one of fewer inputs than this. None: as the plan says."""
    admission: bool = True
    """Refuse inputs at once that would be late."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _agrees(self) -> SimulateJob:
        if self.plan is not None and self.strategy is not None:
            raise InputError("--plan and --strategy exclude each other: a file's plan is not the planner's")
        if not 0 <= self.warm_up_s < self.duration_s:
            raise InputError(
                f"--warm-up {self.warm_up_s:g}; seconds from 0 on are needed, fewer than the {self.duration_s:g} of "
                "--duration"
            )
        return self


def _absolute(at: str) -> str:
    if not PurePosixPath(at).is_absolute():
        raise InputError(f"--at {at}: an absolute folder of the nodes is needed")
    return at


NodeFolder = Annotated[str, AfterValidator(_absolute)]


class OfService(Job):
    """A service file."""

    service: Path = Field(json_schema_extra={"argument": "SERVICE"})
    """Service file, YAML or JSON."""
    at: NodeFolder | None = None
    """Folder where all nodes find model/, exit records and state. None: the same paths as here."""


class OfCluster(Job):
    """A Ray cluster."""

    address: Address = "http://127.0.0.1:8265"
    """Address of Ray's dashboard."""


class Waits(Job):
    """A command that ends when something is done."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds to wait until it is done."""


class RenderJob(OfService):
    """Write what `serve deploy` takes, KubeRay's manifest, or the settings, for a service file."""

    kuberay: bool = False
    """Write a RayService instead of a Serve config."""
    image: str = "offramp"
    """For --kuberay: image with Ray and this repository."""
    claim: str = "offramp"
    """For --kuberay: volume claim that all pods mount."""
    redis: str | None = None
    """For --kuberay: host:port of a Redis, so that the service outlives Ray's head."""
    redis_secret: str | None = None
    """For --redis: the secret of Kubernetes with its `password`. None: none."""
    settings: bool = False
    """Write only the settings, as in a repository's folder."""
    out: OutFile | None = None
    """File to write. None: print."""

    @model_validator(mode="after")
    def _agrees(self) -> RenderJob:
        if self.kuberay and self.settings:
            raise InputError("--kuberay and --settings exclude each other: give one of them")
        if (self.redis is not None and not self.kuberay) or (self.redis_secret is not None and self.redis is None):
            raise InputError("--redis goes with --kuberay, and --redis-secret with --redis")
        return self


class DeployJob(Waits, OfCluster, OfService):
    """Deploy a service to a running Ray cluster, beside its other applications, and wait until it runs."""


class StatusJob(Printed, KeyFile, OfCluster):
    """Show what a Ray cluster serves: applications, deployments, replicas, and the plan in force."""

    url: Address | None = None
    """Address of the service, for its plan. None: Serve's port on the dashboard's machine."""


class DeleteJob(Waits, OfCluster):
    """Delete one application from a Ray cluster; the others stay."""

    name: str = Field(json_schema_extra={"argument": "NAME"})
    """The application's name."""


class VersionsJob(Printed, Asks):
    """List the models and versions of a cluster, and their states."""


class CanaryJob(Printed, Asks):
    """Let a version answer a share of the requests, or show how default and canary compare."""

    version: str | None = None
    """Version on trial. None: only report the present canary."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that this version answers."""
    compare: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that both versions answer, for comparison."""
    end: bool = False
    """Send all requests to the default version again."""

    @model_validator(mode="after")
    def _agrees(self) -> CanaryJob:
        if self.end and self.version is not None:
            raise InputError("--end ends the canary, --version begins one: give one of them")
        if self.version is None and (self.share or self.compare):
            raise InputError("--share and --compare need --version")
        return self


class OfVersion(Asks):
    """A version."""

    version: str
    """Name of the version."""


class PromoteJob(Printed, OfVersion):
    """Let a version answer all requests that name none."""


class LoadJob(Waits, Asks, OfService):
    """Start a service file's version beside the others, and wait until it is ready."""


class UnloadJob(Waits, OfVersion):
    """End a version that no request is sent to, and wait until it is gone."""

    model: str = Field(json_schema_extra={"argument": "MODEL"})
    """The model's name."""
