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
        return _installed_version()
    if name in __all__:
        from offramp.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("offramp")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+uninstalled"
