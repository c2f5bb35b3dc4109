"""Messages to the text of a prompt, by the template that came with a model. Without torch.

Templates are programs of whoever published the model: they run in jinja2's sandbox, in the environment that
`transformers` gives them (its `utils/chat_template_utils.py`), so that one template makes the same text in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from earlyexit.errors import InputError, ModelFolderError

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
            raise InputError(f"messages: the model's chat template does not take them: {error}") from error


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
