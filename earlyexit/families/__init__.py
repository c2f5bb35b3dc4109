"""Families of networks that can be cut and left early; `base.py` holds the contract, one file per family beside it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from earlyexit.errors import ModelFolderError
from earlyexit.named import is_own

if TYPE_CHECKING:
    from earlyexit.families.base import Family

# Name -> where its Family is. A family is one file beside this one and one line here.
FAMILIES = {
    "bert": "earlyexit.families.bert:Bert",
    "distilbert": "earlyexit.families.distilbert:DistilBert",
    "resnet": "earlyexit.families.resnet:ResNet",
    "roberta": "earlyexit.families.roberta:Roberta",
}


def find_family(name: str) -> Family:
    """The family of that name, or anybody's own by `module:function`, imported now.

    Raises ModelFolderError with the known names.
    """
    if is_own(name):
        from earlyexit.families.own import OwnFamily

        return OwnFamily(name)
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelFolderError(f"unknown model family {name!r}; known: {known}, or your own as module:function")
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(import_module(module), attribute)()
    return family
