"""`generation:` in a problem file: sequences, what is promised them, and memory for keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from earlyexit.data.source_file import Source
from earlyexit.errors import PlanError
from optimizer.generation.demand import Generation, KvMemory
from optimizer.latency_file import latency_table
from optimizer.lengths_file import lengths_document, lengths_of
from optimizer.problem import PlanProblem, Slo
from optimizer.problem_shape import GenerationDocument, read_at
from profiles.lengths import Lengths, Pairs, grouped, read_sequences

NAMED = ("ttft_s", "fill", "copy_share", "chunk", "regroup_s", "late_head", "most_running")
"""What a file says as `Generation` has it."""


def with_generation(problem: PlanProblem, document: GenerationDocument, source: Source, folder: Path) -> PlanProblem:
    """The problem with its file's sequences; raises PlanError at the line of what is wrong."""
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
