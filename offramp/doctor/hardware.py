"""Checks of what there is to compute with."""

from __future__ import annotations

from collections.abc import Iterator

from offramp.doctor.finding import Finding, failed, ok, size, warning
from offramp.doctor.machine import Machine

GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Ray's own processes, an ingress and a stage of MiniLM; less ends by the kernel's hand."""
GOOD_MEMORY_BYTES = 4 * GIB
"""The same with a second stage, and training beside it."""
LEAST_DISK_BYTES = GIB
"""Ray refuses to store objects on a disk that is 95 % full; logs and models need some too."""
GOOD_DISK_BYTES = 5 * GIB
LEAST_OPEN_FILES = 1024
GOOD_OPEN_FILES = 8192
"""A connection is a file to HAProxy and to an ingress, and so is a socket of Ray."""
UNLIMITED = -1
NATIVE_BFLOAT16 = {"avx512_bf16": "AVX-512", "amx_bf16": "AMX", "bf16": "Arm"}
"""Flags of processors that multiply bfloat16 themselves, and what that is called."""


def cores(machine: Machine) -> Iterator[Finding]:
    """The service and its load generator share them."""
    count = machine.hardware.cores
    if count < 2:
        yield warning(f"{count} core", "two or more: Ray's processes, the ingress and a stage share this one")
    else:
        yield ok(f"{count}")


def bfloat16(machine: Machine) -> Iterator[Finding]:
    """Whether `--dtype bfloat16` is worth it on this processor."""
    flags = machine.hardware.cpu_flags
    if flags is None:
        return
    native = [name for flag, name in NATIVE_BFLOAT16.items() if flag in flags]
    if native:
        yield ok(f"native ({', '.join(native)}): try --dtype bfloat16")
    else:
        yield ok("not native to this processor: float32 is faster on it")


def gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs, and whether torch can use them."""
    there, usable = machine.hardware.gpus, machine.hardware.gpus_of_torch
    if not there:
        yield ok("none; stages run on the processor")
    elif usable is None:
        yield ok(f"{_counted(there)}; torch has no CUDA")
    elif usable < len(there):
        yield warning(
            f"{_counted(there)}; torch can use {usable}",
            "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)",
        )
    else:
        yield ok(_counted(there))


def memory(machine: Machine) -> Iterator[Finding]:
    """What is free now."""
    free, total = machine.hardware.memory_free_bytes, machine.hardware.memory_total_bytes
    words = f"{size(free)} of {size(total)} free"
    if free < LEAST_MEMORY_BYTES:
        yield failed(words, f"{size(LEAST_MEMORY_BYTES)} are needed for the smallest service: end something else")
    elif free < GOOD_MEMORY_BYTES:
        yield warning(words, "enough for one or two replicas of a small model; docs/operate.md says what takes it")
    else:
        yield ok(words)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """/dev/shm against Ray's object store."""
    free, needed = machine.hardware.shm_free_bytes, machine.object_store_bytes
    if free is None:
        return
    if free < needed:
        yield warning(
            f"/dev/shm has {size(free)}, the object store takes {size(needed)}",
            "Ray puts it on disk, which is slow: docker run --shm-size=1g, or delete what lies in /dev/shm",
        )
    else:
        yield ok(f"/dev/shm has {size(free)} for {size(needed)}")


def disk(machine: Machine) -> Iterator[Finding]:
    """Where models, logs and objects go."""
    for folder, free in machine.hardware.disk_free_bytes.items():
        words = f"{folder} has {size(free)}"
        if free < LEAST_DISK_BYTES:
            yield failed(words, f"free {size(LEAST_DISK_BYTES)} at least")
        elif free < GOOD_DISK_BYTES:
            yield warning(words, "Ray's logs and a few models will fill it")
        else:
            yield ok(words)


def open_files(machine: Machine) -> Iterator[Finding]:
    """The limit of file descriptors; Ray raises its own up to the hard one."""
    if machine.hardware.open_files is None:
        return
    limit, highest = (float("inf") if each == UNLIMITED else each for each in machine.hardware.open_files)
    words = f"{limit:g} at once, can be raised to {highest:g}"
    if highest < LEAST_OPEN_FILES:
        yield failed(words, f"Ray needs {LEAST_OPEN_FILES}: LimitNOFILE of systemd, --ulimit nofile of Docker")
    elif limit < LEAST_OPEN_FILES or highest < GOOD_OPEN_FILES:
        yield warning(words, f"each connection takes one: ulimit -n {GOOD_OPEN_FILES}")
    else:
        yield ok(words)


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
