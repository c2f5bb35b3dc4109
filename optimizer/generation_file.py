"""`generation:` in a problem file: sequences, what is promised them, and memory for keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from earlyexit.data.source_file import Source, StrictDocument
from earlyexit.errors import PlanError
from earlyexit.sequences.sequence import PAGE_TOKENS
from optimizer.generation.demand import Generation, KvMemory
from optimizer.latency_file import latency_table
from optimizer.lengths_file import lengths_document, lengths_of
from optimizer.problem import ANY_LATENCY_S, LEAST_BLOCK_S, PlanProblem, Slo
from optimizer.problem_shape import LatencyDocument, LengthsDocument, Seconds, read_at
from profiles.lengths import Lengths, Pairs, grouped, read_sequences

MOST_BYTES = 1e18
MOST_TOKENS = 1_000_000
NAMED = ("ttft_s", "fill", "copy_share", "chunk", "regroup_s", "late_head", "most_running")
"""What a file says as `Generation` has it."""


class KvDocument(StrictDocument):
    """Memory for keys and values."""

    bytes_per_token: float = Field(gt=0, le=MOST_BYTES)
    """Of all blocks: 2 x blocks x key/value heads x head size x bytes of a number."""
    memory_bytes: dict[str, float] = Field(min_length=1)
    """Of one accelerator, by type, for weights and for keys and values."""
    weights_bytes: float = Field(default=0.0, ge=0, le=MOST_BYTES)
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


class _InProblem(StrictDocument):
    generation: GenerationDocument


def _parsed(source: Source) -> GenerationDocument | None:
    given = source.document.get("generation") if isinstance(source.document, Mapping) else None
    if given is None:
        return None
    alone = replace(source, document={"generation": given})
    return alone.parse(_InProblem, called="the problem").generation


def with_slo_of_tokens(source: Source) -> Source:
    """The source with the time per token as its SLO, where it has `generation`, which says it in the place of `slo`.

    Raises PlanError at the line of what is wrong with the section.
    """
    document = _parsed(source)
    if document is None:
        return source
    assert isinstance(source.document, Mapping)
    if "slo" in source.document:
        with source.said_at(("slo",)):
            raise PlanError("slo: generation says it, as tpot_s and slack; leave one of the two out")
    slo = {"latency_s": document.tpot_s, "slack": document.slack}
    return replace(source, document={**source.document, "slo": slo})


def with_generation(problem: PlanProblem, source: Source, folder: Path) -> PlanProblem:
    """The problem with its file's sequences, where it has any; raises PlanError at the line of what is wrong."""
    document = _parsed(source)
    if document is None:
        return problem
    prompt, output, recorded = _lengths(document, source, folder)
    tables = None
    if document.prefill is not None:
        tables = {
            device: latency_table(
                ("generation", "prefill", device), entry, problem.num_blocks, problem.ramps, source, folder
            )
            for device, entry in document.prefill.items()
        }
    with source.said_at(("generation", "kv")):
        kv = None if document.kv is None else KvMemory(**document.kv.model_dump())
    with source.said_at(("generation",)):
        generation = Generation(
            prompt=prompt,
            output=output,
            recorded=recorded,
            prefill=tables,
            kv=kv,
            **document.model_dump(include={*NAMED}),
        )
        return replace(problem, generation=generation)


def _lengths(document: GenerationDocument, source: Source, folder: Path) -> tuple[Lengths, Lengths, Pairs | None]:
    """Of prompts and answers, and the sequences themselves where they were recorded."""
    prompt, output = document.prompt_tokens, document.output_tokens
    if document.lengths is not None:
        with read_at(source, ("generation", "lengths")):
            if prompt is not None or output is not None:
                raise PlanError("generation.lengths says what prompt_tokens and output_tokens say; leave one out")
            recorded = read_sequences(folder / document.lengths)
            prompts, answers = zip(*recorded, strict=True)
            return grouped(prompts), grouped(answers), recorded
    with source.said_at(("generation",)):
        if prompt is None or output is None:
            raise PlanError("generation needs prompt_tokens and output_tokens, or lengths of recorded sequences")
    return (
        lengths_of(prompt, source, folder, at=("generation", "prompt_tokens")),
        lengths_of(output, source, folder, at=("generation", "output_tokens")),
        None,
    )


def generation_document(generation: Generation, slo: Slo, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data that `with_generation` reads back; `tables` are its prefill's."""
    kv = generation.kv
    return {
        "prompt_tokens": lengths_document(generation.prompt),
        "output_tokens": lengths_document(generation.output),
        "tpot_s": slo.latency_s,
        "slack": slo.slack,
        **{name: getattr(generation, name) for name in NAMED},
        **({"prefill": dict(tables)} if tables else {}),
        **({} if kv is None else {"kv": asdict(kv)}),
    }
