"""Families of networks that can be cut and left early; `base.py` holds the contract, one file per family beside it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from earlyexit.errors import ModelFolderError

if TYPE_CHECKING:
    from earlyexit.families.base import Family

# Name -> where its Family is. A family is one file beside this one and one line here.
FAMILIES = {
    "bert": "earlyexit.families.bert:Bert",
    "distilbert": "earlyexit.families.distilbert:DistilBert",
    "roberta": "earlyexit.families.roberta:Roberta",
}


def find_family(name: str) -> Family:
    """The family of that name, imported now; raises ModelFolderError with the known names."""
    if name not in FAMILIES:
        raise ModelFolderError(f"unknown model family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(import_module(module), attribute)()
    return family
