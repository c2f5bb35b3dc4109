"""Prompts of models that generate: a text, tokens, or messages by the model's chat template. This needs no torch.

Templates are programs by the publisher of the model. They run in jinja2's sandbox, in the environment that
`transformers` gives them (its `utils/chat_template_utils.py`), so that one template makes the same text in both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from earlyexit.codecs.base import Codec, Columns, texts_of
from earlyexit.codecs.text import LONG_CHARS, TEXT, read_tokenizer
from earlyexit.engine.queue import NO_SEQUENCE
from earlyexit.errors import InputError, ModelFolderError, UnprocessableInputError
from earlyexit.network.boundary import Column, Encoded
from earlyexit.sequences.sequence import step_of

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_FILES = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)
"""What of a checkpoint's folder says how messages are written, under the names that `transformers` gives them."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""What templates may call tokens by."""

Message = Mapping[str, str]
"""At least a `role` and its `content`."""


def read_chat_template(folder: Path) -> Callable[..., str] | None:
    """Returns what writes `messages` and the beginning of the answer, by the template in a model's folder, or None.

    Raises ModelFolderError for an invalid template.
    """
    config_path, template_path = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        source = template_path.read_text(encoding="utf-8") if template_path.is_file() else _default(config)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{folder}: its chat template cannot be read: {error}") from error
    if source is None:
        return None
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        template = environment.from_string(source)
    except TemplateError as error:
        raise ModelFolderError(f"{folder}: its chat template is none: {error}") from error
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name)}  # each a text or an object
    texts = {name: str(each["content"] if isinstance(each, dict) else each) for name, each in named.items()}
    return partial(template.render, add_generation_prompt=True, **texts)


def _default(config: Mapping[str, Any]) -> str | None:
    """Returns the template in a tokenizer's configuration; of several templates the default one."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    return None if found is None else str(found)


def _to_json(value: object, **options: Any) -> str:
    """Returns JSON without jinja2's own escaping, which is for HTML; options as those of `json.dumps`."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise TemplateError(message)


def copy_chat_files(source: Path, folder: Path) -> None:
    """Copy the chat files that a checkpoint's folder has."""
    for name in CHAT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_chat_files(hf_tokenizer: Any, folder: Path) -> None:
    """Write the template and named tokens of a tokenizer that `transformers` has loaded, such as from a GGUF file."""
    template = hf_tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    named = {name: getattr(hf_tokenizer, name) for name in NAMED_TOKENS if getattr(hf_tokenizer, name, None)}
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


Prompt: TypeAlias = str | tuple[int, ...]
"""A text, or its tokens."""
LEFT, RIGHT = "\ue00b", "\ue00c"
"""Characters of Unicode's private use, put around text that looks like a special token; removed from texts."""


class PromptCodec(Codec[Prompt]):
    """Prompts to token ids, int32 per token, and the run that they are, see `run_of`."""

    name = "prompt"
    reads_tokenizer = True
    inputs = (Column(name="text_input", datatypes=("BYTES",)),)
    row_schema = TEXT
    described = "One prompt, or a list of prompts."
    needed = "a prompt or a list of prompts, none of them empty,"

    def __init__(self, max_length: int) -> None:
        """`max_length`: of prompt and answer together, in tokens; raises ValueError below 2."""
        if max_length < 2:
            raise ValueError(f"max_length is {max_length}; a prompt and its answer have 2 tokens at least")
        self.max_length = max_length
        self._template: Callable[..., str] | None = None
        self.tokenizer: Tokenizer
        self._literal: Tokenizer
        self._special: Mapping[str, int]
        self._special_re: re.Pattern[str]

    def load(self, folder: Path) -> None:
        self.tokenizer, self._literal = read_tokenizer(folder), read_tokenizer(folder)
        self._literal.encode_special_tokens = True
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special and token.content}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template = read_chat_template(folder)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def tokens(self, text: str) -> tuple[int, ...]:
        """Returns a text's tokens, with the tokenizer's marks; the text itself cannot contain special tokens."""
        return tuple(self._literal.encode(text).ids)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens of messages and of the beginning of the answer, as `transformers`' `apply_chat_template`.

        The template writes all special tokens, the first one too; text like a special token in a message stays text.
        Raises InputError without a template, or for messages that it refuses.
        """
        if self._template is None:
            raise InputError(
                "messages: this model has no chat template; send a prompt to /v1/completions", param="messages"
            )
        marked = [{name: self._marked(value) for name, value in each.items()} for each in messages]
        try:
            text = self._template(messages=marked)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(
                f"messages: the model's chat template does not take them: {error}", param="messages"
            ) from error
        if LEFT not in text:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return tuple(token for piece in self._pieces(text) for token in piece)

    def _marked(self, text: str) -> str:
        """Returns a text with marks around everything that looks like a special token."""
        clean = text.replace(LEFT, "").replace(RIGHT, "")
        return self._special_re.sub(f"{LEFT}\\g<0>{RIGHT}", clean)

    def _pieces(self, text: str) -> list[list[int]]:
        """Returns tokens of a text whose special tokens are the template's, except those between marks."""
        pieces, begun = [], 0
        own = (found for found in self._special_re.finditer(text) if text[found.start() - 1 : found.start()] != LEFT)
        for found in own:
            pieces += [self._plain(text[begun : found.start()]), [self._special[found.group()]]]
            begun = found.end()
        return [*pieces, self._plain(text[begun:])]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._literal.encode(text.replace(LEFT, "").replace(RIGHT, ""), add_special_tokens=False).ids
        return ids

    def from_columns(self, columns: Columns) -> list[Prompt]:
        return list(texts_of(columns, "text_input"))

    def row_from_json(self, value: object, where: str) -> Prompt:
        if not isinstance(value, str) or not value:
            raise InputError(f"inputs: {self.needed} is needed")
        return value

    def is_slow(self, rows: Sequence[Prompt]) -> bool:
        return sum(map(len, rows)) > LONG_CHARS

    def encode(self, rows: Sequence[Prompt], *, truncate: bool = False) -> list[Encoded]:
        """Returns inputs of no sequence, for a single token; `TokenSequence` makes answers of several tokens."""
        return [self._encoded(k, row, truncate=truncate) for k, row in enumerate(rows)]

    def _encoded(self, k: int, row: Prompt, *, truncate: bool) -> Encoded:
        tokens = self.tokens(row) if isinstance(row, str) else row
        if not tokens:
            raise UnprocessableInputError(f"input {k} has no tokens")
        if len(tokens) > self.max_length and not truncate:
            raise UnprocessableInputError(f"input {k} has {len(tokens)} tokens, the model takes {self.max_length}")
        tokens = tokens[: self.max_length]
        return step_of(tokens, NO_SEQUENCE, 0, len(tokens), len(tokens))
