"""The options of `offramp bench` and `offramp predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from earlyexit.errors import InputError

if TYPE_CHECKING:
    from earlyexit.data import rows as table


class Job(BaseModel):
    """What a command does. Its fields are the command's options, except those that are excluded."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


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
    """Of poses: table of the images' joints, image,joint,x,y,visible (.csv)."""
    classes: Path | None = None
    """Of segmentation, a folder or .zip with image/ and label/: table of the classes, id,name (.csv)."""


class BenchJob(LabelledRows):
    """A load on a running service. Raises InputError that names the options that contradict each other."""

    data: Path
    """Labelled rows as for train, or a .txt with one text per line."""
    requests: int | None = Field(default=None, ge=1)
    """Number of requests. None: 1000, without --seconds."""
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Open loop: requests per second, sent whatever comes back."""
    arrivals: str = Field(default="poisson", examples=["poisson", "constant"])
    """poisson or constant; or with --seconds all of the load, like trace:FILE,rate=100."""
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How long to send an --arrivals that says its rate."""
    concurrency: int | None = Field(default=None, ge=1)
    """Closed loop: clients that wait for answers. None: 8, without --rate."""
    inputs_per_request: int = Field(default=1, ge=1)
    """Inputs of every request."""
    slo_ms: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Latency within which an answer counts as goodput."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """For a whole request, retries included."""
    sustained: bool = False
    """Search the highest Poisson rate with p99 within --slo-ms and at most 1 % lost; --rate begins, --seconds is a
    probe's length."""
    retries: int = Field(default=0, ge=0)
    """Times a request is sent again."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Of everything drawn at random."""

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


class PredictJob(Rows):
    """Which inputs are asked about, how they are sent, and where the answers go."""

    data: Path | None = None
    """Inputs instead of arguments: texts or pairs (.csv, .tsv, .jsonl, .txt, CLINC150's .json), images (folder or
    .zip), arrays (.npy, .npz)."""
    out: Path | None = None
    """With --data or -: .jsonl or .csv to write. None: print."""
    form: Literal["jsonl", "csv"] | None = Field(default=None, alias="format")
    """jsonl or csv. None: --out's ending, else jsonl."""
    maps: Path | None = None
    """A folder for class maps, a PNG file for each image. None: none is written."""
    batch: int = Field(default=32, ge=1)
    """With --data or -: inputs of one request."""
    concurrency: int = Field(default=8, ge=1)
    """With --data or -: requests under way at once."""
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """For a whole request, repetitions included."""
    truncate: bool = False
    """Cut texts that are too long."""
