"""What a problem file holds, field by field, as pydantic checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.inventory_file import MAX_COUNT as MAX_COUNT
from earlyexit.data.source_file import Source, StrictDocument, fields_of
from earlyexit.errors import DataError
from earlyexit.sequences.sequence import PAGE_TOKENS
from optimizer.plan_file import MOST_CHAINS, OrderDetails, OrderDocument, RampKey
from optimizer.problem import ANY_LATENCY_S, IN_TIME, LEAST_BLOCK_S
from profiles.lengths import MOST_TOKENS

MAX_BLOCKS = 10_000
"""Far above any model: what a file asks for is refused before memory is."""
MAX_BATCH = 1_000_000
"""The largest batch size, far above what any accelerator holds: whole numbers stay exact in all that is computed."""
# Far beyond what is measured anywhere: with numbers further apart, sums and quotients overflow or lose their digits.
MOST_SECONDS = 1e9
MOST_USD_PER_HOUR = 1e12
LEAST_RATE, MOST_RATE = 1e-9, 1e12
"""Per second: once in thirty years, and more than all machines do."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Place = Sequence[str | int]
"""The path of a value in its file."""


@contextmanager
def read_at(source: Source, at: Place, *, called: Place | None = None) -> Iterator[None]:
    """As `Source.said_at`; a DataError of the data that this value names is an error of the file too.

    `called`: the value's path in the message; None: `at`.
    """
    with source.said_at(at):
        try:
            yield
        except DataError as error:
            raise source.raises(f"{'.'.join(map(str, called or at))}: {error}") from error


class TableDocument(StrictDocument):
    """Seconds written out."""

    batch: list[Annotated[int, Field(le=MAX_BATCH)]] = Field(min_length=1)
    """Measured batch sizes, ascending."""
    block_s: list[list[Seconds]]
    """One row per block, one value per batch size."""
    ramp_s: list[list[Seconds]]
    """One row per ramp."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of every input; needed where the problem has lengths."""
    context: int | None = Field(default=None, ge=1)
    """Of steps of sequences: tokens that each had come to."""
    context_s: Seconds = 0.0
    """What a block takes longer for each further one."""


class PublishedDocument(StrictDocument):
    """Seconds that a paper published: a model of the catalogue, at one input length."""

    published: str
    length: int = Field(ge=1)


class ProfileFileDocument(StrictDocument):
    """Seconds of a latency profile, at one input length."""

    profile: str
    """Its file, relative to the problem's folder."""
    length: int = Field(default=1, ge=1)
    """Tokens of an input; 1 where inputs have none."""


# Tags are no words of the format: pydantic puts them into a mistake's path, where they would read as fields.
def _form_of(value: Any) -> str | None:
    """Returns the tag of plain data, which says whether a union has such a form; None for what no union has."""
    for kind, tag in ((Mapping, "<mapping>"), (list, "<list>"), (str, "<file>")):
        if isinstance(value, kind):
            return tag
    return "<one>" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _forms(allowed: str, form_of: Callable[[Any], str | None] = _form_of) -> Discriminator:
    """Chooses a union's form by its tag; `allowed`: the forms in words."""
    return Discriminator(form_of, custom_error_type="form", custom_error_message=f"Input should be {allowed}")


ThresholdsDocument = Annotated[
    Annotated[float, Tag("<one>")] | Annotated[dict[RampKey, float], Tag("<mapping>")],
    _forms("one number, or a mapping with a number for each ramp"),
]


class RecordsDocument(StrictDocument):
    """Survival that follows from exit records."""

    records: str | None = None
    """Their file, relative to the problem's folder."""
    thresholds: ThresholdsDocument | None = None
    """One for all ramps, or one per ramp, in the unit of the records' score."""
    calibration: str | None = None
    """The file of a calibration, whose thresholds are taken, in the place of `thresholds`."""
    folder: str | None = None
    """In the place of all others: a model's, by each of whose calibrations is planned, with the ramps that it is of."""


class SupplyDocument(StrictDocument):
    """The accelerators of one type."""

    count: int = Field(ge=0, le=MAX_COUNT)
    usd_per_hour: float = Field(default=0.0, ge=0, le=MOST_USD_PER_HOUR)


class LinkDocument(StrictDocument):
    """What a hop goes over."""

    bandwidth_bytes_per_s: float = Field(ge=1e-3, le=1e18)
    delay_s: Seconds = 0.0


