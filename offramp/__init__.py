"""Command line, clients and load generator of Offramp, early-exit model serving on Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offramp.client.client import AsyncClient, Client

    __version__: str

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    """Imports the clients on first use, so that `import offramp` loads no HTTP library."""
    if name == "__version__":
        return installed_version("offramp") or "0+uninstalled"  # a checkout that was never installed
    if name in __all__:
        from offramp.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
