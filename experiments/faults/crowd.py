"""What a crowd of callers that ask nothing, or never finish asking, does to those who ask, and to the server's memory.

    python -m experiments.faults.crowd                    # our HTTP server alone, in a process of its own (1 minute)
    python -m experiments.faults.crowd --url URL --pid PID

Idle connections, then heads and bodies that come byte by byte, then heads without end; beside each a caller that asks
again and again. Prints its latency, the server's memory and its processor time.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import numpy as np
import psutil

from experiments.kit import show
from experiments.peers.client import ROOT

BODY = b'{"inputs": "turn on the light"}'
GOOD = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
SLOW_HEAD = b"POST /predict HTTP/1.1\r\nX-Slow: "
SLOW_BODY = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"
BOMB = b"X-Bomb: " + b"b" * 1000 + b"\r\n"
PAUSE_S = 0.005
"""Between the requests of the one who asks."""
SERVE = """
import asyncio, socket, uvloop
from deployments.ingress.server.server import HttpServer
async def app(scope, receive, send):
    while (await receive()).get("more_body"): pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})
async def main():
    server = HttpServer(app, outright=True)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    await server.listen([bound])
    print(bound.getsockname()[1], flush=True)
    await server.serve()
uvloop.run(main())
"""


async def ask(address: tuple[str, int], seconds: float) -> tuple[float, float]:
    """Ask for so long; the median and the 99th percentile of the latency, seconds."""
    reader, writer = await asyncio.open_connection(*address)
    took_s, until_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        writer.write(GOOD)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        took_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(PAUSE_S)
    writer.close()
    return float(np.percentile(took_s, 50)), float(np.percentile(took_s, 99))


@asynccontextmanager
async def crowd(address: tuple[str, int], number: int, first: bytes, drip: bytes) -> AsyncIterator[list[int]]:
    """So many connections that send `first`, and of `drip` again and again; how many were closed on them."""
    closed = [0]

    async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            writer.write(drip)
            try:
                await asyncio.wait_for(reader.read(1000), 1.0)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        closed[0] += 1

    callers = [await asyncio.open_connection(*address) for _ in range(number)]
    for _, writer in callers:
        writer.write(first)
    tasks = [asyncio.create_task(go_on(*caller)) for caller in callers] if drip else []
    try:
        yield closed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer in callers:
            writer.close()
        await asyncio.sleep(0.5)


async def measure(address: tuple[str, int], server: psutil.Process, number: int, seconds: float) -> None:
    """Print a row per crowd."""
    crowds: tuple[tuple[str, int, bytes, bytes], ...] = (
        ("nobody", 0, b"", b""),
        (f"{number} idle", number, b"", b""),
        (f"{number // 20} slow heads", number // 20, SLOW_HEAD, b"a"),
        (f"{number // 20} slow bodies", number // 20, SLOW_BODY, b"a"),
        (f"{number // 20} heads without end", number // 20, b"GET / HTTP/1.1\r\n", BOMB * 100),
        ("nobody, after all that", 0, b"", b""),
    )
    rows = []
    for name, count, first, drip in crowds:
        async with crowd(address, count, first, drip) as closed:
            times = server.cpu_times()
            p50_s, p99_s = await ask(address, seconds)
            after = server.cpu_times()
            busy = (after.user + after.system - times.user - times.system) / seconds
            rows.append((name, 1e3 * p50_s, 1e3 * p99_s, server.memory_info().rss / 2**20, busy, closed[0]))
    show("Who asks beside a crowd", ("beside", "p50 ms", "p99 ms", "memory, MiB", "cores", "closed on"), rows)


@contextmanager
def own_server() -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """Our HTTP server around an application that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield ("127.0.0.1", int(process.stdout.readline())), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Parse, serve where nothing else does, measure."""
    parser = ArgumentParser(prog="python -m experiments.faults.crowd", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a service; else our HTTP server alone")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--number", type=int, default=10_000, help="idle connections")
    parser.add_argument("--seconds", type=float, default=5.0, help="beside each crowd")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.url is None:
        with own_server() as (address, server):
            asyncio.run(measure(address, server, options.number, options.seconds))
        return
    parts = urlsplit(options.url)
    address = (socket.gethostbyname(parts.hostname or "127.0.0.1"), parts.port or 80)
    asyncio.run(measure(address, psutil.Process(options.pid), options.number, options.seconds))


if __name__ == "__main__":
    main()
