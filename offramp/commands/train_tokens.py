"""`offramp train` of a decoder: prompts or texts and a checkpoint in, a model folder with ramps out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.families.seq2seq import Seq2SeqBackbone
from earlyexit.network.checkpoint import RampOptions, add_ramps, ends_of, load_pretrained, start_of
from earlyexit.network.store import save_model
from earlyexit.sequences.offline import Asked, generate
from earlyexit.tasks.token import TokenTask
from earlyexit.training.tokens import TOKEN_OPTIONS, token_states, train_token_ramps
from offramp.commands.calibrated import forget_calibration
from offramp.commands.jobs import TrainJob
from offramp.commands.kinds import load_codec
from offramp.commands.progress import provenance

if TYPE_CHECKING:
    from earlyexit.data.rows import LabelledRows
    from earlyexit.families.base import Pretrained
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.training.ramps import Progress, TrainOptions

STYLES = ("adapted", "normed")
FEW = 4
"""Default number of ramps: each costs memory for its states while it learns, and a look at every token."""
LONGEST = 128
"""Tokens of a text that ramps learn from; the rest is left out."""


def train_tokens(job: TrainJob, data: LabelledRows, out: Path, progress: Progress) -> EarlyExitModel:
    """Train a decoder's ramps and save it; raises as `training.train`."""
    model = _untrained(job, len(data))
    codec, task = load_codec(model.info.codec, job, out), model.task
    assert isinstance(codec, PromptCodec)
    assert isinstance(task, TokenTask)
    texts = prompts_of(codec, data, task, chat=job.chat)
    given = [1] * len(texts)
    if job.answers is not None:
        asked = Asked(max_tokens=job.answers, ends=frozenset(task.ends))
        found = generate(model, texts, asked, progress)
        texts, given = [tuple(each.tokens) for each in found], [len(each.prompt) for each in found]
    forget_calibration(out)
    options = _options(job, progress)
    train_token_ramps(model, token_states(model, texts, given, options), options)
    save_model(model, out)
    return model


def prompts_of(codec: PromptCodec, data: LabelledRows, task: TokenTask, *, chat: bool) -> list[tuple[int, ...]]:
    """Tokens of every row's text, no more than `LONGEST`; of a chat, as what a user said, by the chat template.

    An encoder-decoder's end in the token that answers start with. Raises InputError where a model that has no template
    is to chat.
    """
    start = () if task.start is None else (task.start,)
    if not chat:
        return [codec.tokens(text)[:LONGEST] + start for text in data.texts]
    return [codec.chat([{"role": "user", "content": text}]) + start for text in data.texts]


def _untrained(job: TrainJob, num_rows: int) -> EarlyExitModel:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        pretrained, family = load_pretrained(job.backbone)
        backbone = pretrained.backbone
        if not isinstance(backbone, DecoderBackbone):
            raise ModelFolderError(f"{job.backbone} is no decoder: --task token is of models that generate")
        if isinstance(backbone, Seq2SeqBackbone) and job.answers is None:
            raise InputError("an encoder-decoder's ramps learn of its own answers: say of how many tokens by --answers")
        facts = provenance(
            backbone=job.backbone,
            data=job.source,
            rows=num_rows,
            answers=job.answers,
            chat=job.chat,
            **({} if job.epochs is None else {"epochs": job.epochs}),
            seed=job.seed,
        )
        length = job.max_length or backbone.max_length
        return add_ramps(
            pretrained,
            name=job.name,
            family=family,
            codec={"name": PromptCodec.name, "max_length": length},
            task=TokenTask(backbone.config.vocab_size, ends_of(job.backbone), start_of(job.backbone)),
            ramps=_ramps(job.ramp_options, pretrained),
            provenance=facts,
        ).requires_grad_(False)


def _ramps(asked: RampOptions, pretrained: Pretrained) -> RampOptions:
    style = "adapted" if asked.style == RampOptions().style else asked.style
    if style not in STYLES:
        raise InputError(f"--ramp-style {style}: a decoder's ramps are {' or '.join(STYLES)}, which share its head")
    return replace(asked, style=style, pooling="last", at=asked.at or spread(pretrained.backbone.num_blocks))


def spread(num_blocks: int) -> tuple[int, ...]:
    """A few blocks that divide a model evenly."""
    places = (round(num_blocks * k / (FEW + 1)) - 1 for k in range(1, FEW + 1))
    return tuple(sorted({place for place in places if 0 <= place < num_blocks - 1}))


def _options(job: TrainJob, progress: Progress) -> TrainOptions:
    asked: dict[str, Any] = {"epochs": job.epochs, "learning_rate": job.learning_rate, "batch": job.batch}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(TOKEN_OPTIONS, seed=job.seed, progress=progress, **given)
