"""`offramp generate`: a text from a running service, as it is said, coloured by where its tokens left."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from offramp.cli.options import ApiKeyFile, Seed, Url, above_zero
from offramp.client.credentials import find_api_key

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.client.generation import Generation, Prompt

COLOURS = ("bright_green", "bright_cyan", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")
"""Of the ramps, the earliest first, over and over; what went through all blocks has the terminal's own."""


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer, or with --raw to go on with.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(callback=above_zero, help="Draw of the likeliest of so much.")] = 1.0,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be said again.")] = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Colour tokens by where they left; a table at the end.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(callback=above_zero, help="For the first text, and between two.")] = 120.0,
    url: Url = "http://127.0.0.1:8000",
    api_key_file: ApiKeyFile = None,
) -> None:
    """Ask a running service whose model generates, and print the answer as it comes."""
    from rich.console import Console

    from offramp.client.client import Client

    with Client(url, timeout_s, api_key=find_api_key(api_key_file)) as client:
        ours = client.generates()["offramp"]
        asked: Prompt = prompt if raw or not ours["chats"] else [{"role": "user", "content": prompt}]
        colours = colours_of(ours["ramps"]) if exits else {}
        with client.stream(
            asked, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop or ()
        ) as pieces:
            console = Console(highlight=False)
            for piece in pieces:
                style = colours.get(piece.exits[-1]) if piece.exits else None
                console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
            console.print()
            if exits:
                console.print(table_of(pieces.whole(), colours, ours["num_blocks"]))
            if (cut_short := pieces.whole().cut_short) is not None:
                print(f"note: {cut_short}", file=sys.stderr)


def colours_of(ramps: Iterable[int]) -> Mapping[int, str]:
    """By the block that a ramp is after."""
    return {block: COLOURS[k % len(COLOURS)] for k, block in enumerate(sorted(ramps))}


def table_of(found: Generation, colours: Mapping[int, str], num_blocks: int) -> Table:
    """Returns the number of tokens that left after each ramp or ran all blocks, in the ramps' colours."""
    from rich.table import Table

    table = Table(title=f"{len(found.exits)} tokens after {found.num_prompt}, ended by {found.ended}")
    table.add_column("left after block", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    for block, number in sorted(Counter(found.exits).items()):
        share = f"{number / len(found.exits):.1%}"
        name = "all blocks" if block == num_blocks - 1 else str(block)
        table.add_row(name, str(number), share, style=colours.get(block))
    return table
