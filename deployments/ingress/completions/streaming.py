"""A sequence to its caller over HTTP, token by token or as a whole; whoever leaves ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.ingress.api.endpoint import json_response
from deployments.ingress.api.face import FAILED, log_error
from deployments.ingress.completions.forms import Form
from deployments.ingress.completions.told import Stretch, Telling
from deployments.ingress.generation.stream import CutShortError, Stream
from deployments.quiet import WithoutWords
from earlyexit.errors import OfframpError
from earlyexit.generation.sequence import Said

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""No proxy may gather events, compress or keep them."""


class Departure:
    """Aborts a sequence when its caller leaves, also while nothing is said."""

    def __init__(self, receive: Receive, abort: Callable[[], None]) -> None:
        """Watches from now on, until it is closed; the request's body has been read."""
        self._task = asyncio.get_running_loop().create_task(self._watch(receive, abort))

    async def _watch(self, receive: Receive, abort: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abort()

    def close(self) -> None:
        """Watch no longer."""
        self._task.cancel()


async def respond(stream: Stream, receive: Receive, form: Form, *, streams: bool, request_id: str) -> Response:
    """The answer, begun when the first token is there: what goes wrong before it is raised, and has a status.

    Raises what the stream does, and ClientDisconnect where the caller left.
    """
    departure = Departure(receive, stream.abort)
    try:
        first = await _next(stream)
        if streams:
            return TokenStream(stream, first, departure, form, request_id)
        response = await _whole(stream, first, form)
    except BaseException:
        _close(stream, departure)
        raise
    _close(stream, departure)
    return response


async def _whole(stream: Stream, first: Said, form: Form) -> Response:
    telling = Telling(num_prompt=stream.num_prompt)
    part, parts = telling.take(first), []
    while True:
        parts += [] if part is None else [part]
        if telling.ended is not None:
            return json_response(form.whole(telling, parts, telling.rest()))
        part = await _next_part(stream, telling)


async def _next_part(stream: Stream, telling: Telling) -> Stretch | None:
    """The text of what is said next; None where that brings no text. Raises what `_next` raises."""
    try:
        return telling.take(await _next(stream))
    except CutShortError as error:
        return telling.cut(error)


async def _next(stream: Stream) -> Said:
    """What is said next; raises ClientDisconnect where nobody listens."""
    try:
        return await anext(stream)
    except StopAsyncIteration:  # it was aborted: sequences end with a word
        raise ClientDisconnect from None


def _close(stream: Stream, departure: Departure) -> None:
    departure.close()
    stream.abort()


class TokenStream(Response):
    """Server-sent events, each on its way as soon as there is text; who reads slowly is waited for."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, first: Said, departure: Departure, form: Form, request_id: str) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._stream = stream
        self._first = first
        self._departure = departure
        self._form = form
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._tell(send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            _close(self._stream, self._departure)

    async def _tell(self, send: Send) -> None:
        form, telling = self._form, Telling(num_prompt=self._stream.num_prompt)
        begun, part = b"".join(form.begin()), telling.take(self._first)
        try:
            while True:
                if part is not None or begun:
                    await _send(send, begun + (b"" if part is None else form.part(part)))
                    begun = b""
                if telling.ended is not None:
                    break
                part = await _next_part(self._stream, telling)
            await _send(send, b"".join(form.end(telling, telling.rest())))
        except ClientDisconnect:
            return
        except OfframpError as error:
            log_error(logger, self._request_id, error)
            await _send(send, b"".join(form.error(error.kind, str(error), error.http_status)))
        except Exception:
            logger.exception("request %s: a stream broke off", self._request_id, extra={"request_id": self._request_id})
            await _send(send, b"".join(form.error("internal", FAILED, 500)))


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
