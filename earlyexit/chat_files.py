"""What a checkpoint says about prompts, put into a model's folder: how messages are written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from earlyexit.chat import CHAT_FILES, NAMED_TOKENS, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE


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
