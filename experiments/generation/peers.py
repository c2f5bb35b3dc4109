"""What else makes sequences in one process and without HTTP: `transformers`' own continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from earlyexit.network.boundary import FloatName
from earlyexit.sequences.memory import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence to be made."""

    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class TokenTimes:
    """When a sequence was due, and when each of its tokens came; seconds on one clock."""

    due_s: float
    said_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.said_s[0] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Of those behind the first."""
        return (self.said_s[-1] - self.said_s[0]) / max(1, len(self.said_s) - 1)


class Transformers:
    """The same checkpoint by `transformers`' own continuous batching (`generate_batch`'s manager)."""

    def __init__(self, source: Path, dtype: FloatName) -> None:
        from transformers import AutoModelForCausalLM

        where: dict[str, Any] = {"gguf_file": source.name} if source.is_file() else {}
        folder = source.parent if source.is_file() else source
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), **where
        ).eval()

    def run(self, jobs: Sequence[Job], concurrency: int, chunk: int) -> list[TokenTimes]:
        """Make them all."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(len(job.prompt) + job.tokens for job in jobs)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=(concurrency + 1) * (longest // PAGE_TOKENS + 2),
            max_batch_tokens=chunk + concurrency,
            allow_block_sharing=False,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        waiting, made = list(jobs)[::-1], list[TokenTimes]()
        began: dict[str, float] = {}
        with self._model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:

            def begin() -> None:
                job = waiting.pop()
                now_s = time.perf_counter()
                name = manager.add_request(
                    list(job.prompt), max_new_tokens=job.tokens, record_timestamps=True, eos_token_id=-1
                )
                began[name] = now_s

            for _ in range(min(concurrency, len(jobs))):
                begin()
            while len(made) < len(jobs):
                result = manager.get_result(timeout=60)
                assert result is not None, "transformers says nothing any more"
                assert result.error is None, result.error
                if result.is_finished():
                    made.append(TokenTimes(began[result.request_id], list(result.timestamps)))
                    if waiting:
                        begin()
        return made
