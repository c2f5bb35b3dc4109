"""Plans, the planner and exit thresholds: pure decisions, without torch and ray."""

from typing import Literal

Strategy = Literal["best", "stock", "early-exit", "e3", "serial", "apparate", "pame"]
"""The names of the planner's strategies; `optimizer.search.space.SPACES` has their spaces."""
