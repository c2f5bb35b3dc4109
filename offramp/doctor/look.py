"""Gathers what there is to know of this machine: reads, asks the system, starts nothing but a look at torch's GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from offramp.doctor.look_hardware import look_at_hardware
from offramp.doctor.look_network import look_at_ports, look_at_ray
from offramp.doctor.look_software import look_at_software
from offramp.doctor.machine import Machine, Target

DATA = "OFFRAMP_DATA"
DEFAULT_PORT = 8000


def look(named: Sequence[Path], ports: Sequence[int]) -> Machine:
    """Everything of this machine; what was `named` on the command line, and further ports that are wanted."""
    from deployments.serve_control import OBJECT_STORE_BYTES

    targets = _targets(named)
    said = [target.port for target in targets if target.port is not None]
    software = look_at_software()
    data = os.environ.get(DATA)
    return Machine(
        software=software,
        hardware=look_at_hardware(ask_torch=software.torch_cuda is not None),
        ports=look_at_ports(tuple(dict.fromkeys([*ports, *said])) or (DEFAULT_PORT,)),
        ray=look_at_ray(),
        object_store_bytes=OBJECT_STORE_BYTES,
        data=data,
        data_found=data is None or Path(data).is_dir(),
        targets=targets,
    )


def _targets(named: Sequence[Path]) -> tuple[Target, ...]:
    if not named:
        return ()
    from offramp.doctor.look_targets import look_at_target  # the readers load what they check with

    return tuple(look_at_target(path) for path in named)
