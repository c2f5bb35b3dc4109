"""Network architectures that can be split and left early, called families. `base.py` has the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earlyexit.named import import_attribute, is_own, look_up

if TYPE_CHECKING:
    from earlyexit.families.base import Family

# Name -> import path of its Family. To add a family, write its class in this folder and add one line here.
FAMILIES = {
    "bert": "earlyexit.families.encoder:Bert",
    "camembert": "earlyexit.families.encoder:Roberta",
    "distilbert": "earlyexit.families.encoder:DistilBert",
    "exported": "earlyexit.foreign.torch_backbone:Exported",
    "llama": "earlyexit.families.decoder:Llama",
    "marian": "earlyexit.families.seq2seq:Marian",
    "mpnet": "earlyexit.families.encoder:MPNet",
    "onnx": "earlyexit.foreign.onnx_backbone:OnnxGraph",
    "resnet": "earlyexit.families.resnet:ResNet",
    "roberta": "earlyexit.families.encoder:Roberta",
    "t5": "earlyexit.families.seq2seq:T5",
    "vgg": "earlyexit.families.vgg:Vgg",
    "xlm-roberta": "earlyexit.families.encoder:Roberta",
}

# Family -> additional files in a model's folder. These families compute in float32 only (`Backbone.float32_only`).
FILES = {"exported": ("graph.json",), "onnx": ("graph.onnx", "graph.onnx.data")}
# Family -> description of the state dicts that it reads (`Family.from_state`), for error messages.
STATE_DICTS = {
    "resnet": "ResNet-18, 34, 50, 101 and 152 with torchvision's names (conv1, layer1.0.conv1, fc), and CIFAR's 6n + 2 "
    "family (conv1, layer1.0.conv1, linear)",
    "vgg": "VGG-11, 13, 16 and 19 with torchvision's names (features.0, classifier.0), with norms or without",
}

MEASURES_IMPORTANCE = ("bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta")
"""Families that can measure the attention that each token receives (`Backbone.measures_importance`)."""
GENERATES = ("llama", "marian", "t5")
"""Families that generate tokens, and keep keys and values of sequences (`Backbone.kept_bytes`)."""


def find_family(name: str) -> Family:
    """Imports and returns the family with a name, or a user's own family by `module:function`.

    Raises ModelFolderError with the known names for an unknown name.
    """
    if is_own(name):
        from earlyexit.families.own import OwnFamily

        return OwnFamily(name)
    family: Family = import_attribute(look_up(name, FAMILIES, "model family"))()
    return family
