"""Runs an HAProxy before ingresses, configured as by Serve, for tests whose Ray has Serve's own proxy.

The arguments are the ports of the ingresses. It prints its own port, and ends at the end of standard input.
"""

from __future__ import annotations

import asyncio
import sys
from tempfile import TemporaryDirectory

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from tests.free_port import free_port

HOST = "127.0.0.1"


async def main(ports: list[int]) -> None:
    servers = [ServerConfig(name=f"ingress-{port}", host=HOST, port=port) for port in ports]
    backend = BackendConfig(name="service", path_prefix="/", app_name="service", servers=servers)
    with TemporaryDirectory() as folder:
        config = HAProxyConfig(
            http_options=HTTPOptions(host=HOST, port=free_port()),
            socket_path=f"{folder}/admin.sock",
            stats_port=free_port(),
            metrics_port=free_port(),
            metrics_enabled=False,
            has_received_routes=True,
            has_received_servers=True,
        )
        haproxy = HAProxyApi(config, {backend.name: backend}, config_file_path=f"{folder}/haproxy.cfg")
        await haproxy.start()
        try:
            sys.stdout.write(f"{config.frontend_port}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)
        finally:
            await haproxy.stop()


if __name__ == "__main__":
    asyncio.run(main([int(port) for port in sys.argv[1:]]))
