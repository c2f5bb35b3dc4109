"""The field `generation` of a problem file: sequences, their SLOs, and the memory of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from earlyexit.data.source_file import Source
from earlyexit.errors import PlanError
from optimizer.generation.demand import Generation, KvMemory
from optimizer.problems.latency_file import latency_table
from optimizer.problems.lengths_file import lengths_document, lengths_of
from optimizer.problems.problem import PlanProblem, Slo
from optimizer.problems.problem_shape import GenerationDocument, read_at
from profiles.lengths import Lengths, Pairs, grouped, read_sequences

SAME_FIELDS = ("ttft_s", "fill", "copy_share", "chunk", "regroup_s", "late_head", "most_running")
"""Fields that a file and `Generation` have in common."""


def with_generation(problem: PlanProblem, document: GenerationDocument, source: Source, folder: Path) -> PlanProblem:
    """Returns the problem with the document's sequences; raises PlanError at the line of an error."""
    prompt, output, recorded = _lengths(document, source, folder)
    tables = {
        device: latency_table(
            ("generation", "prefill", device), entry, problem.num_blocks, problem.ramps, source, folder
        )
        for device, entry in (document.prefill or {}).items()
    }
    with source.errors_at(("generation", "kv")):
        kv = None if document.kv is None else KvMemory(**document.kv.model_dump())
    with source.errors_at(("generation",)):
        generation = Generation(
            prompt=prompt,
            output=output,
            recorded=recorded,
            prefill=None if document.prefill is None else tables,
            kv=kv,
            **document.model_dump(include={*SAME_FIELDS}),
        )
        return replace(problem, generation=generation)


def _lengths(document: GenerationDocument, source: Source, folder: Path) -> tuple[Lengths, Lengths, Pairs | None]:
    """Returns the lengths of prompts and of answers, and the recorded sequences if the file names any."""
    prompt, output = document.prompt_tokens, document.output_tokens
    if document.lengths is not None:
        with read_at(source, ("generation", "lengths")):
            if prompt is not None or output is not None:
                raise PlanError("generation.lengths replaces prompt_tokens and output_tokens; leave out one of the two")
            recorded = read_sequences(folder / document.lengths)
            prompts, answers = zip(*recorded, strict=True)
            return grouped(prompts), grouped(answers), recorded
    with source.errors_at(("generation",)):
        if prompt is None or output is None:
            raise PlanError("generation needs prompt_tokens and output_tokens, or lengths of recorded sequences")
    return (
        lengths_of(prompt, source, folder, at=("generation", "prompt_tokens")),
        lengths_of(output, source, folder, at=("generation", "output_tokens")),
        None,
    )


def generation_document(generation: Generation, slo: Slo, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns plain data that `with_generation` reads. `tables` are the prefill tables as plain data."""
    kv = generation.kv
    return {
        "prompt_tokens": lengths_document(generation.prompt),
        "output_tokens": lengths_document(generation.output),
        "tpot_s": slo.latency_s,
        "slack": slo.slack,
        **{name: getattr(generation, name) for name in SAME_FIELDS},
        **({"prefill": dict(tables)} if tables else {}),
        **({} if kv is None else {"kv": asdict(kv)}),
    }
