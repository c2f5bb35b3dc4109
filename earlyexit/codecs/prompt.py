"""The codec of generative models: prompts as text or tokens, and chat templates. Does not import torch.

Templates are programs by the publisher of the model, so they run in jinja2's sandbox. Their environment is that of
`transformers` (`utils/chat_template_utils.py`), so that a template renders the same text in both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from earlyexit.codecs.base import Codec, Columns, texts_of
from earlyexit.codecs.text import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, read_tokenizer, tokenize
from earlyexit.errors import InputError, ModelFolderError, raising
from earlyexit.network.boundary import Column, Encoded

TEMPLATE_FILE = "chat_template.jinja"
CHAT_FILES = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)
"""Files of a checkpoint that define its chat template, with the names that `transformers` uses."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Variables of templates whose values are special tokens."""

Message = Mapping[str, str]
"""A chat message with at least a `role` and a `content`."""


def read_chat_template(folder: Path) -> Callable[..., str] | None:
    """Returns a function that renders `messages` and the generation prompt by the template in a model's folder.

    Returns None if there is no template. Raises ModelFolderError for an invalid template.
    """
    config_path, template_path = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        source = template_path.read_text(encoding="utf-8") if template_path.is_file() else _default(config)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{folder}: its chat template cannot be read: {error}") from error
    if source is None:
        return None
    with raising(ModelFolderError, f"{folder}: its chat template is invalid", TemplateError):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's escapes HTML
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # `{% generation %}` marks answers for training. Like `with`, it only has its own variables.
        template = environment.from_string(re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", source))
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name)}  # values are strings or objects
    texts = {name: str(token["content"] if isinstance(token, dict) else token) for name, token in named.items()}
    return partial(template.render, tools=None, documents=None, add_generation_prompt=True, **texts)


def _default(config: Mapping[str, Any]) -> str | None:
    """Returns the template in a tokenizer's configuration. If there are several, it is the one named `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return None if template is None else str(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def copy_chat_files(source: Path, folder: Path) -> None:
    """Copy the chat files that a checkpoint's folder has."""
    for name in CHAT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_chat_files(hf_tokenizer: Any, folder: Path) -> None:
    """Writes the template and the options of a tokenizer that `transformers` has loaded, such as from a GGUF file."""
    template = hf_tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    options = {name: getattr(hf_tokenizer, name, None) for name in (*NAMED_TOKENS, "truncation_side")}
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


LEFT, RIGHT = "\ue00b", "\ue00c"
"""Private-use characters that mark text in messages which looks like a special token. They are removed afterwards."""


class PromptCodec(Codec[str]):
    """Encodes prompts to token ids. A `TokenSequence` makes inputs of them: see `step_of`."""

    name = "prompt"
    reads_tokenizer = True
    inputs = (Column(name="text_input", datatypes=("BYTES",)),)

    def __init__(self, max_length: int) -> None:
        """`max_length`: tokens of prompt and answer together; raises ValueError below 2."""
        if max_length < 2:
            raise ValueError(f"max_length is {max_length}; a prompt and its answer have at least 2 tokens")
        self.max_length = max_length
        self._template: Callable[..., str] | None = None

    def load(self, folder: Path) -> None:
        self.tokenizer, self._literal = (read_tokenizer(folder / TOKENIZER_FILE) for _ in range(2))
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
        """Returns a text's tokens, with added ones; none if it is empty. Special tokens in it become plain text."""
        return tuple(tokenize(self._literal, text)[0].ids) if text else ()

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens of messages and of the generation prompt, as `apply_chat_template` of `transformers`.

        All special tokens come from the template. Text in a message that looks like a special token is encoded as plain
        text. Raises InputError if there is no template, and for messages that the template refuses.
        """
        if self._template is None:
            raise InputError(
                "messages: this model has no chat template; send a prompt to /v1/completions", param="messages"
            )
        marked = [{name: self._marked(value) for name, value in message.items()} for message in messages]
        try:
            text = self._template(messages=marked)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}", param="messages") from error
        if LEFT not in text:
            return tuple(tokenize(self.tokenizer, text, add_special_tokens=False)[0].ids)
        return tuple(token for piece in self._pieces(text) for token in piece)

    def _marked(self, text: str) -> str:
        """Returns a text with marks around every part that looks like a special token."""
        clean = text.replace(LEFT, "").replace(RIGHT, "")
        return self._special_re.sub(f"{LEFT}\\g<0>{RIGHT}", clean)

    def _pieces(self, text: str) -> list[list[int]]:
        """Returns the tokens of a rendered text. Special tokens between marks are encoded as plain text."""
        pieces, start = [], 0
        for found in self._special_re.finditer(text):
            if text[found.start() - 1 : found.start()] == LEFT:
                continue
            pieces += [self._plain(text[start : found.start()]), [self._special[found.group()]]]
            start = found.end()
        return [*pieces, self._plain(text[start:])]

    def _plain(self, text: str) -> list[int]:
        return list(tokenize(self._literal, text.replace(LEFT, "").replace(RIGHT, ""), add_special_tokens=False)[0].ids)

    def from_columns(self, columns: Columns) -> list[str]:
        return texts_of(columns, "text_input")

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        raise InputError("this model generates text: its inputs are the steps of a sequence")
