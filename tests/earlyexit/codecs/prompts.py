"""A small tokenizer with special tokens, which begins every text, and a chat template in the way of SmolLM2's."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from earlyexit.codecs.prompt import PromptCodec

BEGIN, START, END = 256, 257, 258
TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ bos_token }}{% if tools is not none %}tools{% endif %}{% for message in messages %}{{'<|start|>' + message.role"
    " + '\n'}}{%- generation %}{{ message['content'] + '<|end|>' }}{% endgeneration -%}{{'\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A token per byte, of which many are no characters by themselves."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: k for k, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def marked_tokenizer() -> Tokenizer:
    """A token per byte, and three marks; the first begins every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<|begin|>", "<|start|>", "<|end|>")])
    tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
    )
    return tokenizer


def prompt_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A model's folder, as far as prompts go."""
    folder.mkdir(parents=True, exist_ok=True)
    marked_tokenizer().save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def prompt_codec(folder: Path, *, template: str | None = TEMPLATE, max_length: int = 128) -> PromptCodec:
    """Returns a loaded codec."""
    codec = PromptCodec(max_length)
    codec.load(prompt_folder(folder, template=template))
    return codec
