"""Text to token ids; needs `tokenizers` only, so that an ingress carries neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from earlyexit.errors import ModelFolderError, UnprocessableInputError

TOKENIZER_FILE = "tokenizer.json"
TokenIds = npt.NDArray[np.int32]


class TextTokenizer:
    """The model's tokenizer with its length limit."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        # Truncation is a state of a tokenizer, and other threads encode at the same time: the one that cuts is apart.
        self._cutting = Tokenizer.from_str(tokenizer.to_str())
        self._cutting.enable_truncation(max_length)
        self.max_length = max_length

    @classmethod
    def load(cls, folder: Path, max_length: int) -> TextTokenizer:
        """Read a model folder's tokenizer; raises ModelFolderError where there is none."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelFolderError(f"{path} is missing: Offramp needs the fast tokenizer's file")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, max_length)

    def encode(self, texts: Sequence[str], *, truncate: bool = False) -> list[TokenIds]:
        """Token ids, int32, special tokens included, of every text.

        Too long a text is cut if `truncate`, keeping its special tokens; else UnprocessableInputError names it.
        """
        # A batch wakes the tokenizer's thread pool, which a single text does not repay.
        encodings = [self._tokenizer.encode(texts[0])] if len(texts) == 1 else self._batch(texts)
        too_long = [k for k, encoding in enumerate(encodings) if len(encoding.ids) > self.max_length]
        if too_long and not truncate:
            k = too_long[0]
            raise UnprocessableInputError(
                f"input {k} has {len(encodings[k].ids)} tokens, the model takes {self.max_length}; "
                'send "truncate": true to have it cut'
            )
        for k in too_long:
            encodings[k] = self._cutting.encode(texts[k])
        empty = next((k for k, encoding in enumerate(encodings) if not encoding.ids), None)
        if empty is not None:
            raise UnprocessableInputError(f"input {empty} has no tokens")
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _batch(self, texts: Sequence[str]) -> list[Encoding]:
        encodings: list[Encoding] = self._tokenizer.encode_batch_fast(list(texts))
        return encodings
