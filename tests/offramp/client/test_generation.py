"""Clients of generated text with our own HTTP server and scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from earlyexit.errors import ExecutionError, InputError, OfframpError
from offramp.cli.app import main
from offramp.client.client import AsyncClient, Client
from tests.deployments.ingress.completions.generating import CUT_SHORT, Teller, listening
from tests.deployments.wire_fakes import until
from tests.earlyexit.codecs.prompts import prompt_codec

MESSAGES = [{"role": "user", "content": "Tell"}]


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path), answer="a 🐭!".encode())


async def with_client(teller: Teller, ask: Callable[[Client], object]) -> None:
    """Runs a blocking client in a thread, with a server on this event loop."""

    def run(port: int) -> None:
        with Client(f"http://127.0.0.1:{port}", 10.0, max_attempts=1) as client:
            ask(client)

    async with listening(teller) as port:
        await asyncio.to_thread(run, port)


async def test_texts_and_messages_are_answered_at_once_or_as_a_stream_with_their_exits(teller: Teller) -> None:
    def ask(client: Client) -> None:
        text = client.generate("Once", max_tokens=50, stop=["!"], request_id="r7")
        assert (text.text, text.ended, text.num_prompt) == ("a 🐭", "stop", 5)
        assert text.exits == (1, 3, 1, 3, 1, 3, 1)
        assert client.generate(MESSAGES, max_tokens=2).ended == "length"
        assert client.generates()["offramp"]["ramps"] == [0, 1, 2]

    await with_client(teller, ask)
    text, messages = teller.asked
    assert (text.request_id, text.sampling.temperature, text.stops) == ("r7", 0, ("!",))
    assert text.timeout_s is not None
    assert messages.prompt == teller.codec.chat(MESSAGES)

    def stream(client: Client) -> None:
        with client.stream("Once", max_tokens=50) as pieces:
            found = list(pieces)
        assert [(piece.text, piece.exits) for piece in found] == [
            ("a", (1,)),
            (" ", (3,)),
            ("🐭", (1, 3, 1, 3)),
            ("!", (1,)),
        ]
        assert pieces.result() == client.generate("Once", max_tokens=50)

    await with_client(teller, stream)


async def test_an_answer_that_a_time_limit_ends_names_the_limit(teller: Teller) -> None:
    permits, loop = asyncio.Semaphore(4), asyncio.get_running_loop()
    teller.cut_after, teller.may_say = 4, permits

    def ask(client: Client) -> None:
        loop.call_soon_threadsafe(loop.call_later, 0.3, permits.release)  # a server answers later than the timeout
        found = client.generate("Once", max_tokens=50, timeout_s=0.25)
        assert (found.ended, found.cut_short) == ("length", CUT_SHORT)
        teller.may_say = None
        with client.stream("Once", max_tokens=50, timeout_s=None) as pieces:
            list(pieces)
        assert pieces.result().cut_short == CUT_SHORT

    await with_client(teller, ask)
    assert [request.timeout_s is None for request in teller.asked] == [False, True]


async def test_the_asynchronous_client_does_the_same(teller: Teller) -> None:
    teller.answer = "a\u2028🐭\x85!".encode()  # `splitlines` divides a text there
    async with listening(teller) as port, AsyncClient(f"http://127.0.0.1:{port}") as client:
        async with await client.stream(MESSAGES, max_tokens=50) as pieces:
            assert "".join([piece.text async for piece in pieces]) == teller.answer.decode()
        assert pieces.result() == await client.generate(MESSAGES, max_tokens=50)


async def test_errors_are_raised_before_a_stream_and_within_it(teller: Teller) -> None:
    def ask(client: Client) -> None:
        with pytest.raises(InputError, match="the prompt is empty"):
            client.generate("")
        with pytest.raises(InputError, match="the prompt must be a text, or a list of messages"):
            client.generate(["Once", "Up"])  # type: ignore[list-item] # as users do
        with pytest.raises(InputError, match="max_tokens is 500"):
            client.stream("Once", max_tokens=500)
        with client.stream("Once") as closed:
            pass
        with pytest.raises(OfframpError, match="broke off: Attempted to read"):
            list(closed)
        teller.breaks_after = 2
        with client.stream("Once", max_tokens=50) as pieces, pytest.raises(ExecutionError, match="the model failed"):
            list(pieces)

    await with_client(teller, ask)


async def test_closing_a_stream_ends_the_sequence(teller: Teller) -> None:
    teller.goes_on, teller.may_say = True, asyncio.Semaphore(1)

    def ask(client: Client) -> None:
        with client.stream("Once", max_tokens=50, request_id="r7") as pieces:
            next(iter(pieces))
        with pytest.raises(OfframpError, match="broke off"):
            pieces.result()

    await with_client(teller, ask)
    await until(lambda: bool(teller.aborted))
    assert teller.aborted == ["r7"]


async def test_the_command_prints_answers_and_their_exits(teller: Teller, capsys: pytest.CaptureFixture[str]) -> None:
    teller.answer = "a\t🐭!".encode()

    def run(port: int) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["generate", "Tell", "--exits", "--max-tokens", "50", "--url", f"http://127.0.0.1:{port}"])
        assert ended.value.code == 0

    async with listening(teller) as port:
        await asyncio.to_thread(run, port)
    printed = capsys.readouterr().out
    assert printed.startswith("a\t🐭!\n")
    rows = [line.replace("│", " ").split() for line in printed.splitlines() if "%" in line]
    assert rows == [["1", "4", "50.0%"], ["all", "blocks", "4", "50.0%"]]
    assert teller.asked[0].prompt == teller.codec.chat(MESSAGES)
