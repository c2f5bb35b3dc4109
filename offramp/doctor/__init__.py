"""What would keep a service from running well on this machine, and what to do about it; starts nothing."""

from __future__ import annotations
