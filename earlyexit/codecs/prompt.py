"""Prompts of models that generate: a text, tokens, or messages by the model's chat template. This needs no torch.

Templates are programs by the publisher of the model. They run in jinja2's sandbox, in the environment that
`transformers` gives them (its `utils/chat_template_utils.py`), so that one template makes the same text in both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from earlyexit.codecs.base import Codec, Columns, texts_of
from earlyexit.codecs.text import LONG_CHARS, TEXT
from earlyexit.codecs.tokenizer import TOKENIZER_FILE
from earlyexit.engine.queue import NO_SEQUENCE
from earlyexit.errors import InputError, ModelFolderError, UnprocessableInputError
from earlyexit.network.wire import Column, Encoded
from earlyexit.sequences.sequence import step_of

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_FILES = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)
"""What of a checkpoint's folder says how messages are written, under the names that `transformers` gives them."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""What templates may call tokens by."""

Message = Mapping[str, str]
"""At least a `role` and its `content`."""


class ChatTemplate:
    """A compiled template and the tokens that it knows by name."""

    def __init__(self, template: Template, tokens: Mapping[str, str]) -> None:
        self._template = template
        self._tokens = tokens

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """That of a model's folder; None where the model has none. Raises ModelFolderError for what cannot be read."""
        config_path, template_path = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
            source = template_path.read_text(encoding="utf-8") if template_path.is_file() else _default(config)
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise ModelFolderError(f"{folder}: its chat template cannot be read: {error}") from error
        if source is None:
            return None
        try:
            template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelFolderError(f"{folder}: its chat template is none: {error}") from error
        return cls(template, {name: _text(config[name]) for name in NAMED_TOKENS if config.get(name)})

    def render(self, messages: Sequence[Message]) -> str:
        """All of them, and the beginning of the answer; raises InputError for roles or orders that it refuses."""
        try:
            said = [dict(message) for message in messages]
            return self._template.render(messages=said, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(
                f"messages: the model's chat template does not take them: {error}", param="messages"
            ) from error


def _default(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer's configuration; where there are several, that of plain conversations."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    return None if found is None else str(found)


def _text(token: Any) -> str:
    """A token of a configuration: its text, or an object that has it."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now_in_words
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's own escaping, which is made for pages of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now_in_words(form: str) -> str:
    return datetime.now().strftime(form)


def copy_chat_files(source: Path, folder: Path) -> None:
    """From a checkpoint's folder, those that are there."""
    for name in CHAT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_chat_files(hf_tokenizer: Any, folder: Path) -> None:
    """Of a tokenizer that `transformers` has loaded, out of a GGUF file say: its template, and the names of tokens."""
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
"""Of Unicode's private use: around what only looks like a special token. Texts lose them."""


class PromptCodec(Codec[Prompt]):
    """Prompts to token ids, int32 per token, and the run that they are, see `run_of`."""

    name = "prompt"
    reads_tokenizer = True
    inputs = (Column(name="text_input", datatypes=("BYTES",)),)
    json_schema: ClassVar[Mapping[str, Any]] = {
        "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
        "description": "One prompt, or a list of prompts.",
    }

    def __init__(self, max_length: int) -> None:
        """`max_length`: of prompt and answer together, in tokens; raises ValueError below 2."""
        if max_length < 2:
            raise ValueError(f"max_length is {max_length}; a prompt and its answer have 2 tokens at least")
        self.max_length = max_length
        self._template: ChatTemplate | None = None
        self._tokenizer: Tokenizer
        self._literal: Tokenizer
        self._special: Mapping[str, int]
        self._special_re: re.Pattern[str]

    def load(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelFolderError(f"{path} is missing: Offramp needs the fast tokenizer's file")
        self._tokenizer, self._literal = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
        for each in (self._tokenizer, self._literal):
            each.no_padding()
            each.no_truncation()
        self._literal.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special and token.content}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template = ChatTemplate.load(folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """For the way back, from tokens to text."""
        return self._tokenizer

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def tokens(self, text: str) -> tuple[int, ...]:
        """A text's, with the marks that the tokenizer puts around texts; none of a text's own makes a special token."""
        return tuple(self._literal.encode(text).ids)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of messages and of the beginning of the answer, as `transformers`' `apply_chat_template` has them.

        The template writes all marks, the first one too, and what looks like one within a message stays text. Raises
        InputError where the model has no template, or the template takes no such messages.
        """
        if self._template is None:
            raise InputError(
                "messages: this model has no chat template; send a prompt to /v1/completions", param="messages"
            )
        text = self._template.render([{name: self._marked(value) for name, value in each.items()} for each in messages])
        if LEFT not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return tuple(token for piece in self._pieces(text) for token in piece)

    def _marked(self, text: str) -> str:
        """Wherever a text has a special token's own words, they stand between marks."""
        clean = text.replace(LEFT, "").replace(RIGHT, "")
        return self._special_re.sub(f"{LEFT}\\g<0>{RIGHT}", clean)

    def _pieces(self, text: str) -> list[list[int]]:
        """Tokens of a text whose special tokens are the template's own, but for those between marks."""
        pieces, begun = [], 0
        own = (found for found in self._special_re.finditer(text) if text[found.start() - 1 : found.start()] != LEFT)
        for found in own:
            pieces += [self._plain(text[begun : found.start()]), [self._special[found.group()]]]
            begun = found.end()
        return [*pieces, self._plain(text[begun:])]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._literal.encode(_unmarked(text), add_special_tokens=False).ids
        return ids

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "max_length": self.max_length}

    def from_columns(self, columns: Columns) -> list[Prompt]:
        return list(texts_of(columns, "text_input"))

    def from_json(self, inputs: object) -> tuple[list[Prompt], bool]:
        many = isinstance(inputs, list)
        rows = inputs if isinstance(inputs, list) else [inputs]
        if not rows or not all(isinstance(row, str) and row for row in rows):
            raise InputError("inputs: a prompt or a list of prompts is needed, none of them empty")
        return list(rows), many

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


def _unmarked(text: str) -> str:
    return text.replace(LEFT, "").replace(RIGHT, "")
