"""What there is to compute with, as the system tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from cluster.memory import machine_memory
from earlyexit.cpu import ISA, WITHOUT_TILES
from offramp.doctor.machine import Hardware

SHARED_MEMORY = Path("/dev/shm")
CPU_FACTS = Path("/proc/cpuinfo")
RAY_FOLDER = Path("/tmp/ray")
TORCH_S = 20.0
"""Importing torch's CUDA build takes 2 to 8 s where nothing is cached."""
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def look_at_hardware(*, ask_torch: bool) -> Hardware:
    """Cores, memory, GPUs, disks and limits; `ask_torch` how many GPUs it can use, where there are any."""
    total, free = machine_memory()
    gpus = _gpus()
    return Hardware(
        cores=_cores(),
        cpu_flags=_cpu_flags(),
        memory_total_bytes=total,
        memory_free_bytes=free,
        gpus=gpus,
        gpus_of_torch=_gpus_of_torch() if gpus and ask_torch else None,
        shm_free_bytes=psutil.disk_usage(str(SHARED_MEMORY)).free if SHARED_MEMORY.is_dir() else None,
        disk_free_bytes={
            str(folder): psutil.disk_usage(str(_there(folder))).free for folder in (Path.cwd(), RAY_FOLDER)
        },
        open_files=_open_files(),
    )


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_flags() -> frozenset[str] | None:
    if not CPU_FACTS.is_file():
        return None
    lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    if found is None:
        return None
    hidden = {"amx_bf16"} if os.environ.get(ISA) == WITHOUT_TILES else set()
    return frozenset(found.partition(":")[2].split()) - hidden


def _gpus() -> tuple[str, ...]:
    """By the driver's own tool: it makes no context on any."""
    said = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], limit_s=5.0)
    return tuple(line.strip() for line in said.splitlines() if line.strip())


def _gpus_of_torch() -> int:
    """In a process of its own, counted through NVML: no context is made."""
    said = _said([sys.executable, "-c", COUNT_GPUS], limit_s=TORCH_S, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    return int(said) if said.strip().isdigit() else 0


def _said(command: list[str], *, limit_s: float, **variables: str) -> str:
    """What a command prints; nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=True, env=os.environ | variables
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)
