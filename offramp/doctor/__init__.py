"""`offramp doctor`: checks whether a service would run well on this machine, and gives advice."""

from __future__ import annotations
