"""Which version answers a request that names none. Pure."""

from __future__ import annotations

import struct
from hashlib import blake2b

from pydantic import BaseModel, ConfigDict

from deployments.ingress.api.orders import Canary, Version

WHOLE = 2**32


class Traffic(BaseModel):
    """What a model's requests without a version get."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    default: Version | None = None
    """None: the version at the address that was asked."""
    canary: Canary | None = None


def draws(request_id: str) -> tuple[float, float]:
    """Two numbers from 0 to 1 that follow from a request's id: one for `share`, one for `compare_share`.

    Not random: a request that is sent again gets the version of the first time, in whatever ingress, and those of a
    small share are among those of a larger one.
    """
    first, second = struct.unpack("<II", blake2b(request_id.encode(), digest_size=8).digest())
    return first / WHOLE, second / WHOLE
