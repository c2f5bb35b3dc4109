"""Cards and tokenizers of two text models in a chain, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import TensorSpec
from earlyexit.network.store import CARD_FILE, ModelCard

LETTERS = "abcdefgh"
TOKEN_IDS = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)


def chained(
    root: Path, *, max_lengths: tuple[int, ...] = (8, 8), firsts: tuple[int, ...] = (4, 14), halves: bool = True
) -> ChainCodec:
    """Returns the codec of a chain of text models; network k maps the letter `a` to `firsts[k]`.

    With `halves`, the second model splits a text at every letter, the first at white space.
    """
    for k, (max_length, first) in enumerate(zip(max_lengths, firsts, strict=True)):
        folder = root / f"m{k}"
        folder.mkdir(parents=True)
        card = text_card(f"m{k}", max_length)
        (folder / CARD_FILE).write_text(card.model_dump_json(), encoding="utf-8")
        tokenizer_of(first, by_letter=halves and k > 0).save(str(folder / "tokenizer.json"))
    codec = find_codec(chain_spec(max_lengths), root)
    assert isinstance(codec, ChainCodec)
    return codec


def chain_spec(max_lengths: tuple[int, ...]) -> dict[str, Any]:
    """Returns the codec of the chain's card."""
    members = [{"name": "text", "max_length": length} for length in max_lengths]
    models = [f"m{k}" for k in range(len(members))]
    return {"name": "chain", "members": members, "models": models, "max_length": min(max_lengths)}


def text_card(name: str, max_length: int) -> ModelCard:
    """Returns the card of a model with two blocks."""
    return ModelCard(
        name=name,
        family="encoder",
        backbone={},
        codec={"name": "text", "max_length": max_length},
        task={"name": "label", "label_names": ["x", "y"]},
        boundaries=((TOKEN_IDS,),) * 2,
        inputs=(TOKEN_IDS,),
        ramp_style="light",
        pooling="first",
        head_style="light",
        head_pooling="first",
        ramps=(0,),
        num_blocks=2,
        provenance={},
    )


def tokenizer_of(first: int, *, by_letter: bool) -> Tokenizer:
    """Returns a tokenizer of words or letters that knows one letter, with `[CLS]` and `[SEP]` around them."""
    vocabulary = {"[CLS]": 1, "[SEP]": 2, "[UNK]": 3, **{letter: first + k for k, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    letters = pre_tokenizers.Split(Regex("[a-z]"), behavior="isolated")
    white = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([white, letters]) if by_letter else white
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer
