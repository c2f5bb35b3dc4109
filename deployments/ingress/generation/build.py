"""The service of sequences as the settings and the model want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deployments.ingress.dispatch.departure import LiveFlight
from deployments.ingress.dispatch.dispatcher import Dispatcher
from deployments.ingress.generation.service import GenerateService
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.tasks.base import Task
from earlyexit.tasks.token import TokenTask


def build_generation(
    codec: Codec[Any],
    task: Task,
    dispatcher: Dispatcher,
    settings: ServeSettings,
    clock: Clock,
    *,
    trace: Callable[[Sequence[LiveFlight]], None] | None = None,
) -> GenerateService | None:
    """None of a model whose answers are no tokens, or that takes no prompts."""
    if not isinstance(codec, PromptCodec) or not isinstance(task, TokenTask):
        return None
    return GenerateService(codec.tokenizer, task, codec.max_length, dispatcher, settings, clock, trace=trace)
