from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from earlyexit.errors import ModelFolderError, UnprocessableInputError
from earlyexit.signature import Encoded
from earlyexit.tokenizer import TextTokenizer

VOCABULARY = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "pay": 4, "my": 5, "bill": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a word tokenizer that pads and truncates unless it is told not to."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def as_lists(encoded: list[Encoded]) -> list[list[int]]:
    assert [each.length for each in encoded] == [len(each.tensors[0]) for each in encoded]
    return [each.tensors[0].tolist() for each in encoded]


def test_texts_become_token_ids_with_special_tokens_and_without_padding(folder: Path) -> None:
    encoded = TextTokenizer.load(folder, max_length=8).encode(["pay my bill", "pay it", ""])
    assert as_lists(encoded) == [[1, 4, 5, 6, 2], [1, 4, 3, 2], [1, 2]]
    assert {each.tensors[0].dtype for each in encoded} == {np.dtype(np.int32)}


def test_no_texts_give_no_ids(folder: Path) -> None:
    assert TextTokenizer.load(folder, max_length=8).encode([]) == []


def test_a_text_that_is_too_long_is_refused_with_its_place_and_both_lengths(folder: Path) -> None:
    tokenizer = TextTokenizer.load(folder, max_length=4)
    with pytest.raises(UnprocessableInputError, match='input 1 has 5 tokens, the model takes 4; send "truncate": true'):
        tokenizer.encode(["pay bill", "pay my bill", "pay pay pay pay"])


def test_truncation_keeps_the_special_tokens(folder: Path) -> None:
    tokenizer = TextTokenizer.load(folder, max_length=4)
    assert as_lists(tokenizer.encode(["my", "pay my bill"], truncate=True)) == [[1, 5, 2], [1, 4, 5, 2]]


def test_truncation_of_one_text_does_not_outlast_it(folder: Path) -> None:
    tokenizer = TextTokenizer.load(folder, max_length=4)
    tokenizer.encode(["pay my bill"], truncate=True)
    with pytest.raises(UnprocessableInputError):
        tokenizer.encode(["pay my bill"])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing"):
        TextTokenizer.load(tmp_path, max_length=8)
