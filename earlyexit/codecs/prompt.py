"""What a model that generates goes on from: a text, tokens, or messages by the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from tokenizers import Tokenizer

from earlyexit.chat import ChatTemplate, Message
from earlyexit.codecs.base import Codec, Columns, texts_of
from earlyexit.codecs.text import LONG_CHARS, TEXT
from earlyexit.errors import InputError, ModelFolderError, UnprocessableInputError
from earlyexit.generation.sequence import step_of
from earlyexit.member import NO_SEQUENCE
from earlyexit.signature import Column, Encoded
from earlyexit.tokenizer import TOKENIZER_FILE

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
            raise InputError("messages: this model has no chat template; send a prompt to /v1/completions")
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
        """Of no sequence: whoever wants an answer of several tokens gives the tokens to one, see `generation`."""
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
