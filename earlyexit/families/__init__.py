"""Families of networks that can be cut and left early; `base.py` holds the contract, files of families beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earlyexit.named import import_attribute, is_own, look_up

if TYPE_CHECKING:
    from earlyexit.families.base import Family

# Name -> where its Family is. A family is a class in a file beside this one and one line here.
FAMILIES = {
    "bert": "earlyexit.families.encoder:Bert",
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
}

# Family -> the files in a model's folder that its network consists of, beside what all models have.
FILES = {"exported": ("graph.json",), "onnx": ("graph.onnx", "graph.onnx.data")}
# Family -> the state dicts that it reads (`Family.from_state`), for error messages.
STATE_DICTS = {
    "resnet": "ResNet-18, 34, 50, 101 and 152 with torchvision's names (conv1, layer1.0.conv1, fc), and CIFAR's 6n + 2 "
    "family (conv1, layer1.0.conv1, linear)",
    "vgg": "VGG-11, 13, 16 and 19 with torchvision's names (features.0, classifier.0), with norms or without",
}
FLOAT32_ONLY = ("exported", "onnx")
"""Families whose networks run in float32 whatever type is asked for, known before one is loaded."""

MEASURES_IMPORTANCE = ("bert", "distilbert", "mpnet", "roberta")
"""Families whose networks tell how much attention every token receives (`Backbone.measures_importance`)."""
GENERATES = ("llama", "marian", "t5")
"""Families whose networks answer by tokens alone, known before one is loaded (`Backbone.kept_bytes`)."""


def find_family(name: str) -> Family:
    """Returns the family of that name, or a user's own by `module:function`; both are imported now.

    Raises ModelFolderError for an unknown name; the message lists the known ones.
    """
    if is_own(name):
        from earlyexit.families.own import OwnFamily

        return OwnFamily(name)
    family: Family = import_attribute(look_up(name, FAMILIES, "model family"))()
    return family
