"""The schema of problem files, as pydantic models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.inventory_file import MAX_COUNT as MAX_COUNT
from earlyexit.data.source_file import Source, StrictDocument, fields_of
from earlyexit.errors import DataError
from earlyexit.sequences.sequence import PAGE_TOKENS
from optimizer.plans.plan_file import MOST_CHAINS, OrderDetails, OrderDocument, RampKey
from optimizer.problems.problem import ANY_LATENCY_S, IN_TIME, LEAST_BLOCK_S
from profiles.lengths import MOST_TOKENS

MAX_BLOCKS = 10_000
"""Far above any real model. A larger number is refused here, before it exhausts the memory."""
MAX_BATCH = 1_000_000
"""Far above what any accelerator holds. Up to this size all computed integers are exact."""
# Limits far outside real measurements. Beyond them, sums and quotients overflow or lose precision.
MOST_SECONDS = 1e9
MOST_USD_PER_HOUR = 1e12
LEAST_RATE, MOST_RATE = 1e-9, 1e12
"""Per second. The lower limit is one request in thirty years."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Place = Sequence[str | int]
"""The path of a value in its file."""


@contextmanager
def read_at(source: Source, at: Place, *, called: Place | None = None) -> Iterator[None]:
    """Like `Source.errors_at`, and also turns a DataError in the data that this value names into an error of the file.

    `called` is the value's path in the message; None: `at`.
    """
    with source.errors_at(at):
        try:
            yield
        except DataError as error:
            raise source.raises(f"{'.'.join(map(str, called or at))}: {error}") from error


class TableDocument(StrictDocument):
    """A latency table that is written out in the file."""

    batch: list[Annotated[int, Field(le=MAX_BATCH)]] = Field(min_length=1)
    """Measured batch sizes, ascending."""
    block_s: list[list[Seconds]]
    """One row per block, one value per batch size."""
    ramp_s: list[list[Seconds]]
    """One row per ramp."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of each input. Required if the problem has lengths."""
    context: int | None = Field(default=None, ge=1)
    """For steps of sequences: tokens of the sequence before the step."""
    context_s: Seconds = 0.0
    """Additional seconds of a block per further token of context."""


class PublishedDocument(StrictDocument):
    """Latencies that a paper published: a model of the catalogue, at one input length."""

    published: str
    length: int = Field(ge=1)


class ProfileFileDocument(StrictDocument):
    """Latencies from a profile, at one input length."""

    profile: str
    """The profile's file, relative to the problem's folder."""
    length: int = Field(default=1, ge=1)
    """Tokens of an input; 1 if inputs have no tokens."""


# Tags are in angle brackets because pydantic puts them into the paths of errors, where they could be read as fields.
def _form_tag(value: Any) -> str | None:
    """Returns the tag of the union member that parses this value, or None if no union has such a member."""
    for kind, tag in ((Mapping, "<mapping>"), (list, "<list>"), (str, "<file>")):
        if isinstance(value, kind):
            return tag
    return "<one>" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _forms(allowed: str, form_tag: Callable[[Any], str | None] = _form_tag) -> Discriminator:
    """Returns a discriminator that selects a union's member by tag. `allowed` describes the members in messages."""
    return Discriminator(form_tag, custom_error_type="form", custom_error_message=f"Input should be {allowed}")


ThresholdsDocument = Annotated[
    Annotated[float, Tag("<one>")] | Annotated[dict[RampKey, float], Tag("<mapping>")],
    _forms("one number, or a mapping with a number for each ramp"),
]


class RecordsDocument(StrictDocument):
    """Survival that is computed from exit records."""

    records: str | None = None
    """The records' file, relative to the problem's folder."""
    thresholds: ThresholdsDocument | None = None
    """One for all ramps, or one per ramp, in the unit of the records' score."""
    calibration: str | None = None
    """Instead of `thresholds`: the file of a calibration."""
    folder: str | None = None
    """Instead of all other fields: a model's folder. Plans are made for each calibration in it, with its ramps."""


class SupplyDocument(StrictDocument):
    """The accelerators of one type."""

    count: int = Field(ge=0, le=MAX_COUNT)
    usd_per_hour: float = Field(default=0.0, ge=0, le=MOST_USD_PER_HOUR)


class LinkDocument(StrictDocument):
    """The network link between stages."""

    bandwidth_bytes_per_s: float = Field(ge=1e-3, le=1e18)
    delay_s: Seconds = 0.0


