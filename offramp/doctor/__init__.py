"""What would keep a service from running well on this machine, and what to do about it; starts nothing.

`look.py` gathers facts, `machine.py` holds them, `checks.py` judges them without touching the machine.
"""

from __future__ import annotations
