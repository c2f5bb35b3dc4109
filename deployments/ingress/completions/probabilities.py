"""How likely tokens were, as OpenAI's two routes say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from earlyexit.generation.sequence import Said

LEAST = -9999.0
"""OpenAI's word for what is as good as impossible; JSON has no infinite numbers."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Probabilities:
    """Tokens with their texts and log-probabilities, and the likeliest ones beside them."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int) -> None:
        self._tokenizer = tokenizer
        self._num_likeliest = num_likeliest

    def of_chat(self, said: Sequence[Said]) -> dict[str, Any]:
        """`logprobs` of a message's choice."""
        return {
            "content": [
                {
                    **self._entry(each.chosen.token, each.chosen.log_probability),
                    "top_logprobs": [self._entry(token, value) for token, value in self._likeliest(each)],
                }
                for each in said
            ]
        }

    def of_text(self, said: Sequence[Said], offset: int) -> dict[str, Any]:
        """`logprobs` of a text's choice; `offset`: characters before it."""
        texts = [self._text(each.chosen.token) for each in said]
        offsets = [offset + sum(map(len, texts[:k])) for k in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [_bounded(each.chosen.log_probability) for each in said],
            "top_logprobs": [{self._text(token): value for token, value in self._likeliest(each)} for each in said]
            if self._num_likeliest
            else None,
            "text_offset": offsets,
        }

    def _likeliest(self, said: Said) -> list[tuple[int, float]]:
        tokens_k, log_probabilities_k = said.likeliest_2k[:, : self._num_likeliest]
        pairs = zip(tokens_k.tolist(), log_probabilities_k.tolist(), strict=True)
        return [(int(token), _bounded(value)) for token, value in pairs]

    def _entry(self, token: int, log_probability: float) -> dict[str, Any]:
        text = self._text(token)
        is_whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": _bounded(log_probability),
            "bytes": list(text.encode()) if is_whole else None,
        }

    def _text(self, token: int) -> str:
        """Alone: of half a character it is the sign for what cannot be read."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        begins_word = (self._tokenizer.id_to_token(token) or "").startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins_word else text


def _bounded(log_probability: float) -> float:
    return max(log_probability, LEAST) if math.isfinite(log_probability) else LEAST