class SloDocument(StrictDocument):
    """The latency limit. Plans must keep it with the share `slack` in reserve."""

    latency_s: float = Field(ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    slack: float = Field(default=0.2, ge=0, lt=1)


class ObjectiveDocument(StrictDocument):
    """The objective: {maximize: rate}, or {minimize: cost} or {minimize: latency} with a rate."""

    maximize: Literal["rate"] | None = None
    minimize: Literal["cost", "latency"] | None = None
    rate_per_s: float | None = Field(default=None, ge=LEAST_RATE, le=MOST_RATE)
    in_time: float = Field(default=IN_TIME, ge=0, lt=1)
    """For cost: share of inputs that must be in time if arrivals are random; 0 ignores queues."""
    ramp_budget: float | None = Field(default=None, le=MOST_SECONDS)
    """For latency: largest time of active ramps, as a share of the blocks' time."""


class BudgetDocument(StrictDocument):
    """The largest cost of all replicas together."""

    usd_per_hour: float = Field(ge=0, le=MOST_USD_PER_HOUR)


class BatchesDocument(StrictDocument):
    """Recorded inputs, in order of arrival, which form batches."""

    size: int = Field(ge=1, le=MAX_BATCH)
    """Inputs per batch."""
    sure: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """Bit mask per input: bit i is set if the problem's i-th ramp lets the input leave."""
    lost: list[Annotated[int, Field(ge=0)]] | None = None
    """Bit mask per input: bit i is set if the i-th ramp's answer is lost. For losses of 0 or 1."""
    losses: list[list[float]] | None = None
    """Instead of `lost`: per input, the losses at the ramps that let it leave, in the order of the ramps."""


def _latency_tag(entry: Any) -> str | None:
    """Returns the tag of a latency entry, by the field that only that form has."""
    if not isinstance(entry, Mapping):
        return None
    for kind in ("published", "profile"):
        if kind in entry:
            return f"<{kind}>"
    return "<table>"


LatencyDocument = Annotated[
    Annotated[TableDocument, Tag("<table>")]
    | Annotated[PublishedDocument, Tag("<published>")]
    | Annotated[ProfileFileDocument, Tag("<profile>")],
    _forms(
        f"a mapping with {fields_of(TableDocument)}, or with {fields_of(PublishedDocument)}, "
        f"or with {fields_of(ProfileFileDocument)}",
        _latency_tag,
    ),
]


SurvivalDocument = Annotated[
    Annotated[list[float], Tag("<list>")] | Annotated[RecordsDocument, Tag("<mapping>")],
    _forms(f"a list of shares, one per block, or a mapping with {fields_of(RecordsDocument)}"),
]


NumBytes = Annotated[float, Field(ge=0, le=1e18)]
BytesDocument = Annotated[
    Annotated[NumBytes, Tag("<one>")] | Annotated[list[NumBytes], Tag("<list>")],
    _forms("one number, or a list of numbers, one per block"),
]


LengthsDocument = Annotated[
    Annotated[float, Tag("<one>")]
    | Annotated[list[float], Tag("<list>")]
    | Annotated[dict[RampKey, float], Tag("<mapping>")]
    | Annotated[str, Tag("<file>")],
    _forms(
        "a mean, a list of lengths, a mapping from length to share, or a file of lengths or of exit records that know "
        "them"
    ),
]
"""Lengths of inputs, in tokens."""


class KvDocument(StrictDocument):
    """Memory of the KV cache."""

    bytes_per_token: float = Field(gt=0, le=1e18)
    """All blocks together: 2 x blocks x key/value heads x head size x bytes per number."""
    memory_bytes: dict[str, float] = Field(min_length=1)
    """By accelerator type: memory of one accelerator for the weights and the KV cache."""
    weights_bytes: NumBytes = 0.0
    """Size of the whole model."""
    page_tokens: int = Field(default=PAGE_TOKENS, ge=1, le=MOST_TOKENS)
    reserved_tokens: float | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """Mean tokens that are reserved per sequence: prompt and longest answer. None: prompt and actual answer."""


class GenerationDocument(StrictDocument):
    """The sequences of a service that generates text."""

    prompt_tokens: LengthsDocument | None = None
    output_tokens: LengthsDocument | None = None
    lengths: str | None = None
    """Instead of both: a table of recorded sequences."""
    tpot_s: float = Field(ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    """Promised time per output token after the first: the SLO of a step."""
    ttft_s: float | None = Field(default=None, ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    """Promised time to the first token."""
    slack: float = Field(default=0.2, ge=0, lt=1)
    """Share of both times that is held in reserve."""
    fill: str = "compute"
    copy_share: float = Field(default=1.0, ge=0, le=1)
    chunk: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    prefill: dict[str, LatencyDocument] | None = None
    """Latencies of batches of prompts. None: a prompt takes as long as a batch of as many steps."""
    regroup_s: Seconds = 0.0
    late_head: bool = False
    most_running: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    kv: KvDocument | None = None


class SurvivalOfDocument(StrictDocument):
    """Survival of plans that use a subset of a chain's networks."""

    networks: list[int]
    """Indices of the used networks. The last network is always used."""
    survival: list[float]
    """One value per block of the chain."""


class ProblemDocument(StrictDocument):
    """A whole problem file."""

    schema_version: Literal[1] = 1
    blocks: int = Field(ge=1, le=MAX_BLOCKS)
    ramps: list[int]
    survival: SurvivalDocument
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    devices: dict[str, SupplyDocument] = Field(min_length=1)
    link: LinkDocument
    bytes_per_sample: BytesDocument
    slo: SloDocument | None = None
    """None if `generation` holds the SLO."""
    objective: ObjectiveDocument
    budget: BudgetDocument | None = None
    most_chains: int = Field(1, ge=1, le=MOST_CHAINS)
    """Largest number of parallel chains of stages."""
    batches: BatchesDocument | None = None
    order: OrderDocument = Field(default_factory=OrderDetails)
    """The order of waiting inputs, which is copied into plans."""
    lengths: LengthsDocument | None = None
    """None: every input has the length at which latencies were measured, and batches are counted in inputs."""
    stayers_length: list[float] | None = None
    """Mean length of the inputs that reach each block, relative to all inputs. None: from the records, or equal."""
    models: None = None
    """Instead of blocks, ramps, latency and bytes_per_sample: a chain's networks (`optimizer.problems.models_file`)."""
    generation: GenerationDocument | None = None
    """For decoders: the sequences, whose steps are the inputs."""
    networks: list[int] = Field(default_factory=list)
    """For a chain: one past the last block of each network."""
    survival_of: list[SurvivalOfDocument] = Field(default_factory=list)
    crossing_s: Seconds = 0.0
    network_tokens: list[float] = Field(default_factory=list)
    crossing_tokens: list[float] = Field(default_factory=list)