class SloDocument(StrictDocument):
    """The latency limit; plans use it without the share `slack`."""

    latency_s: float = Field(ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    slack: float = Field(default=0.2, ge=0, lt=1)


class ObjectiveDocument(StrictDocument):
    """What plans are chosen by: {maximize: rate}, or {minimize: cost} or {minimize: latency} with a rate."""

    maximize: Literal["rate"] | None = None
    minimize: Literal["cost", "latency"] | None = None
    rate_per_s: float | None = Field(default=None, ge=LEAST_RATE, le=MOST_RATE)
    in_time: float = Field(default=IN_TIME, ge=0, lt=1)
    """With cost: the share of inputs that must be in time if they arrive at random; 0 ignores queues."""
    ramp_budget: float | None = Field(default=None, le=MOST_SECONDS)
    """With latency: the most seconds of active ramps per second of blocks."""


class BudgetDocument(StrictDocument):
    """Limit of the cost of all replicas together."""

    usd_per_hour: float = Field(ge=0, le=MOST_USD_PER_HOUR)


class BatchesDocument(StrictDocument):
    """Inputs in order of arrival: what a batch of them does."""

    size: int = Field(ge=1, le=MAX_BATCH)
    """Inputs of a batch."""
    sure: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """Per input, bit i: the problem's i-th ramp lets it leave."""
    lost: list[Annotated[int, Field(ge=0)]] | None = None
    """Per input, bit i: that ramp's answer is lost. Where losses are 0 or 1."""
    losses: list[list[float]] | None = None
    """In the place of `lost`: per input, what the answers cost of the ramps that let it leave, in their order."""


def _latency_kind(entry: Any) -> str | None:
    """Which form a latency entry has, by the field that only that form has."""
    if not isinstance(entry, Mapping):
        return None
    named = [kind for kind in ("published", "profile") if kind in entry]
    return f"<{named[0]}>" if named else "<table>"


LatencyDocument = Annotated[
    Annotated[TableDocument, Tag("<table>")]
    | Annotated[PublishedDocument, Tag("<published>")]
    | Annotated[ProfileFileDocument, Tag("<profile>")],
    _forms(
        f"a mapping with {fields_of(TableDocument)}, or with {fields_of(PublishedDocument)}, "
        f"or with {fields_of(ProfileFileDocument)}",
        _latency_kind,
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
"""How many tokens inputs have."""


class KvDocument(StrictDocument):
    """Memory for keys and values."""

    bytes_per_token: float = Field(gt=0, le=1e18)
    """Of all blocks: 2 x blocks x key/value heads x head size x bytes of a number."""
    memory_bytes: dict[str, float] = Field(min_length=1)
    """Of one accelerator, by type, for weights and for keys and values."""
    weights_bytes: NumBytes = 0.0
    """Of the whole model."""
    page_tokens: int = Field(default=PAGE_TOKENS, ge=1, le=MOST_TOKENS)
    reserved_tokens: float | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """For a sequence, on average: prompt and most answer. None: prompt and answer."""


class GenerationDocument(StrictDocument):
    """Sequences of a service."""

    prompt_tokens: LengthsDocument | None = None
    output_tokens: LengthsDocument | None = None
    lengths: str | None = None
    """In the place of both: a table of recorded sequences."""
    tpot_s: float = Field(ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    """Within which each token after the first is promised: the SLO of a step."""
    ttft_s: float | None = Field(default=None, ge=LEAST_BLOCK_S, le=ANY_LATENCY_S)
    """Within which the first is."""
    slack: float = Field(default=0.2, ge=0, lt=1)
    """Of both, the share that is kept in hand."""
    fill: str = "compute"
    copy_share: float = Field(default=1.0, ge=0, le=1)
    chunk: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    prefill: dict[str, LatencyDocument] | None = None
    """Of batches of prompts; None: a prompt takes what as many steps take at once."""
    regroup_s: Seconds = 0.0
    late_head: bool = False
    most_running: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    kv: KvDocument | None = None


class SurvivalOfDocument(StrictDocument):
    """Survival of plans that use some of a chain's networks."""

    networks: list[int]
    """Their places, the last network's among them."""
    survival: list[float]
    """Per block of the chain."""


class ProblemDocument(StrictDocument):
    """A whole problem."""

    schema_version: Literal[1] = 1
    blocks: int = Field(ge=1, le=MAX_BLOCKS)
    ramps: list[int]
    survival: SurvivalDocument
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    devices: dict[str, SupplyDocument] = Field(min_length=1)
    link: LinkDocument
    bytes_per_sample: BytesDocument
    slo: SloDocument | None = None
    """None: `generation` says it."""
    objective: ObjectiveDocument
    budget: BudgetDocument | None = None
    most_chains: int = Field(1, ge=1, le=MOST_CHAINS)
    """Of stages, side by side."""
    batches: BatchesDocument | None = None
    order: OrderDocument = Field(default_factory=OrderDetails)
    """Of the inputs that wait, in plans that are made of it."""
    lengths: LengthsDocument | None = None
    """None: every input is as long as those of the latencies, and batches are counted in inputs."""
    stayers_length: list[float] | None = None
    """Per block, the mean length of inputs that reach it over that of all; None: the records', or alike."""
    models: None = None
    """In the place of blocks, ramps, latency and bytes_per_sample: networks of a chain (`optimizer.models_file`)."""
    generation: GenerationDocument | None = None
    """Of decoders: sequences, whose steps the inputs are."""
    networks: list[int] = Field(default_factory=list)
    """Of a chain: one past the last block of every network."""
    survival_of: list[SurvivalOfDocument] = Field(default_factory=list)
    crossing_s: Seconds = 0.0
    network_tokens: list[float] = Field(default_factory=list)
    crossing_tokens: list[float] = Field(default_factory=list)
