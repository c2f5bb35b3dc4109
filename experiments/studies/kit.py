"""All that a study needs: `from experiments.studies.kit import Bars, Comparison, Study, StudyResult, command`."""

from __future__ import annotations

from experiments.studies.command import command
from experiments.studies.picture import Bars, Box, Boxes, Lines, Picture
from experiments.studies.study import About, Comparison, Effort, How, Ratios, Study, StudyResult, largest_ratios, ratio

__all__ = [
    "About",
    "Bars",
    "Box",
    "Boxes",
    "Comparison",
    "Effort",
    "How",
    "Lines",
    "Picture",
    "Ratios",
    "Study",
    "StudyResult",
    "command",
    "largest_ratios",
    "ratio",
]
